# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Mamba2's recurrence. Twin: `dovetail.nn.state.mamba`.

`_recur` computes single tokens of rows, and all tokens in float32, one after the other: a program
reads and replaces some rows of one head's state. A request's drafts are computed after its known
token, likewise. In prefills of 16-bit numbers a program carries some rows of one head's state S
[state, row] through a row's chunks of tokens (decays not shown):

    out = C S + (C Bᵀ) (dt * X) + D * X      for pairs of tokens j <= i
    S = S + Bᵀ (dt * X)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.api.state import CHUNK, StateLayer
from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.gpu import GPU, gpu_of
from dovetail.nn.kernels.launch import launch
from dovetail.nn.kernels.states import (
    Tiling,
    by_rows,
    draft_tensors,
    empty_outputs,
    fits_matrix_units,
    lines_of,
    per_unit,
    rows_at,
    rows_of,
    softplus,
    state_strides,
    step_tensors,
    tiling_of_chunks,
    tiling_of_tokens,
)
from dovetail.nn.state.shapes import Mamba2Shape


def recur_tiling(shape: Mamba2Shape) -> Tiling:
    return tiling_of_tokens(shape.head_size, shape.state_size)


def carry_tiling(shape: Mamba2Shape, gpu: GPU | None) -> Tiling:
    return tiling_of_chunks(shape.head_size, gpu)


@triton.jit
def _recur(
    xbc,
    dt,
    A_log,
    D,
    dt_bias,
    memory,
    units,
    places,
    kv_lens,
    query_starts,
    checkpoint_at,
    checkpoint_places,
    ahead,
    decay,
    change,
    key,
    out,
    x_stride,
    dt_stride,
    unit_stride,
    place_stride,
    shortest,
    longest,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    N: tl.constexpr,
    PER_UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    DECODES: tl.constexpr,  # each row has one token, and no checkpoint
    DRAFTS: tl.constexpr,  # besides, a row may be a draft after the one before it
    PDL: tl.constexpr,
):
    """Carry some rows of one head's state through a row's tokens."""
    head = tl.program_id(1)
    row = tl.program_id(2)
    j = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, N)
    real = j < SIZE
    let_next_begin(PDL)
    rate = tl.exp(tl.load(A_log + head))
    skip = tl.load(D + head)
    shift = tl.load(dt_bias + head)
    wait(PDL)
    first = row.to(tl.int64)
    length = 1
    kept = 0
    if not DECODES:
        first = tl.load(query_starts + row).to(tl.int64)
        length = tl.load(query_starts + row + 1) - tl.load(query_starts + row)
        kept = tl.load(checkpoint_at + row)
    known = length
    if DRAFTS:
        if tl.load(ahead + row) > 0:
            return  # the program of the known token before it does it
        length = lines_of(ahead, row, tl.num_programs(2))
    at = (
        rows_at(
            memory,
            units,
            unit_stride,
            place_stride,
            tl.load(places + row),
            head * SIZE + j,
            real,
            PER_UNIT,
            N,
        )[:, None]
        + i[None, :]
    )
    held = real[:, None] & (tl.load(kv_lens + row) > known)
    state = tl.load(at, mask=held, other=0.0).to(tl.float32)
    for number in range(length):
        t = first + number
        token = xbc + t * x_stride
        group = token + HEADS * SIZE + head // (HEADS // GROUPS) * N + i
        step = tl.load(dt + t * dt_stride + head).to(tl.float32)
        x = tl.load(token + head * SIZE + j, mask=real, other=0.0).to(tl.float32)
        into = tl.load(group).to(tl.float32)
        out_of = tl.load(group + GROUPS * N).to(tl.float32)
        step = softplus(step + shift)
        step = tl.minimum(tl.maximum(step, shortest), longest)
        factor = tl.exp(-rate * step)
        added = x * step
        state *= factor
        state += added[:, None] * into[None, :]
        result = tl.sum(state * out_of[None, :], 1) + skip * x
        tl.store(out + (t * HEADS + head) * SIZE + j, result.to(out.dtype.element_ty), mask=real)
        if not DECODES:  # noqa: SIM102 (decided when it is compiled)
            if number + 1 == kept:
                place = tl.load(checkpoint_places + row)
                to = (
                    rows_at(
                        memory,
                        units,
                        unit_stride,
                        place_stride,
                        place,
                        head * SIZE + j,
                        real,
                        PER_UNIT,
                        N,
                    )[:, None]
                    + i[None, :]
                )
                tl.store(to, state.to(memory.dtype.element_ty), mask=real[:, None])
        if DRAFTS:
            narrow = state.to(memory.dtype.element_ty)
            state = narrow.to(tl.float32)
            if number == 0:
                tl.store(at, narrow, mask=real[:, None])
            else:
                tl.store(change + (t * HEADS + head) * SIZE + j, added, mask=real)
                if tl.program_id(0) == 0:
                    tl.store(decay + t * HEADS + head, factor)
                    tl.store(key + (t * GROUPS + head // (HEADS // GROUPS)) * N + i, into)
    if not DRAFTS:
        tl.store(at, state.to(memory.dtype.element_ty), mask=real[:, None])


@triton.jit
def _carry(
    xbc,
    dt,
    A_log,
    D,
    dt_bias,
    memory,
    units,
    places,
    kv_lens,
    query_starts,
    checkpoint_at,
    checkpoint_places,
    out,
    x_stride,
    dt_stride,
    unit_stride,
    place_stride,
    shortest,
    longest,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    PER_UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Carry some rows of one head's state through a row's chunks."""
    head = tl.program_id(1)
    row = tl.program_id(2)
    j = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, N)
    r = tl.arange(0, CHUNK)
    real = j < SIZE
    let_next_begin(PDL)
    rate = tl.exp(tl.load(A_log + head))
    skip = tl.load(D + head)
    shift = tl.load(dt_bias + head)
    wait(PDL)
    first = tl.load(query_starts + row).to(tl.int64)
    length = tl.load(query_starts + row + 1) - tl.load(query_starts + row)
    kept = tl.load(checkpoint_at + row)
    at = (
        rows_at(
            memory,
            units,
            unit_stride,
            place_stride,
            tl.load(places + row),
            head * SIZE + j,
            real,
            PER_UNIT,
            N,
        )[None, :]
        + i[:, None]
    )
    held = real[None, :] & (tl.load(kv_lens + row) > length)
    state = tl.load(at, mask=held, other=0.0).to(tl.float32)  # [N, ROWS]
    for part in range(2):  # up to the checkpoint, and beyond it
        stop = tl.where(part == 0, kept, length)
        for begin in tl.range(part * kept, stop, CHUNK, num_stages=STAGES):
            here = begin + r < stop
            t = first + begin + r
            token = xbc + t[:, None] * x_stride
            group = token + HEADS * SIZE + head // (HEADS // GROUPS) * N + i[None, :]
            into = tl.load(group, mask=here[:, None], other=0.0)
            out_of = tl.load(group + GROUPS * N, mask=here[:, None], other=0.0)
            x = tl.load(
                token + head * SIZE + j[None, :], mask=here[:, None] & real[None, :], other=0.0
            ).to(tl.float32)
            step = softplus(
                tl.load(dt + t * dt_stride + head, mask=here, other=0.0).to(tl.float32) + shift
            )
            step = tl.where(here, tl.minimum(tl.maximum(step, shortest), longest), 0.0)
            sum = tl.cumsum(-rate * step, 0)
            total = tl.sum(-rate * step, 0)
            between = tl.exp(
                tl.where(r[:, None] >= r[None, :], sum[:, None] - sum[None, :], -float("inf"))
            )
            scores = tl.dot(out_of, tl.trans(into)) * between
            added = x * step[:, None]
            result = tl.exp(sum)[:, None] * tl.dot(out_of, state.to(into.dtype)) + skip * x
            result = tl.dot(scores.to(into.dtype), added.to(into.dtype), result)
            to = out + (t[:, None] * HEADS + head) * SIZE + j[None, :]
            tl.store(to, result.to(out.dtype.element_ty), mask=here[:, None] & real[None, :])
            lasting = (added * tl.exp(total - sum)[:, None]).to(into.dtype)
            state = tl.dot(tl.trans(into), lasting, state * tl.exp(total))
        if (part == 0) & (kept > 0):
            place = tl.load(checkpoint_places + row)
            to = (
                rows_at(
                    memory,
                    units,
                    unit_stride,
                    place_stride,
                    place,
                    head * SIZE + j,
                    real,
                    PER_UNIT,
                    N,
                )[None, :]
                + i[:, None]
            )
            tl.store(to, state.to(memory.dtype.element_ty), mask=real[None, :])
    tl.store(at, state.to(memory.dtype.element_ty), mask=real[None, :])


def mamba2(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    limits: tuple[float, float],
    shape: Mamba2Shape,
    state: StateLayer,
    tensor: int,
    *,
    in_chunks: bool | None = None,
) -> torch.Tensor:
    """See `dovetail.nn.state.mamba2`; A_log, D and dt_bias are contiguous. `in_chunks`: how steps
    of several tokens a row are computed; None: those of 16-bit numbers are."""
    batch = state.batch
    xbc = by_rows(xbc)
    dt = by_rows(dt)
    out = empty_outputs(state, xbc, shape.heads, shape.head_size)
    unit_stride, place_stride = state_strides(state, tensor)
    constants = {
        "HEADS": shape.heads,
        "GROUPS": shape.groups,
        "SIZE": shape.head_size,
        "N": shape.state_size,
        "PER_UNIT": per_unit(state, tensor),
        **pdl_options(xbc.device),
    }
    if in_chunks is None:
        in_chunks = fits_matrix_units(xbc, shape.state_size)
    drafts, has_drafts = draft_tensors(state, tensor)
    inputs = xbc, dt, A_log, D, dt_bias, *step_tensors(state, tensor)
    others = (
        out,
        xbc.stride(0),
        dt.stride(0),
        unit_stride,
        place_stride,
        float(limits[0]),
        float(limits[1]),
    )
    rows = rows_of(state, xbc)
    if batch.decodes or not in_chunks:
        tiling = recur_tiling(shape)
        launch(_recur, (triton.cdiv(shape.head_size, tiling.rows), shape.heads, rows))(
            *inputs,
            *drafts,
            *others,
            ROWS=tiling.rows,
            DECODES=batch.decodes,
            DRAFTS=has_drafts,
            num_warps=tiling.warps,
            **constants,
        )
    else:
        tiling = carry_tiling(shape, gpu_of(xbc.device))
        launch(_carry, (triton.cdiv(shape.head_size, tiling.rows), shape.heads, rows))(
            *inputs,
            *others,
            CHUNK=CHUNK,
            ROWS=tiling.rows,
            STAGES=tiling.stages,
            num_warps=tiling.warps,
            **constants,
        )
    return out
