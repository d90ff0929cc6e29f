# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""The heart of the `triton` kernels: a tile of queries goes over a range of one row's keys, with a running softmax.

Online softmax after Milakov and Gimelshein (2018), tiled as in FlashAttention (Dao et al., 2022). Scores are in base 2: `scale` holds log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl

HIDDEN = tl.constexpr(-1.0e30)  # a finite score: what a query has summed while it saw nothing is wiped out by the first key that it sees


@triton.jit
def block_ids(table_row, start, last, low, N: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the block ids of the tile [start, start + N): one number if it lies in one block, else one for each token. Never reads past `last`."""
    if BLOCK_SIZE % N == 0:
        ids = tl.load(table_row + start // BLOCK_SIZE, mask=start < last, other=0)
    else:
        token = start + tl.arange(0, N)
        ids = tl.load(table_row + token // BLOCK_SIZE, mask=(token >= low) & (token < last), other=0)
    return ids


@triton.jit
def nothing_seen(M: tl.constexpr, D_PADDED: tl.constexpr):
    """(acc, top, total) of queries before their first key."""
    return tl.zeros([M, D_PADDED], tl.float32), tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)


@triton.jit
def attend_range(
    acc,  # [M, D_PADDED] float32: sum of the weighted values
    top,  # [M] float32: largest score so far
    total,  # [M] float32: sum of the weights
    q,  # [M, D_PADDED]
    k_head,  # the kv head's place in block 0 of the cache
    v_head,
    table_row,  # the row's block ids
    first,  # the range [first, last); first is a multiple of N
    last,
    low,  # only tokens [low, last) exist
    position,  # [M] of each query in its row
    scale,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    BOUNDED: tl.constexpr,  # the range has tokens that don't exist: never read them, they may be NaN
    CAUSAL: tl.constexpr,  # the range has tokens that some query doesn't see
    WINDOW: tl.constexpr,  # 0: none
    PRECISION: tl.constexpr,
):
    """(acc, top, total) after the keys of the range."""
    lane = tl.arange(0, N)
    d = tl.arange(0, D_PADDED)
    blocks = block_ids(table_row, first, last, low, N, BLOCK_SIZE)
    for start in range(first, last, N):
        token = start + lane
        exists = (token >= low) & (token < last)
        place = blocks.to(tl.int64) * BLOCK_STRIDE + token % BLOCK_SIZE * TOKEN_STRIDE
        blocks = block_ids(table_row, start + N, last, low, N, BLOCK_SIZE)  # a step ahead, so that K and V needn't wait for them
        offsets = place[:, None] + d[None, :]
        if BOUNDED and D != D_PADDED:
            mask = exists[:, None] & (d < D)[None, :]
            k = tl.load(k_head + offsets, mask=mask, other=0.0)
            v = tl.load(v_head + offsets, mask=mask, other=0.0)
        elif BOUNDED:
            k = tl.load(k_head + offsets, mask=exists[:, None], other=0.0)
            v = tl.load(v_head + offsets, mask=exists[:, None], other=0.0)
        elif D != D_PADDED:
            k = tl.load(k_head + offsets, mask=(d < D)[None, :], other=0.0)
            v = tl.load(v_head + offsets, mask=(d < D)[None, :], other=0.0)
        else:
            k = tl.load(k_head + offsets)
            v = tl.load(v_head + offsets)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [M, N]
        if CAUSAL:
            seen = exists[None, :] & (token[None, :] <= position[:, None])
            if WINDOW > 0:
                seen &= token[None, :] > position[:, None] - WINDOW
            scores = tl.where(seen, scores * scale, HIDDEN)  # scaled before: where all is hidden, HIDDEN - top must be 0, not what an FMA leaves
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - new_top[:, None])
        else:
            if BOUNDED:
                scores = tl.where(exists[None, :], scores, HIDDEN)
            new_top = tl.maximum(top, tl.max(scores, 1) * scale)
            weights = tl.exp2(scores * scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    return acc, top, total
