"""Runs made by hand, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dovetail_lab.records import RequestRecord, RunResult, StepTimes, Timeline

SETTINGS = {
    "config": {"max_num_seqs": 8},
    "scheduler": "dovetail:fcfs",
    "executor": "simulated",
    "prefill_limit": 2.0,
    "overlap": True,
    "prefix_reuse": True,
    "block_size": 16,
    "num_pages": 100,
    "max_model_len": 512,
}


def record(
    index: int,
    ttft_s: float,
    *,
    gaps_s: Sequence[float] = (0.1, 0.1),
    arrival_s: float | None = None,
    **changes: Any,
) -> RequestRecord:
    """A request that completed: its first token after `ttft_s`, the others after `gaps_s`."""
    arrival = float(index) if arrival_s is None else arrival_s
    times = arrival + ttft_s + np.concatenate([[0.0], np.cumsum(gaps_s)])
    made = RequestRecord(
        id=str(index),
        client="ab"[index % 2],
        arrival_s=arrival,
        first_scheduled_s=arrival + ttft_s / 2,
        token_times_s=times,
        finished_s=float(times[-1]),
        prompt_tokens=10 + index % 7,
        true_tokens=len(times),
        max_tokens=len(times),
        finish_reason="length",
    )
    return replace(made, **changes)


def rejected(index: int) -> RequestRecord:
    return record(
        index,
        0.1,
        token_times_s=np.empty(0),
        first_scheduled_s=None,
        finish_reason="rejected",
        stop_reason="full",
    )


def run(
    records: Iterable[RequestRecord], *, name: str = "a", seed: int = 0, **changes: Any
) -> RunResult:
    """With a step at each whole second until the last token."""
    requests = tuple(records)
    end = max((float(r.token_times_s[-1]) for r in requests if len(r.token_times_s)), default=0.0)
    rows = [
        (float(second), 0.5, 2, 3, 20, 3, 3, 4, 1, second % 2, 40, 50, 10, 0.0, 0, 0, 0)
        for second in range(1, int(end) + 2 if end else 1)
    ]
    return RunResult(
        name,
        "made",
        "by hand",
        seed,
        SETTINGS,
        StepTimes("linear", 0.03, "12 steps"),
        requests,
        Timeline.of_rows(rows),
        **changes,
    )


def run_of_ttfts(ttfts_s: Iterable[float], **options: Any) -> RunResult:
    return run((record(index, float(ttft)) for index, ttft in enumerate(ttfts_s)), **options)
