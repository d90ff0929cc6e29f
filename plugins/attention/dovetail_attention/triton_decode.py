# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Decode: rows of one query token each. All tokens of all rows, laid end to end, are cut into equal
shares, one a program and kv head (split KV, as in Flash-Decoding; equal shares as in Stream-K,
Osama et al., 2023). A row that was cut is put together again by whichever program ends last of
those that have a part of it.

How the shares are cut is written down by `triton_schedule.DecodeTables`; the grids never depend on
it, so a CUDA graph may replay them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail.nn.kernels.dependent_launch import fetch, let_next_begin, wait
from dovetail_attention.triton_tile import (
    HIDDEN,
    attend_range,
    block_ids,
    nothing_seen,
    sinks_seen,
    to_multiply,
)

LINE = tl.constexpr(128)  # bytes per memory line


@triton.jit
def decode_shares(
    q,
    out,
    k_cache,
    v_cache,
    table,  # [rows, TABLE_STRIDE] int32
    share_starts,  # [shares + 1] int32: each one's first segment
    # [5] int32: parts of the shared prefix, its tokens, rows, padding's first token, padding tokens
    bounds,
    rows,  # [rows, 3] int32: token, first slot, slots
    segments,  # [segments, 5] int32: row, token, begin, end, place p among `rows`; or -1 - p
    # [slots, HEADS, D] float32, V's scale left out: of each segment; then of the prefix's parts,
    # `prefix_stride` apart from prefix_slot on
    partial,
    partial_lse,  # [slots, HEADS] float32, base 2
    # [levels, slots, kv heads] int32: of the group that begins with a slot, parts that are there; 0
    # before and after
    arrived,
    prefix_slot,
    prefix_stride,
    k_scale,  # [] float32
    v_scale,
    sinks,  # [HEADS]
    scale,
    cap,
    Q_TOKEN_STRIDE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,  # GROUP, padded
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    REST: tl.constexpr,  # numbers of K after the first D
    REST_PADDED: tl.constexpr,
    LATENT: tl.constexpr,  # the first D numbers of K are V
    N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    MERGED: tl.constexpr,  # parts of a row that are put together at once
    TOGETHER: tl.constexpr,  # and one after the other, by one program
    PREFIXED: tl.constexpr,  # there may be a shared prefix
    SCALED: tl.constexpr,  # K and V are FP8
    SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend over one share of one kv head. A segment is a stretch [begin, end) of a row's tokens;
    place -1 - p: all that its row reads by itself. A row's first segment goes on where
    `attend_prefix` ended."""
    let_next_begin(PDL)
    kv_head = tl.program_id(0)
    share = tl.program_id(1)
    member = tl.arange(0, M)
    d = tl.arange(0, D_PADDED)
    head = kv_head * GROUP + member
    real = (member < GROUP)[:, None] & (d < D)[None, :]
    first_segment = tl.load(share_starts + share)
    last_segment = tl.load(share_starts + share + 1)
    # written before the step's first kernel
    row, token, begin, end, place = _segment(segments, first_segment, last_segment)
    if PDL:  # so are the tables, and K and V of all tokens except the newest
        start = begin // N * N
        if start < end:
            blocks = block_ids(
                table + row.to(tl.int64) * TABLE_STRIDE, start, end, begin, N, BLOCK_SIZE
            )
            first_tile = (
                blocks.to(tl.int64) * BLOCK_STRIDE
                + (start + tl.arange(0, N)) % BLOCK_SIZE * TOKEN_STRIDE
                + kv_head * HEAD_STRIDE
            )
            # of a line
            numbers: tl.constexpr = LINE // (k_cache.dtype.element_ty.primitive_bitwidth // 8)
            lines = (
                first_tile[:, None]
                + tl.minimum(tl.arange(0, (D_PADDED + numbers - 1) // numbers) * numbers, D - 1)[
                    None, :
                ]
            )
            fetch(k_cache + lines)
            if not LATENT:
                fetch(v_cache + lines)
    if PREFIXED:
        prefix_parts = tl.load(bounds)
        prefix_tokens = tl.load(bounds + 1)
    if SCALED:
        scale *= tl.load(k_scale)
        v_factor = tl.load(v_scale)
    wait(PDL)
    for segment in range(first_segment, last_segment):
        query = to_multiply(
            tl.load(
                q + token * Q_TOKEN_STRIDE + head[:, None] * Q_HEAD_STRIDE + d[None, :],
                mask=real,
                other=0.0,
            ),
            SCALED,
        )
        if REST > 0:
            q_rest = load_rest(
                q + token * Q_TOKEN_STRIDE,
                head,
                member < GROUP,
                Q_HEAD_STRIDE,
                D,
                REST,
                REST_PADDED,
                SCALED,
            )
        else:
            q_rest = query
        if SINKS:  # a row's first segment counts them
            first = tl.load(rows + place * 3 + 1, mask=place >= 0, other=0)
            acc, top, total = sinks_seen(
                sinks, head, (member < GROUP) & ((place < 0) | (segment == first)), M, D_PADDED
            )
        else:
            acc, top, total = nothing_seen(M, D_PADDED)
        if PREFIXED:
            slot = prefix_slot + tl.where(place < 0, -1 - place, place)
            for part in range(tl.where(begin == prefix_tokens, prefix_parts, 0)):
                before = ((slot + part * prefix_stride) * HEADS + head).to(tl.int64)
                lse = tl.load(partial_lse + before, mask=member < GROUP, other=HIDDEN)
                values = tl.load(partial + before[:, None] * D + d[None, :], mask=real, other=0.0)
                acc, top, total = _joined(acc, top, total, values, lse)
        acc, top, total = attend_range(
            acc,
            top,
            total,
            query,
            q_rest,
            k_cache + kv_head * HEAD_STRIDE,
            v_cache + kv_head * HEAD_STRIDE,
            table + row.to(tl.int64) * TABLE_STRIDE,
            begin // N * N,
            end,
            begin,
            member,
            member,
            scale,
            cap,
            D,
            D_PADDED,
            REST,
            REST_PADDED,
            LATENT,
            N,
            BLOCK_SIZE,
            BLOCK_STRIDE,
            TOKEN_STRIDE,
            BOUNDED=True,
            CAUSAL=False,
            WINDOW=0,
            CAPPED=CAPPED,
            PRECISION=PRECISION,
        )
        acc = acc / total[:, None]
        if place < 0:
            if SCALED:
                acc *= v_factor
            tl.store(
                out + (token * HEADS + head[:, None]) * D + d[None, :],
                acc.to(out.dtype.element_ty),
                mask=real,
            )
        else:
            at = segment * HEADS + head
            tl.store(partial + at[:, None] * D + d[None, :], acc, mask=real)
            tl.store(partial_lse + at, top + tl.log2(total), mask=member < GROUP)
            first = tl.load(rows + place * 3 + 1)
            count = tl.load(rows + place * 3 + 2)
            _put_together(
                out + token * HEADS * D,
                partial,
                partial_lse,
                arrived,
                kv_head,
                segment - first,
                first,
                count,
                prefix_slot,
                HEADS,
                GROUP,
                D,
                D_PADDED,
                MERGED,
                TOGETHER,
                v_scale,
                SCALED,
            )
        row, token, begin, end, place = _segment(segments, segment + 1, last_segment)
    first_padding = tl.load(bounds + 3).to(tl.int64)
    for i in range(share, tl.load(bounds + 4), tl.num_programs(1)):
        tl.store(
            out + ((first_padding + i) * HEADS + head[:, None]) * D + d[None, :],
            tl.zeros([M, D_PADDED], out.dtype.element_ty),
            mask=real,
        )


@triton.jit
def load_rest(
    q,
    head,
    real,
    Q_HEAD_STRIDE: tl.constexpr,
    D: tl.constexpr,
    REST: tl.constexpr,
    REST_PADDED: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Return the numbers of queries that K's after the first D are multiplied with, [M,
    REST_PADDED]."""
    rest = tl.arange(0, REST_PADDED)[None, :]
    return to_multiply(
        tl.load(
            q + head[:, None] * Q_HEAD_STRIDE + D + rest,
            mask=real[:, None] & (rest < REST),
            other=0.0,
        ),
        SCALED,
    )


@triton.jit
def _segment(segments, index, last):
    """Load the record of a segment."""
    record = segments + index * 5
    exists = index < last
    row = tl.load(record, mask=exists, other=0)
    token = tl.load(record + 1, mask=exists, other=0).to(tl.int64)
    begin = tl.load(record + 2, mask=exists, other=0)
    end = tl.load(record + 3, mask=exists, other=0)
    return row, token, begin, end, tl.load(record + 4, mask=exists, other=0)


@triton.jit
def _joined(acc, top, total, values, lse):
    """Merge another partial result, [M, D_PADDED] with base-2 log-sum-exp `lse` [M], into (acc,
    top, total)."""
    new_top = tl.maximum(top, lse)
    weight = tl.exp2(lse - new_top)
    shrink = tl.exp2(top - new_top)
    return acc * shrink[:, None] + values * weight[:, None], new_top, total * shrink + weight


@triton.jit
def _put_together(
    out,  # of one token
    partial,
    partial_lse,
    arrived,
    kv_head,
    part,
    first,
    count,
    slots,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    MERGED: tl.constexpr,
    TOGETHER: tl.constexpr,
    v_scale,
    SCALED: tl.constexpr,
):
    """Called after this program has stored a part of a row, one of `count` with slots from `first`
    on. If it was the last of TOGETHER adjacent parts, merge these into the slot of their first;
    repeat with the merged parts, until the row is complete."""
    padded: tl.constexpr = triton.next_power_of_2(GROUP)
    member = tl.arange(0, padded)
    d = tl.arange(0, D_PADDED)
    head = kv_head * GROUP + member
    real = (member < GROUP)[:, None] & (d < D)[None, :]
    inside = head[:, None] * D + d[None, :]
    apart = 1  # slots, from one part to the next
    unfinished = True
    while unfinished:
        tl.debug_barrier()  # all threads must have stored before one signals
        group = part // TOGETHER
        slot = first + group * TOGETHER * apart
        size = tl.minimum(count - group * TOGETHER, TOGETHER)
        counter = arrived + slot * (HEADS // GROUP) + kv_head
        unfinished = tl.atomic_add(counter, 1, sem="acq_rel") == size - 1
        if unfinished:
            tl.store(counter, 0)
            values, lse = merged(
                partial,
                partial_lse,
                slot,
                size,
                apart,
                head,
                inside,
                member < GROUP,
                real,
                HEADS,
                D,
                D_PADDED,
                MERGED,
            )
            unfinished = count > TOGETHER
            if unfinished:
                tl.store(partial + slot * (HEADS * D) + inside, values, mask=real)
                tl.store(partial_lse + slot * HEADS + head, lse, mask=member < GROUP)
            else:
                if SCALED:
                    values *= tl.load(v_scale)
                tl.store(out + inside, values.to(out.dtype.element_ty), mask=real)
            part = group
            count = tl.cdiv(count, TOGETHER)
            apart = apart * TOGETHER
            arrived += slots * (HEADS // GROUP)


@triton.jit
def merged(
    partial,
    partial_lse,
    first,
    count,
    apart,
    head,  # [padded]
    inside,  # [padded, D_PADDED]: of a slot's numbers
    is_head,  # [padded]
    real,  # [padded, D_PADDED]
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    N: tl.constexpr,
):
    """Merge `count` partial results of a group of heads, `apart` slots from each other: [padded,
    D_PADDED] and log-sum-exp, base 2, [padded]."""
    padded: tl.constexpr = head.shape[0]
    acc = tl.zeros([padded, D_PADDED], tl.float32)
    top = tl.full([padded], float("-inf"), tl.float32)
    total = tl.zeros([padded], tl.float32)
    for start in range(0, count, N):
        i = start + tl.arange(0, N)
        exists = i < count
        slot = first + i * apart
        lse_mask = exists[:, None] & is_head[None, :]
        # [N, padded]
        lse = tl.load(
            partial_lse + slot[:, None] * HEADS + head[None, :], mask=lse_mask, other=float("-inf")
        )
        values = tl.load(
            partial + slot[:, None, None] * (HEADS * D) + inside[None, :, :],
            mask=exists[:, None, None] & real[None, :, :],
            other=0.0,
        )
        new_top = tl.maximum(tl.maximum(top, tl.max(lse, 0)), HIDDEN)
        weights = tl.exp2(lse - new_top[None, :])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink[:, None] + tl.sum(values * weights[:, :, None], 0)
        top = new_top
    total = tl.where(is_head, total, 1.0)
    return acc / total[:, None], top + tl.log2(total)


@triton.jit
def attend_prefix(
    q,
    k_cache,
    v_cache,
    table,
    bounds,
    rows,
    partial,
    partial_lse,
    prefix_slot,
    prefix_stride,
    k_scale,
    v_scale,
    scale,
    cap,
    Q_TOKEN_STRIDE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    REST: tl.constexpr,
    REST_PADDED: tl.constexpr,
    LATENT: tl.constexpr,
    N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend with the queries of many rows over one part of their shared leading blocks: read once
    for M queries. Arguments as above."""
    let_next_begin(PDL)
    wait(PDL)
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    part = tl.program_id(2)
    parts = tl.load(bounds)
    tokens = tl.load(bounds + 1)
    num_rows = tl.load(bounds + 2)
    flat = tile * M + tl.arange(0, M)
    row = flat // GROUP
    head = kv_head * GROUP + flat % GROUP
    if (part >= parts) | (tile * M >= num_rows * GROUP):
        return
    d = tl.arange(0, D_PADDED)
    real = row < num_rows
    token = tl.load(rows + row * 3, mask=real, other=0).to(tl.int64)
    mask = real[:, None] & (d < D)[None, :]
    query = to_multiply(
        tl.load(
            q + token[:, None] * Q_TOKEN_STRIDE + head[:, None] * Q_HEAD_STRIDE + d[None, :],
            mask=mask,
            other=0.0,
        ),
        SCALED,
    )
    if REST > 0:
        q_rest = load_rest(
            q + token[:, None] * Q_TOKEN_STRIDE,
            head,
            real,
            Q_HEAD_STRIDE,
            D,
            REST,
            REST_PADDED,
            SCALED,
        )
    else:
        q_rest = query
    if SCALED:
        scale *= tl.load(k_scale)
    steps = tl.cdiv(tl.cdiv(tokens, N), parts)
    first = part * steps * N
    acc, top, total = nothing_seen(M, D_PADDED)
    acc, top, total = attend_range(
        acc,
        top,
        total,
        query,
        q_rest,
        k_cache + kv_head * HEAD_STRIDE,
        v_cache + kv_head * HEAD_STRIDE,
        table,
        first,
        tl.minimum(tokens, first + steps * N),
        first,
        row,
        row,
        scale,
        cap,
        D,
        D_PADDED,
        REST,
        REST_PADDED,
        LATENT,
        N,
        BLOCK_SIZE,
        BLOCK_STRIDE,
        TOKEN_STRIDE,
        BOUNDED=True,
        CAUSAL=False,
        WINDOW=0,
        CAPPED=CAPPED,
        PRECISION=PRECISION,
    )
    place = (prefix_slot + part * prefix_stride + row) * HEADS + head
    tl.store(
        partial + place[:, None].to(tl.int64) * D + d[None, :], acc / total[:, None], mask=mask
    )
    tl.store(partial_lse + place, top + tl.log2(total), mask=real)
