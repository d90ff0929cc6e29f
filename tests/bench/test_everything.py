"""One call runs all measurements: results survive any interruption, and the next call resumes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from bench import everything
from bench.everything import FIGURES, PARTS, Part
from bench.workloads import WORKLOADS

COUNT = (
    "import pathlib, sys; file = pathlib.Path(sys.argv[1]); file.write_text(file.read_text() + "
    "'x' if file.exists() else 'x'); print('done')"
)
GOOD = Part("good-part", ("-c", COUNT, FIGURES), 60)
BAD = Part(
    "bad-part",
    ("-c", "import sys; print('first'); print('went wrong', file=sys.stderr); sys.exit(3)"),
    60,
)
ENDLESS = Part("endless", ("-c", "while True: pass"), 0)


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everything, "PARTS", (GOOD, BAD, ENDLESS))


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> object:
    """Its exit status."""
    monkeypatch.setattr(sys, "argv", ["everything", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        everything.main()
    return ended.value.code


@pytest.mark.full
def test_each_part_leaves_its_text_its_figures_and_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "--out", tmp_path) is True
    assert (tmp_path / "good-part.txt").read_text() == "done\n"
    assert (tmp_path / "good-part.json").read_text() == "x"
    assert (tmp_path / "bad-part.txt").read_text() == "first\nwent wrong\n"
    ended = json.loads((tmp_path / "parts.json").read_text())
    assert [ended[part.name]["status"] for part in (GOOD, BAD, ENDLESS)] == [0, 3, None]
    told = capsys.readouterr().out.splitlines()
    assert "passed after" in told[0]
    assert "failed with status 3 after" in told[1]
    assert told[1].endswith("went wrong")
    assert "ran out of time after" in told[2]


def test_a_part_that_has_passed_is_not_run_again_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, times in (([], 1), ([], 1), (["--again"], 2)):
        assert call(monkeypatch, "--out", tmp_path, "--parts", "good", *arguments) is False
        assert (tmp_path / "good-part.json").read_text() == "x" * times


@pytest.mark.full
def test_no_part_begins_that_may_not_end_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "--out", tmp_path, "--seconds", 59) is True
    assert not (tmp_path / "good-part.txt").exists()
    assert "left for another call: it may take 60 s" in capsys.readouterr().out


def test_an_unknown_part_is_reported_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        call(monkeypatch, "--parts", "goo")
        == "--parts goo: no such part; there are good-part, bad-part, endless"
    )


def test_without_a_folder_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(monkeypatch) == "--out DIR is needed to run them"


def test_all_workloads_are_measured_with_both_backends_and_no_name_stands_for_two() -> None:
    names = [part.name for part in PARTS]
    assert len(set(names)) == len(names)
    assert {
        f"{workload}-{attention}"
        for workload in WORKLOADS
        for attention in ("triton", "flash_attn")
    } <= set(names)
