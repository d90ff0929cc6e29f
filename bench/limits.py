"""Limits of the machine, measured in the same run: copy bandwidth and matrix product rate; and the
least time a workload can take."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bench.shapes import Shape

BYTES = 2  # of a bfloat16


@dataclass(frozen=True, slots=True)
class Limits:
    copy_bytes_per_s: float  # read + written
    flop_per_s: float


def require_gpu() -> None:
    """Exit if there is no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit(f"this measures a GPU, and torch {torch.__version__} sees none")


def seconds(run: Callable[[], object], repeat: int = 20, warm_ups: int = 3) -> float:
    """Median device time, after warming up."""
    times = []
    for turn in range(repeat + warm_ups):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        if turn >= warm_ups:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def sustained_seconds(run: Callable[[], object], for_s: float = 1.0) -> float:
    """Return the device time of one run, after clocks have settled."""
    count = max(1, round(for_s / seconds(run)))

    def all_runs() -> None:
        for _ in range(count):
            run()

    return seconds(all_runs, repeat=1, warm_ups=0) / count


def measure_limits(shape: Shape) -> Limits:
    """A copy of 4 GiB, and the best product rate over 8192³ and the model's own shapes, each kept
    up for a second; random data."""
    copy = copy_bytes_per_s()
    rates = []
    for m, n, k in [
        (8192, 8192, 8192),
        (8192, 2 * shape.intermediate, shape.hidden),
        (8192, shape.hidden, shape.intermediate),
    ]:
        a, b = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in ((m, k), (n, k)))
        rates.append(2 * m * n * k / sustained_seconds(lambda a=a, b=b: a @ b.T))
    return Limits(copy, max(rates))


def copy_bytes_per_s() -> float:
    source = torch.randn(1 << 30, device="cuda", dtype=torch.float32)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / seconds(lambda: target.copy_(source))


def floor_seconds(
    shape: Shape,
    lens: Sequence[tuple[int, int]],
    limits: Limits,
    shared_prefix: int = 0,
    expert_bytes: float = BYTES,
) -> float:
    """The least time for requests of (prompt, output) tokens that all run together: each K and V
    read once a step, states read and written, weights read once a step (or the arithmetic, where
    that takes longer), the prompts' arithmetic once. A `shared_prefix` is computed once, and read
    once a step. `expert_bytes`: of a weight of experts, of which a step reads those that are chosen
    if routing is uniform."""
    steps = max(out for _, out in lens)
    # the first token of each comes from its prefill
    decodes = [sum(1 for _, out in lens if out > step) for step in range(1, steps)]
    return busy_floor_seconds(shape, lens, decodes, limits, shared_prefix, expert_bytes)


def busy_floor_seconds(
    shape: Shape,
    lens: Sequence[tuple[int, int]],
    decodes: Sequence[int],
    limits: Limits,
    shared_prefix: int = 0,
    expert_bytes: float = BYTES,
) -> float:
    """The same where requests come and go: `decodes` are the numbers of rows that decoded, step by
    step."""
    kv_bytes = shape.kv_numbers_per_token * BYTES
    reads = sum(out * (prompt - shared_prefix) + out * (out - 1) // 2 for prompt, out in lens)
    reads += shared_prefix * (max(out for _, out in lens) if shared_prefix else 0)
    if shape.window is not None:  # half of the layers read no more than that
        reads = (
            reads
            + sum(min(shape.window, prompt + step) for prompt, out in lens for step in range(out))
        ) / 2
    weights = shape.block_weights + shape.head_weights
    read = dict.fromkeys(set(decodes), BYTES * (shape.dense_weights + shape.head_weights))
    for rows in read:
        read[rows] += expert_bytes * shape.distinct_experts(rows) * shape.expert_weights
    products = sum(
        max(read[rows] / limits.copy_bytes_per_s, 2 * weights * rows / limits.flop_per_s)
        for rows in decodes
    )
    computed = sum(prompt - shared_prefix for prompt, _ in lens) + shared_prefix
    attention = sum(
        2 * shape.attention_layers * shape.heads * shape.head_size * (prompt**2 - shared_prefix**2)
        for prompt, _ in lens
    )
    prefill = (
        2 * shape.block_weights * computed + 2 * shape.head_weights * len(lens) + attention
    ) / limits.flop_per_s
    states = 2 * shape.state_bytes * sum(decodes)  # read and replaced
    return (reads * kv_bytes + states) / limits.copy_bytes_per_s + products + prefill
