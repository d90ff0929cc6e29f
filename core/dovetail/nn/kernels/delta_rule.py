# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""The gated delta rule. Twin: `dovetail.nn.state.delta`.

`_recur` computes single tokens of rows, and all tokens in float32, one after the other: a program
reads and replaces some rows of one head's state. A request's drafts are computed after its known
token, likewise. Prefills of 16-bit numbers take two kernels over chunks of tokens. `_prepare` does
what needs no state, for all chunks at once: it normalises q and k, and inverts each chunk's
triangular system, T = (I + A)⁻¹ with A[i, j] = beta_i * k_i·k_j * exp(g_j+1 + … + g_i) for j < i,
in float32. `_carry` carries the state S [k, v] through the chunks of one row (decays not shown):

    U = T (beta * (V - K S))         what each token changes at its key
    out = Q S + (Q Kᵀ) U             for pairs of tokens j <= i
    S = S + Kᵀ U
"""

from __future__ import annotations

from dataclasses import replace

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
    sigmoid,
    softplus,
    state_strides,
    step_tensors,
    tiling_of_chunks,
    tiling_of_tokens,
)
from dovetail.nn.state.shapes import NORM_EPS, DeltaShape


def recur_tiling(shape: DeltaShape) -> Tiling:
    return tiling_of_tokens(shape.v_size, shape.k_size)


def carry_tiling(shape: DeltaShape, rows: int, gpu: GPU | None) -> Tiling:
    tiling = tiling_of_chunks(shape.v_size, gpu)
    few = (
        gpu is not None
        and shape.v_heads * rows * triton.cdiv(shape.v_size, tiling.rows) < gpu.processors
    )
    return (
        replace(tiling, rows=min(tiling.rows, 32), stages=3)
        if few and tiling.stages == 2
        else tiling
    )


@triton.jit
def _recur(
    qkv,
    a,
    b,
    A_log,
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
    a_stride,
    b_stride,
    unit_stride,
    place_stride,
    scale,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    EPS: tl.constexpr,
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
    i = tl.arange(0, K)
    real = j < V
    k_head = head // (V_HEADS // K_HEADS)
    let_next_begin(PDL)
    rate = tl.exp(tl.load(A_log + head))
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
            head * V + j,
            real,
            PER_UNIT,
            K,
        )[:, None]
        + i[None, :]
    )
    held = real[:, None] & (tl.load(kv_lens + row) > known)
    state = tl.load(at, mask=held, other=0.0).to(tl.float32)
    for step in range(length):
        t = first + step
        token = qkv + t * x_stride
        forgetting = tl.load(a + t * a_stride + head).to(tl.float32)
        writing = tl.load(b + t * b_stride + head).to(tl.float32)
        q = tl.load(token + k_head * K + i).to(tl.float32)
        k = tl.load(token + (K_HEADS + k_head) * K + i).to(tl.float32)
        v = tl.load(token + 2 * K_HEADS * K + head * V + j, mask=real, other=0.0).to(tl.float32)
        q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * scale
        k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
        factor = tl.exp(-rate * softplus(forgetting + shift))
        state *= factor
        added = sigmoid(writing) * (v - tl.sum(state * k[None, :], 1))
        state += added[:, None] * k[None, :]
        tl.store(
            out + (t * V_HEADS + head) * V + j,
            tl.sum(state * q[None, :], 1).to(out.dtype.element_ty),
            mask=real,
        )
        if not DECODES:  # noqa: SIM102 (decided when it is compiled)
            if step + 1 == kept:
                place = tl.load(checkpoint_places + row)
                to = (
                    rows_at(
                        memory,
                        units,
                        unit_stride,
                        place_stride,
                        place,
                        head * V + j,
                        real,
                        PER_UNIT,
                        K,
                    )[:, None]
                    + i[None, :]
                )
                tl.store(to, state.to(memory.dtype.element_ty), mask=real[:, None])
        if DRAFTS:
            narrow = state.to(memory.dtype.element_ty)
            state = narrow.to(tl.float32)
            if step == 0:
                tl.store(at, narrow, mask=real[:, None])
            else:
                tl.store(change + (t * V_HEADS + head) * V + j, added, mask=real)
                if tl.program_id(0) == 0:
                    tl.store(decay + t * V_HEADS + head, factor)
                    tl.store(key + (t * K_HEADS + k_head) * K + i, k)
    if not DRAFTS:
        tl.store(at, state.to(memory.dtype.element_ty), mask=real[:, None])


@triton.jit
def _below(system, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """The blocks of a system that are left of every second block on its diagonal: [BLOCKS / 2,
    BLOCK, BLOCK]."""
    n = tl.arange(0, BLOCKS)
    row = n[:, None, None, None]
    column = n[None, None, :, None]
    blocks = tl.sum(
        tl.where(
            (row == column + 1) & (row % 2 == 1),
            tl.reshape(system, (BLOCKS, BLOCK, BLOCKS, BLOCK)),
            0.0,
        ),
        2,
    )
    return tl.sum(tl.reshape(blocks, (BLOCKS // 2, 2, BLOCK, BLOCK)), 1)


@triton.jit
def _joined(inverses, system, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Join the inverses [BLOCKS, BLOCK, BLOCK] of neighbouring blocks of a system; see
    `_inverse`."""
    pairs = tl.reshape(inverses, (BLOCKS // 2, 2, BLOCK, BLOCK))
    second = (tl.arange(0, 2) == 1)[None, :, None, None]
    upper = tl.sum(tl.where(second, 0.0, pairs), 1)
    lower = tl.sum(tl.where(second, pairs, 0.0), 1)
    between = tl.dot(_below(system, BLOCKS, BLOCK), upper, input_precision="ieee")
    between = tl.dot(lower, between, input_precision="ieee")
    right = (tl.arange(0, 2) == 1)[None, None, None, :, None]
    above = tl.where(right, 0.0, upper[:, None, :, None, :])
    below = tl.where(right, lower[:, None, :, None, :], -between[:, None, :, None, :])
    return tl.reshape(
        tl.where(second[:, :, :, :, None], below, above), (BLOCKS // 2, 2 * BLOCK, 2 * BLOCK)
    )


@triton.jit
def _inverse(system, tokens):
    """(I + system)⁻¹ of a strictly lower triangular system [64, 64] float32, of which only the
    first rows aren't 0.

    Blocks of 16 rows are solved row by row. Then pairs of neighbouring blocks are joined: the
    inverse of [[P, 0], [R, Q]] is [[P⁻¹, 0], [-Q⁻¹ R P⁻¹, Q⁻¹]]. (A product of powers of the system
    would take fewer steps, but they grow beyond what float32 can cancel.)
    """
    n = tl.arange(0, 4)
    i = tl.arange(0, 16)
    own = n[:, None, None, None] == n[None, None, :, None]
    blocks = tl.sum(tl.where(own, tl.reshape(system, (4, 16, 4, 16)), 0.0), 2)  # [4, 16, 16]
    solved = (
        tl.zeros([4, 16, 16], tl.float32) + tl.where(i[:, None] == i[None, :], 1.0, 0.0)[None, :, :]
    )
    for at in range(1, tl.minimum(tokens, 16)):
        here = (i == at)[None, :, None]
        known = tl.sum(tl.where(here, blocks, 0.0), 1)  # [4, 16]: of row `at`
        solved -= tl.where(here, tl.sum(known[:, :, None] * solved, 1)[:, None, :], 0.0)
    return tl.reshape(_joined(_joined(solved, system, 4, 16), system, 2, 32), (64, 64))


@triton.jit
def _prepare(
    qkv,
    a,
    b,
    A_log,
    dt_bias,
    chunks,
    qk,  # [tokens, 2, K_HEADS, K]: q and k, normalised
    sums,  # [tokens, V_HEADS] float32: of decays from the chunk's begin
    inverses,  # [chunks, V_HEADS, CHUNK, CHUNK]: T, its columns times beta
    x_stride,
    a_stride,
    b_stride,
    scale,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Prepare one chunk of the v heads that share a k head."""
    k_head = tl.program_id(0)
    chunk = tl.program_id(1)
    let_next_begin(PDL)
    wait(PDL)
    begin = tl.load(chunks + 2 * chunk)
    end = tl.load(chunks + 2 * chunk + 1)
    if begin == end:
        return  # padding
    r = tl.arange(0, CHUNK)
    i = tl.arange(0, K)
    t = begin.to(tl.int64) + r
    real = t < end
    token = qkv + t[:, None] * x_stride + k_head * K + i[None, :]
    to = qk + t[:, None] * (2 * K_HEADS * K) + k_head * K + i[None, :]
    q = tl.load(token, mask=real[:, None], other=0.0).to(tl.float32)
    q *= (tl.rsqrt(tl.sum(q * q, 1) + EPS) * scale)[:, None]
    tl.store(to, q.to(qk.dtype.element_ty), mask=real[:, None])
    k = tl.load(token + K_HEADS * K, mask=real[:, None], other=0.0).to(tl.float32)
    k *= tl.rsqrt(tl.sum(k * k, 1) + EPS)[:, None]
    k = k.to(qk.dtype.element_ty)
    tl.store(to + K_HEADS * K, k, mask=real[:, None])
    products = tl.dot(k, tl.trans(k))
    for v_head in range(k_head * (V_HEADS // K_HEADS), (k_head + 1) * (V_HEADS // K_HEADS)):
        rate = tl.exp(tl.load(A_log + v_head))
        shift = tl.load(dt_bias + v_head)
        decay = -rate * softplus(
            tl.load(a + t * a_stride + v_head, mask=real, other=0.0).to(tl.float32) + shift
        )
        sum = tl.cumsum(tl.where(real, decay, 0.0), 0)
        tl.store(sums + t * V_HEADS + v_head, sum, mask=real)
        beta = tl.where(
            real,
            sigmoid(tl.load(b + t * b_stride + v_head, mask=real, other=0.0).to(tl.float32)),
            0.0,
        )
        between = tl.exp(
            tl.where(r[:, None] > r[None, :], sum[:, None] - sum[None, :], -float("inf"))
        )
        inverse = _inverse(beta[:, None] * products * between, end - begin) * beta[None, :]
        place = (
            inverses
            + ((chunk * V_HEADS + v_head).to(tl.int64) * CHUNK + r[:, None]) * CHUNK
            + r[None, :]
        )
        tl.store(place, inverse.to(inverses.dtype.element_ty))


@triton.jit
def _carry(
    qkv,
    qk,
    sums,
    inverses,
    chunk_starts,
    memory,
    units,
    places,
    kv_lens,
    query_starts,
    checkpoint_at,
    checkpoint_places,
    out,
    x_stride,
    unit_stride,
    place_stride,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
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
    i = tl.arange(0, K)
    r = tl.arange(0, CHUNK)
    real = j < V
    k_head = head // (V_HEADS // K_HEADS)
    let_next_begin(PDL)
    wait(PDL)
    first = tl.load(query_starts + row).to(tl.int64)
    length = tl.load(query_starts + row + 1) - tl.load(query_starts + row)
    chunk = tl.load(chunk_starts + row)
    kept = tl.load(checkpoint_at + row)
    at = (
        rows_at(
            memory,
            units,
            unit_stride,
            place_stride,
            tl.load(places + row),
            head * V + j,
            real,
            PER_UNIT,
            K,
        )[None, :]
        + i[:, None]
    )
    held = real[None, :] & (tl.load(kv_lens + row) > length)
    state = tl.load(at, mask=held, other=0.0).to(tl.float32)  # [K, ROWS]
    for part in range(2):  # up to the checkpoint, and beyond it
        stop = tl.where(part == 0, kept, length)
        for begin in tl.range(part * kept, stop, CHUNK, num_stages=STAGES):
            here = begin + r < stop
            t = first + begin + r
            keys = qk + t[:, None] * (2 * K_HEADS * K) + k_head * K + i[None, :]
            q = tl.load(keys, mask=here[:, None], other=0.0)
            k = tl.load(keys + K_HEADS * K, mask=here[:, None], other=0.0)
            v = tl.load(
                qkv + t[:, None] * x_stride + 2 * K_HEADS * K + head * V + j[None, :],
                mask=here[:, None] & real[None, :],
                other=0.0,
            )
            number = chunk + (begin - part * kept) // CHUNK
            inverse = tl.load(
                inverses
                + ((number * V_HEADS + head).to(tl.int64) * CHUNK + r[:, None]) * CHUNK
                + r[None, :]
            )
            total = tl.load(sums + (first + tl.minimum(begin + CHUNK, stop) - 1) * V_HEADS + head)
            sum = tl.where(here, tl.load(sums + t * V_HEADS + head, mask=here, other=0.0), total)
            so_far = tl.exp(sum)[:, None]
            narrow = state.to(k.dtype)
            wanted = v.to(tl.float32) - so_far * tl.dot(k, narrow)
            change = tl.dot(inverse, wanted.to(k.dtype))
            between = tl.exp(
                tl.where(r[:, None] >= r[None, :], sum[:, None] - sum[None, :], -float("inf"))
            )
            scores = tl.dot(q, tl.trans(k)) * between
            result = so_far * tl.dot(q, narrow)
            result = tl.dot(scores.to(k.dtype), change.to(k.dtype), result)
            to = out + (t[:, None] * V_HEADS + head) * V + j[None, :]
            tl.store(to, result.to(out.dtype.element_ty), mask=here[:, None] & real[None, :])
            lasting = (change * tl.exp(total - sum)[:, None]).to(k.dtype)
            state = tl.dot(tl.trans(k), lasting, state * tl.exp(total))
        if (part == 0) & (kept > 0):
            place = tl.load(checkpoint_places + row)
            to = (
                rows_at(
                    memory, units, unit_stride, place_stride, place, head * V + j, real, PER_UNIT, K
                )[None, :]
                + i[:, None]
            )
            tl.store(to, state.to(memory.dtype.element_ty), mask=real[None, :])
        chunk += tl.where(part == 0, (kept + CHUNK - 1) // CHUNK, 0)
    tl.store(at, state.to(memory.dtype.element_ty), mask=real[None, :])


def gated_delta_rule(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    shape: DeltaShape,
    state: StateLayer,
    tensor: int,
    *,
    in_chunks: bool | None = None,
) -> torch.Tensor:
    """See `dovetail.nn.state.gated_delta_rule`; A_log and dt_bias are contiguous. `in_chunks`: how
    steps of several tokens a row are computed; None: those of 16-bit numbers are."""
    batch = state.batch
    qkv = by_rows(qkv)
    a = by_rows(a)
    b = by_rows(b)
    out = empty_outputs(state, qkv, shape.v_heads, shape.v_size)
    unit_stride, place_stride = state_strides(state, tensor)
    heads = {
        "K_HEADS": shape.k_heads,
        "V_HEADS": shape.v_heads,
        "K": shape.k_size,
        **pdl_options(qkv.device),
    }
    in_state = {"V": shape.v_size, "PER_UNIT": per_unit(state, tensor)}
    strides = (qkv.stride(0), a.stride(0), b.stride(0))
    scale = shape.k_size**-0.5
    if in_chunks is None:
        in_chunks = fits_matrix_units(qkv, shape.k_size)
    if batch.decodes or not in_chunks:
        tiling, (drafts, has_drafts) = recur_tiling(shape), draft_tensors(state, tensor)
        launch(
            _recur, (triton.cdiv(shape.v_size, tiling.rows), shape.v_heads, rows_of(state, qkv))
        )(
            qkv,
            a,
            b,
            A_log,
            dt_bias,
            *step_tensors(state, tensor),
            *drafts,
            out,
            *strides,
            unit_stride,
            place_stride,
            scale,
            EPS=NORM_EPS,
            ROWS=tiling.rows,
            DECODES=batch.decodes,
            DRAFTS=has_drafts,
            num_warps=tiling.warps,
            **heads,
            **in_state,
        )
        return out
    assert batch.chunks is not None
    qk = qkv.new_empty(len(qkv), 2 * shape.k_heads * shape.k_size)
    sums = qkv.new_empty(len(qkv), shape.v_heads, dtype=torch.float32)
    inverses = qkv.new_empty(len(batch.chunks), shape.v_heads, CHUNK, CHUNK)
    launch(_prepare, (shape.k_heads, len(batch.chunks)))(
        qkv,
        a,
        b,
        A_log,
        dt_bias,
        batch.chunks,
        qk,
        sums,
        inverses,
        *strides,
        scale,
        EPS=NORM_EPS,
        CHUNK=CHUNK,
        num_warps=4,
        **heads,
    )
    tiling = carry_tiling(shape, len(batch.places), gpu_of(qkv.device))
    launch(_carry, (triton.cdiv(shape.v_size, tiling.rows), shape.v_heads, len(batch.places)))(
        qkv,
        qk,
        sums,
        inverses,
        batch.chunk_starts,
        *step_tensors(state, tensor),
        out,
        qkv.stride(0),
        unit_stride,
        place_stride,
        CHUNK=CHUNK,
        ROWS=tiling.rows,
        STAGES=tiling.stages,
        num_warps=tiling.warps,
        **heads,
        **in_state,
    )
    return out
