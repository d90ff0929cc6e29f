"""`dovetail pull`."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from dovetail.cli.app import app
from tests.rounding import DEMO


def test_it_fetches_the_revision_and_prints_the_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    fetched = Mock(return_value=str(tmp_path))
    monkeypatch.setattr(hub, "snapshot_download", fetched)
    result = CliRunner().invoke(app, ["pull", "some/model@v2"])
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path}\n")
    assert fetched.call_args.args == ("some/model",)
    assert fetched.call_args.kwargs["revision"] == "v2"


def test_a_model_of_this_machine_is_fetched_from_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", Mock(side_effect=AssertionError))
    result = CliRunner().invoke(app, ["pull", "demo"])
    assert (result.exit_code, result.stdout) == (0, f"{DEMO}\n")
    assert result.stderr == "demo is on this machine\n"


def test_a_failure_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", Mock(side_effect=OSError("no network")))
    result = CliRunner().invoke(app, ["pull", "some/model"])
    assert result.exit_code == 2
    assert "no network" in result.stderr
