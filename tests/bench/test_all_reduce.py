"""The benchmark of sums over ranks, here over processes on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow("starts ranks: processes that import torch")
def test_each_way_to_sum_over_ranks_is_right_and_timed(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    command = [
        sys.executable,
        "-m",
        "bench.all_reduce",
        "--device",
        "cpu",
        "--rows",
        "1",
        "3",
        "--hidden",
        "32",
        "--json",
        str(table),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(table.read_text())
    assert [(row["rows"], row["bytes"]) for row in rows] == [(1, 64), (3, 192)]
    assert all(row[way] > 0 for row in rows for way in ("no sum", "gloo"))
