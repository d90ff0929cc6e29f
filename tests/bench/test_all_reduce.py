"""The benchmark of sums over ranks, here over processes on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.preloaded import Preloaded
from tests.support import FULL

# its ranks are forks of a process that has imported torch, and has run nothing
PROGRAM = """
from functools import partial
from torch import multiprocessing
multiprocessing.spawn = partial(multiprocessing.start_processes, start_method="fork")
from bench.all_reduce import main
main()
"""


@pytest.mark.slow("starts ranks")
def test_each_way_to_sum_over_ranks_is_right_and_timed(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    table = tmp_path / "table.json"
    command: list[str | Path] = [
        *(("-m", "bench.all_reduce") if FULL else ("-c", PROGRAM)),
        "--device",
        "cpu",
        "--rows",
        "1",
        "3",
        "--hidden",
        "32",
        "--json",
        table,
    ]
    done = preloaded.run(command, cwd=Path(__file__).parents[2], timeout_s=300)
    assert done.exit_code == 0, done.errors[-2000:]
    rows = json.loads(table.read_text())
    assert [(row["rows"], row["bytes"]) for row in rows] == [(1, 64), (3, 192)]
    assert all(row[way] > 0 for row in rows for way in ("no sum", "gloo"))
