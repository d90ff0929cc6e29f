"""Small traces and engines to replay them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dovetail_lab.records import RunResult
from dovetail_lab.simulate import replay
from dovetail_lab.traces import Trace, TraceRequest

LINEAR = {
    "kind": "linear",
    "base_s": 0.01,
    "per_token_s": 0.001,
    "per_context_s": 1e-5,
    "per_pair_s": 1e-6,
    "per_row_s": 0.002,
}


def trace(*requests: TraceRequest) -> Trace:
    return Trace("made", "by hand", requests)


def request(
    index: int, arrival_s: float = 0.0, prompt: int = 10, output: int = 5, **fields: Any
) -> TraceRequest:
    return TraceRequest(str(index), arrival_s, prompt, output, **fields)


def engine(*, executor: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Without overlap, and with enough memory: step times can be computed by hand."""
    simulated = {"name": "simulated", "num_pages": 2000, "step_time": LINEAR, **(executor or {})}
    config = {
        "scheduler": "fcfs",
        "prefill_limit": None,
        "kv_cache": {"name": "prefix", "reuse": False},
        "executor": simulated,
    }
    return {
        **config,
        "overlap": False,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 512,
        **changes,
    }


def run(requests: Iterable[TraceRequest], **config: Any) -> RunResult:
    return replay(engine(**config), trace(*requests))
