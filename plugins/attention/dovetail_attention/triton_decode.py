# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Decode: rows of one query token each. All tokens of all rows, laid end to end, are cut into equal shares, one a program and kv head; a row that
was cut is put together again by a second, small kernel (split KV, as in Flash-Decoding; equal shares as in Stream-K, Osama et al., 2023).

How the shares are cut is written down by `triton_schedule.DecodeSchedule`; the grids never depend on it, so a CUDA graph may replay them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail_attention.triton_tile import attend_range


@triton.jit
def decode_shares(
    q,
    out,
    k_cache,
    v_cache,
    table,  # [rows, TABLE_STRIDE] int32
    share_starts,  # [shares + 1] int32: each one's first segment
    segments,  # [segments, 5] int32: row, token, begin, end, slot
    partial,  # [slots, HEADS, D] float32
    partial_lse,  # [slots, HEADS] float32, base 2
    scale,
    Q_TOKEN_STRIDE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,  # GROUP, padded
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend over one share of one kv head. A segment is a stretch [begin, end) of a row's tokens; slot -1: it is all that the row sees."""
    kv_head = tl.program_id(0)
    share = tl.program_id(1)
    member = tl.arange(0, M)
    d = tl.arange(0, D_PADDED)
    head = kv_head * GROUP + member
    real = (member < GROUP)[:, None] & (d < D)[None, :]
    for segment in range(tl.load(share_starts + share), tl.load(share_starts + share + 1)):
        row = tl.load(segments + segment * 5)
        token = tl.load(segments + segment * 5 + 1).to(tl.int64)
        begin = tl.load(segments + segment * 5 + 2)
        end = tl.load(segments + segment * 5 + 3)
        slot = tl.load(segments + segment * 5 + 4)
        query = tl.load(q + token * Q_TOKEN_STRIDE + head[:, None] * Q_HEAD_STRIDE + d[None, :], mask=real, other=0.0)
        acc, top, total = attend_range(
            tl.zeros([M, D_PADDED], tl.float32),
            tl.full([M], float("-inf"), tl.float32),
            tl.zeros([M], tl.float32),
            query,
            k_cache + kv_head * HEAD_STRIDE,
            v_cache + kv_head * HEAD_STRIDE,
            table + row.to(tl.int64) * TABLE_STRIDE,
            begin // N * N,
            end,
            begin,
            member,
            scale,
            D,
            D_PADDED,
            N,
            BLOCK_SIZE,
            BLOCK_STRIDE,
            TOKEN_STRIDE,
            BOUNDED=True,
            CAUSAL=False,
            WINDOW=0,
            PRECISION=PRECISION,
        )
        acc = acc / total[:, None]
        if slot < 0:
            tl.store(out + (token * HEADS + head[:, None]) * D + d[None, :], acc.to(out.dtype.element_ty), mask=real)
        else:
            place = slot * HEADS + head
            tl.store(partial + place[:, None] * D + d[None, :], acc, mask=real)
            tl.store(partial_lse + place, top + tl.log2(total), mask=member < GROUP)


@triton.jit
def merge_segments(
    out,
    rows,  # [rows, 4] int32: token, action, first slot, slots
    prefix,  # [1] int32: slots of the shared prefix, each prefix_stride after the last, from prefix_slot on
    partial,
    partial_lse,
    prefix_slot,
    prefix_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    N: tl.constexpr,
):
    """One head of one row: nothing to do (action 0), merge what its segments found (1), or zeros, for padding (2)."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(rows + row * 4).to(tl.int64)
    action = tl.load(rows + row * 4 + 1)
    if action == 0:
        return
    d = tl.arange(0, D_PADDED)
    acc = tl.zeros([D_PADDED], tl.float32)
    if action == 1:
        first = tl.load(rows + row * 4 + 2)
        own = tl.load(rows + row * 4 + 3)
        count = own + tl.load(prefix)
        top = float("-inf")
        total = 0.0
        for start in range(0, count, N):
            i = start + tl.arange(0, N)
            slot = tl.where(i < own, first + i, prefix_slot + (i - own) * prefix_stride + row)
            place = slot * HEADS + head
            lse = tl.load(partial_lse + place, mask=i < count, other=float("-inf"))
            values = tl.load(partial + place[:, None] * D + d[None, :], mask=(i < count)[:, None] & (d < D)[None, :], other=0.0)
            new_top = tl.maximum(top, tl.max(lse, 0))
            weights = tl.exp2(lse - new_top)
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(weights, 0)
            acc = acc * shrink + tl.sum(values * weights[:, None], 0)
            top = new_top
        acc = acc / total
    tl.store(out + (token * HEADS + head) * D + d, acc.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def attend_prefix(
    q,
    k_cache,
    v_cache,
    table,
    rows,  # [rows, 4] int32, as above
    prefix_bounds,  # [3] int32: slots, tokens, rows
    partial,
    partial_lse,
    prefix_slot,
    prefix_stride,
    scale,
    Q_TOKEN_STRIDE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The queries of many rows go over one part of the blocks that all of them begin with: read once, for M queries at once."""
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    part = tl.program_id(2)
    parts = tl.load(prefix_bounds)
    tokens = tl.load(prefix_bounds + 1)
    num_rows = tl.load(prefix_bounds + 2)
    flat = tile * M + tl.arange(0, M)
    row = flat // GROUP
    head = kv_head * GROUP + flat % GROUP
    if (part >= parts) | (tile * M >= num_rows * GROUP):
        return
    d = tl.arange(0, D_PADDED)
    real = row < num_rows
    token = tl.load(rows + row * 4, mask=real, other=0).to(tl.int64)
    mask = real[:, None] & (d < D)[None, :]
    query = tl.load(q + token[:, None] * Q_TOKEN_STRIDE + head[:, None] * Q_HEAD_STRIDE + d[None, :], mask=mask, other=0.0)
    steps = tl.cdiv(tl.cdiv(tokens, N), parts)
    first = part * steps * N
    acc, top, total = attend_range(
        tl.zeros([M, D_PADDED], tl.float32),
        tl.full([M], float("-inf"), tl.float32),
        tl.zeros([M], tl.float32),
        query,
        k_cache + kv_head * HEAD_STRIDE,
        v_cache + kv_head * HEAD_STRIDE,
        table,
        first,
        tl.minimum(tokens, first + steps * N),
        first,
        row,
        scale,
        D,
        D_PADDED,
        N,
        BLOCK_SIZE,
        BLOCK_STRIDE,
        TOKEN_STRIDE,
        BOUNDED=True,
        CAUSAL=False,
        WINDOW=0,
        PRECISION=PRECISION,
    )
    place = (prefix_slot + part * prefix_stride + row) * HEADS + head
    tl.store(partial + place[:, None].to(tl.int64) * D + d[None, :], acc / total[:, None], mask=mask)
    tl.store(partial_lse + place, top + tl.log2(total), mask=real)
