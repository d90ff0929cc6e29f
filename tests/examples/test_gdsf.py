"""The example `dovetail-gdsf`: its own tests, and the suite of its kind over its manager.
`tests/third_party.sh` installs it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from dovetail.testing import run, runner
from tests.conformance import fewer
from tests.support import FULL

PACKAGE = Path(__file__).parents[2] / "examples/plugins/dovetail-gdsf"
sys.path.insert(0, str(PACKAGE / "src"))

THEIRS = runpy.run_path(str(PACKAGE / "tests/test_gdsf.py"))
globals().update({name: value for name, value in THEIRS.items() if name.startswith("test_")})


@pytest.mark.slow("runs the suite of the kind, in processes of their own, too")
def test_the_manager_conforms(monkeypatch: pytest.MonkeyPatch) -> None:
    from dovetail_gdsf.manager import GDSF

    if not FULL:
        monkeypatch.setattr(runner, "COMMAND", fewer.COMMAND)
    verdict = run("kv_cache", GDSF)
    assert verdict.conformant, verdict.line


def test_what_it_adds_to_the_prefix_cache_fits_on_a_page() -> None:
    lines = (PACKAGE / "src/dovetail_gdsf/manager.py").read_text().splitlines()
    assert len(lines) <= 30
