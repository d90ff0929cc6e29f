# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Functions that the kernels of recurrent layers share: addresses of a state's rows, tilings, and
gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from dovetail.api.state import Changes, StateLayer
from dovetail.nn.kernels.gpu import GPU, gpu_of

# rows of states that kernels for chunks take: what matrix units do, and what registers hold
SMALLEST = 16
LARGEST = 128
ROWS_AT_ONCE = tl.constexpr(128)
LINES_AT_ONCE = tl.constexpr(32)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows of a state per program, its warps, and chunks in flight."""

    rows: int
    warps: int
    stages: int = 1


def tiling_of_tokens(rows: int, row_size: int) -> Tiling:
    """Return the tiling of kernels that compute token by token, for heads with states [rows,
    row_size]."""
    # many small programs: also one row of a step is many
    return Tiling(min(triton.next_power_of_2(rows), max(1, 1024 // row_size)), 1)


def tiling_of_chunks(rows: int, gpu: GPU | None) -> Tiling:
    """Return the tiling of kernels that compute chunks of tokens, for heads with `rows` rows of a
    state."""
    held = max(SMALLEST, triton.next_power_of_2(rows))
    if gpu is not None and gpu.shared_bytes < 200 << 10:
        return Tiling(min(held, 32), 8)
    return Tiling(min(held, 64), 4, 2)  # two programs fit a processor


@triton.jit
def rows_at(
    memory,
    units,
    unit_stride,
    place_stride,
    place,
    r,
    real,
    PER_UNIT: tl.constexpr,
    ROW: tl.constexpr,
):
    """Return the addresses of rows r of the state at a place, where they are `real`."""
    unit = tl.load(units + place * place_stride + r // PER_UNIT, mask=real, other=0).to(tl.int64)
    return memory + unit * unit_stride + r % PER_UNIT * ROW


@triton.jit
def row_of_chunk(chunk, chunk_starts, rows):
    """Return the row that a chunk belongs to; the last row for padding."""
    row = 0
    for first in range(0, rows, ROWS_AT_ONCE):
        r = first + tl.arange(0, ROWS_AT_ONCE)
        row += tl.sum(
            (tl.load(chunk_starts + r + 1, mask=r < rows, other=chunk + 1) <= chunk).to(tl.int32), 0
        )
    return tl.minimum(row, rows - 1)


@triton.jit
def lines_of(ahead, first, lines):
    """Return the number of lines of the request whose known token is line `first` of `lines`: see
    `StateBatch.ahead`."""
    count = 0
    goes_on = True
    while goes_on:
        i = count + tl.arange(0, LINES_AT_ONCE)
        own = tl.sum(
            (tl.load(ahead + first + i, mask=first + i < lines, other=-1) == i).to(tl.int32), 0
        )
        count += own
        goes_on = own == LINES_AT_ONCE
    return count


@triton.jit
def softplus(x):
    """log(1 + exp(x)), also where the sum would round exp(x) away; x where that is the same."""
    e = tl.exp(tl.minimum(x, 20.0))
    sum = 1.0 + e
    near = tl.where(sum == 1.0, e, tl.log(sum) * (e / (sum - 1.0)))
    return tl.where(x > 20.0, x, near)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


def state_strides(state: StateLayer, tensor: int) -> tuple[int, int]:
    """Return (unit_stride, place_stride) for `rows_at`."""
    return state.memory[tensor].stride(0), state.units[tensor].stride(0)


def step_tensors(state: StateLayer, tensor: int) -> tuple[torch.Tensor, ...]:
    """Return (memory, units, places, kv_lens, query_starts, checkpoint_at, checkpoint_places), that
    kernels take that replace states and write checkpoints. In a step of single tokens, which has no
    checkpoints, kernels don't read the last two."""
    batch = state.batch
    at = batch.places if batch.checkpoint_at is None else batch.checkpoint_at
    to = batch.places if batch.checkpoint_places is None else batch.checkpoint_places
    return (
        state.memory[tensor],
        state.units[tensor],
        batch.places,
        batch.kv_lens,
        batch.query_starts,
        at,
        to,
    )


def draft_tensors(state: StateLayer, tensor: int) -> tuple[tuple[torch.Tensor, ...], bool]:
    """Return ((ahead, decay, change, key), DRAFTS) for kernels that accumulate. Without
    `StateBatch.ahead` they read and write none of these."""
    ahead = state.batch.ahead
    changes = state.changes[tensor] if state.changes else None
    if ahead is None or not isinstance(changes, Changes):
        memory = state.memory[tensor]
        return (state.batch.places, memory, memory, memory), False
    return (ahead, changes.decay, changes.change, changes.key), True


def per_unit(state: StateLayer, tensor: int) -> int:
    """Return PER_UNIT for `rows_at`."""
    return state.memory[tensor].shape[1]


def by_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [tokens, channels] such that a token's numbers are neighbours: itself, if it is a
    slice of a wider tensor."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_outputs(state: StateLayer, x: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return memory for outputs [tokens, *shape], 0 if some tokens are padding."""
    batch = state.batch
    make: Any = x.new_empty if batch.decodes or batch.num_tokens == len(x) else x.new_zeros
    out: torch.Tensor = make((len(x), *shape))
    return out


def rows_of(state: StateLayer, x: torch.Tensor) -> int:
    """Return the number of rows, with padding, of a step with inputs x [tokens, channels]."""
    return len(x) if state.batch.decodes else len(state.batch.places)


def fits_matrix_units(x: torch.Tensor, row_size: int) -> bool:
    """True if chunks of tokens are computed by matrix units: for 16-bit inputs x, with states of
    rows of `row_size`."""
    gpu = gpu_of(x.device)
    return (
        x.itemsize == 2
        and SMALLEST <= row_size <= LARGEST
        and (gpu is None or gpu.has_matrix_units)
    )
