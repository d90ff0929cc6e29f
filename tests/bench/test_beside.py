"""`bench/beside.py` measures 21 workloads, each engine once for a model."""

from __future__ import annotations

import fcntl
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest
from bench.beside import BESIDE, Engines, models, table, visible


def row(workload: str, engine: str, seconds: float) -> dict[str, object]:
    return {"workload": workload, "engine": engine, "median_s": seconds, "tok_s": 100 / seconds}


def test_every_workload_runs_once_and_an_engine_serves_one_model() -> None:
    groups = models(list(BESIDE))
    assert sorted(name for group in groups for name in group) == sorted(BESIDE)
    assert len(BESIDE) == 21
    for group in groups:
        assert len({BESIDE[name].shape for name in group}) == 1


def test_no_two_runs_draw_the_same_token_ids() -> None:
    short = [replace(work, lens=((30, 1),), shared_prefix=0) for work in BESIDE.values()]
    begins = [tuple(work.prompts(seed)[0]) for work in short for seed in (0, 1, 2, 100)]
    assert len(set(begins)) == len(begins)


def test_only_the_workloads_asked_for_run() -> None:
    assert models(["one", "8b-one"]) == [["8b-one"], ["one"]]


def test_the_ratio_is_the_other_engines_time_over_ours() -> None:
    lines = table([row("one", "dovetail", 2.0), row("one", "vllm", 5.0)]).splitlines()
    assert lines[1].split() == ["one", "50", "2.000", "s", "20", "5.000", "s", "2.500"]


def test_a_workload_that_one_engine_did_not_reach_has_no_ratio() -> None:
    lines = table([row("one", "dovetail", 2.0)]).splitlines()
    assert lines[1].split() == ["one", "50", "2.000", "s"]


WRITES = (
    'import json, sys; print(json.dumps({"workload": sys.argv[1]}), file=open(sys.argv[2], "a"))'
)
WAITS = "import time; time.sleep(60)"
# What it starts outlives it, as an engine's own processes do, and holds the lock on a file.
LEAVES = f"""
import fcntl, subprocess, sys
file = open(sys.argv[2] + ".lock", "w")
fcntl.flock(file, fcntl.LOCK_EX)
subprocess.Popen([sys.executable, "-c", {WAITS!r}], pass_fds=[file.fileno()])
"""


class Fakes(Engines):
    """Processes that aren't engines."""

    def __init__(self, programs: dict[str, str], seconds: float, out: Path) -> None:
        super().__init__(seconds, out)
        self.programs = programs

    def command(self, engine: str, names: list[str], rows: Path) -> list[str]:
        return [sys.executable, "-c", self.programs[engine], names[0], str(rows)]


def test_each_model_is_measured_though_another_fails(tmp_path: Path) -> None:
    fails = "import sys; sys.exit(1) if sys.argv[1].startswith('8b') else None; " + WRITES
    runs = Fakes({"dovetail": WRITES, "vllm": fails}, 60, tmp_path / "with space" / "out.json")
    (tmp_path / "with space").mkdir()
    rows = runs.run({"dovetail": "0", "vllm": "1"}, ["one", "8b-one"])
    assert [row["workload"] for row in rows] == ["8b-one", "one", "one"]
    assert [failure.partition(":")[0] for failure in runs.failures] == ["vllm ended with status 1"]


def is_free(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def test_nothing_that_an_engine_started_is_left(tmp_path: Path) -> None:
    Fakes({"dovetail": LEAVES}, 60, tmp_path / "out.json").run({"dovetail": "0"}, ["one"])
    with (tmp_path / "out.dovetail.jsonl.lock").open() as file:
        deadline = time.monotonic() + 20
        while not is_free(file):
            assert time.monotonic() < deadline


@pytest.mark.slow("waits until the time of an engine is over")
def test_engines_on_one_gpu_have_their_seconds_each(tmp_path: Path) -> None:
    runs = Fakes({"dovetail": WAITS, "vllm": WRITES}, 3, tmp_path / "out.json")
    rows = runs.run({"dovetail": "0", "vllm": "0"}, ["one"])
    assert [row["workload"] for row in rows] == ["one"]
    assert runs.failures == ["dovetail was ended before one: no time left"]


def test_gpus_are_those_that_the_program_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert visible(["1", "0"]) == ["5", "4"]
    with pytest.raises(SystemExit, match="--gpus 2: CUDA_VISIBLE_DEVICES allows 4,5"):
        visible(["2"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible(["1", "0"]) == ["1", "0"]
