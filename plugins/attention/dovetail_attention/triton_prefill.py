# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Prefill and chunks of prefills: rows with several query tokens over paged K and V, including the
row's own.

The queries of a row and the heads of a group are one flat list, query by query, so that a tile of M
reads each K and V once for a whole group, whatever the group's size. The tiles of a step are listed
by `triton_schedule.prefill_tiles`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail_attention.triton_tile import attend_range, nothing_seen, sinks_seen, to_multiply


@triton.jit
def prefill_tiles(
    q,
    out,
    k_cache,
    v_cache,
    table,  # [rows, TABLE_STRIDE] int32
    # [tiles, RECORD] int32: row, its first token, its queries (SPARSE: or none), its kv_len, first
    # flat query of the tile, …, last key that all queries see
    tiles,
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
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALED: tl.constexpr,  # K and V are FP8
    SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    SPARSE: tl.constexpr,  # some programs are idle
    RECORD: tl.constexpr,
):
    """Compute one tile of one kv head: first the keys at the window's left edge, then those visible
    to all its queries, then the diagonal."""
    kv_head = tl.program_id(0)
    record = tiles + tl.program_id(1) * RECORD
    row = tl.load(record)
    first_token = tl.load(record + 1).to(tl.int64)
    queries = tl.load(record + 2)
    if SPARSE:  # noqa: SIM102 (`and` would be computed on the device)
        if queries == 0:
            return
    before = tl.load(record + 3) - queries  # tokens of the row before its first query
    flat = tl.load(record + 4) + tl.arange(0, M)
    query = flat // GROUP
    head = kv_head * GROUP + flat % GROUP
    d = tl.arange(0, D_PADDED)
    real = (query < queries)[:, None] & (d < D)[None, :]
    token = first_token + query
    q_tile = tl.load(
        q + token[:, None] * Q_TOKEN_STRIDE + head[:, None] * Q_HEAD_STRIDE + d[None, :],
        mask=real,
        other=0.0,
    )
    q_tile = to_multiply(q_tile, SCALED)
    if REST > 0:
        rest = tl.arange(0, REST_PADDED)[None, :]
        q_rest_at = q + token[:, None] * Q_TOKEN_STRIDE + head[:, None] * Q_HEAD_STRIDE + D + rest
        q_rest = to_multiply(
            tl.load(q_rest_at, mask=(query < queries)[:, None] & (rest < REST), other=0.0), SCALED
        )
    else:
        q_rest = q_tile
    if SCALED:
        scale *= tl.load(k_scale)

    of_all = tl.load(record + 10)
    # positions of the first query of the tile, and of the last
    nearest = before + tl.load(record + 4) // GROUP
    farthest = before + tl.minimum((tl.load(record + 4) + M - 1) // GROUP, queries - 1)
    low = 0
    all_see = 0  # from here on every query sees, up to the diagonal
    if WINDOW > 0:
        low = tl.maximum(nearest - WINDOW + 1, 0)
        all_see = tl.maximum(farthest - WINDOW + 1, 0)
    end = tl.maximum(farthest, of_all) + 1
    edge = tl.minimum(tl.cdiv(all_see, N) * N, end)
    diagonal = tl.maximum((tl.maximum(nearest, of_all) + 1) // N * N, edge)
    # edge is a multiple of N, or nothing is left to see after it

    position = before + query
    last_seen = tl.maximum(position, of_all)
    k_head = k_cache + kv_head * HEAD_STRIDE
    v_head = v_cache + kv_head * HEAD_STRIDE
    table_row = table + row.to(tl.int64) * TABLE_STRIDE
    if SINKS:
        acc, top, total = sinks_seen(sinks, head, query < queries, M, D_PADDED)
    else:
        acc, top, total = nothing_seen(M, D_PADDED)
    if WINDOW > 0:
        acc, top, total = attend_range(
            acc, top, total, q_tile, q_rest, k_head, v_head, table_row, low // N * N, edge, low, position, last_seen, scale, cap,
            D, D_PADDED, REST, REST_PADDED, LATENT, N, BLOCK_SIZE, BLOCK_STRIDE, TOKEN_STRIDE,
            BOUNDED=True, CAUSAL=True, WINDOW=WINDOW, CAPPED=CAPPED, PRECISION=PRECISION,
        )  # fmt: skip
    acc, top, total = attend_range(
        acc, top, total, q_tile, q_rest, k_head, v_head, table_row, edge, diagonal, 0, position, last_seen, scale, cap,
        D, D_PADDED, REST, REST_PADDED, LATENT, N, BLOCK_SIZE, BLOCK_STRIDE, TOKEN_STRIDE,
        BOUNDED=False, CAUSAL=False, WINDOW=0, CAPPED=CAPPED, PRECISION=PRECISION,
    )  # fmt: skip
    acc, top, total = attend_range(
        acc, top, total, q_tile, q_rest, k_head, v_head, table_row, diagonal, end, low, position, last_seen, scale, cap,
        D, D_PADDED, REST, REST_PADDED, LATENT, N, BLOCK_SIZE, BLOCK_STRIDE, TOKEN_STRIDE,
        BOUNDED=True, CAUSAL=True, WINDOW=WINDOW, CAPPED=CAPPED, PRECISION=PRECISION,
    )  # fmt: skip
    acc = acc / total[:, None]
    if SCALED:
        acc *= tl.load(v_scale)
    tl.store(
        out + (token[:, None] * HEADS + head[:, None]) * D + d[None, :],
        acc.to(out.dtype.element_ty),
        mask=real,
    )
