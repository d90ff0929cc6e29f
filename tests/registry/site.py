"""The `site` fixture, for every test of plugins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.registry.fakes import Site, modules_forgotten


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An empty folder on `sys.path`, and no `DOVETAIL_PLUGINS`."""
    monkeypatch.delenv("DOVETAIL_PLUGINS", raising=False)
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    with modules_forgotten(folder):
        yield Site(folder)
