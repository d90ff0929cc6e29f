"""The biggest step there can be, which tells how much GPU memory is left for K and V."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dovetail.api.executor import Batch
from dovetail_executors.runtime.profiling import biggest_batch, drafting_batch, peak_bytes
from dovetail_executors.runtime.row_state import RowState
from dovetail_executors.runtime.step import Step
from tests.runtime.fakes import Bench, layout


@pytest.mark.parametrize(
    ("max_rows", "max_len", "max_tokens"), [(4, 64, 128), (4, 8, 128), (200, 64, 128), (4, 64, 3)]
)
def test_the_batch_that_is_profiled_is_within_all_limits_and_as_big_as_they_allow(
    max_rows: int, max_len: int, max_tokens: int
) -> None:
    rows = RowState(max_rows, max_len, layout(16), torch.device("cpu"))
    batch = biggest_batch(rows, max_tokens)
    rows.update(batch)
    rows.check(batch)
    assert len(batch.rows) == min(max_rows, max_tokens)
    assert int(batch.num_tokens.sum()) == min(max_tokens // len(batch.rows), max_len) * len(
        batch.rows
    )


@pytest.mark.parametrize(("max_rows", "lines"), [(4, 4), (4, 13), (1, 9), (200, 3)])
def test_a_batch_with_drafts_has_as_many_lines_as_asked_for(max_rows: int, lines: int) -> None:
    rows = RowState(max_rows, 64, layout(4), torch.device("cpu"), max_lines=lines)
    batch = drafting_batch(rows, lines)
    rows.update(batch)
    assert int(batch.num_lines.sum()) == lines
    assert len(batch.rows) == min(max_rows, lines)
    assert int(batch.num_lines.max()) == -(-lines // len(batch.rows))


def test_the_peak_counts_what_torch_and_others_hold_and_leaves_the_rows_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    computed: list[list[int]] = []
    submit = bench.runner.submit

    def counted(batch: Batch) -> Step:
        step = submit(batch)
        computed.append(bench.rows.computed.tolist())
        return step

    monkeypatch.setattr(bench.runner, "submit", counted)
    for name, value in {
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "max_memory_allocated": 500,
        "memory_reserved": 300,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8_000, 10_000))
    assert peak_bytes(bench.runner, 32) == (10_000 - 8_000 - 300) + 500
    assert computed == [[8] * 4], "one step, of all rows and tokens"
    assert not np.any(bench.rows.known)
