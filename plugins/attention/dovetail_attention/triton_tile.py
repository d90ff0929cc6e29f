# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Core of the `triton` kernels: a tile of queries attends to a range of one row's keys, with online
softmax.

K and V of a cache of FP8 are widened on their way to the matrix units, to float16, which holds each
of their numbers; all sums are float32. Matrix units that multiply FP8 itself keep fewer bits of a
sum, which long contexts feel, and queries and weights would have to be rounded to FP8 as well.

Online softmax after Milakov and Gimelshein (2018), tiled as in FlashAttention (Dao et al., 2022).
Scores are in base 2: `scale` holds log2(e). With a soft cap `cap` does, and `scale` has been
divided by the cap.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
LOG2_E = tl.constexpr(1.4426950408889634)
# below, tanh is a polynomial: in a difference of two numbers close to 1 it would lose digits
SMALL = tl.constexpr(0.35)
# a finite score: what a query has summed while it saw nothing is wiped out by the first key that it
# sees
HIDDEN = tl.constexpr(-1.0e30)


@triton.jit
def block_ids(table_row, start, last, low, N: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the block ids of the tile [start, start + N): one number if it is within one block,
    otherwise one per token. Never reads past `last`."""
    if BLOCK_SIZE % N == 0:
        ids = tl.load(table_row + start // BLOCK_SIZE, mask=start < last, other=0)
    else:
        token = start + tl.arange(0, N)
        ids = tl.load(
            table_row + token // BLOCK_SIZE, mask=(token >= low) & (token < last), other=0
        )
    return ids


@triton.jit
def nothing_seen(M: tl.constexpr, D_PADDED: tl.constexpr):
    """Return the initial (acc, top, total) of queries."""
    return (
        tl.zeros([M, D_PADDED], tl.float32),
        tl.full([M], float("-inf"), tl.float32),
        tl.zeros([M], tl.float32),
    )


@triton.jit
def sinks_seen(sinks, head, counted, M: tl.constexpr, D_PADDED: tl.constexpr):
    """Return (acc, top, total) of queries of `head` [M] after only their sinks, where `counted`,
    and initial values elsewhere."""
    acc, top, total = nothing_seen(M, D_PADDED)
    top = tl.where(
        counted, tl.load(sinks + head, mask=counted, other=0.0).to(tl.float32) * LOG2_E, top
    )
    return acc, tl.maximum(top, HIDDEN), tl.where(counted, 1.0, total)


@triton.jit
def tanh(x):
    """Return tanh(x) in float32, accurate to a few units in the last place."""
    magnitude = tl.abs(x)
    shrunk = tl.exp2(magnitude * (-2.0 * LOG2_E))
    square = x * x
    series = 1.0 + square * (
        -1.0 / 3
        + square
        * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835 + square * (-1382.0 / 155925))))
    )
    large = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(magnitude < SMALL, x * series, tl.where(x < 0, -large, large))


@triton.jit
def to_multiply(q, SCALED: tl.constexpr):
    """Return queries in the dtype to multiply in: float16 (or float32) with K and V in FP8, else
    their own. Where bfloat16 goes beyond float16's largest number, that is taken."""
    if SCALED and q.dtype == tl.bfloat16:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    return q


@triton.jit
def attend_range(
    acc,  # [M, D_PADDED] float32: sum of the weighted values
    top,  # [M] float32: largest score so far
    total,  # [M] float32: sum of the weights
    q,  # [M, D_PADDED], of the dtype to multiply in
    q_rest,  # [M, REST_PADDED]: of K's numbers after the first D; without any, what isn't read
    k_head,  # the kv head's place in block 0 of the cache
    v_head,
    table_row,  # the row's block ids
    first,  # the range [first, last); first is a multiple of N
    last,
    low,  # only tokens [low, last) exist
    position,  # [M] of each query in its row
    last_seen,  # [M] the last token that each query attends to
    scale,
    cap,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    REST: tl.constexpr,  # numbers of K after the first D
    REST_PADDED: tl.constexpr,
    LATENT: tl.constexpr,  # the first D numbers of K are V
    N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    BOUNDED: tl.constexpr,  # the range has nonexistent tokens: never read them, they may be NaN
    CAUSAL: tl.constexpr,  # the range has tokens that some query doesn't attend to
    WINDOW: tl.constexpr,  # 0: none
    CAPPED: tl.constexpr,  # scores have the soft cap `cap`
    PRECISION: tl.constexpr,
):
    """Return (acc, top, total) after the keys of the range."""
    paired: tl.constexpr = k_head.dtype.element_ty == tl.float8e4nv
    at_once: tl.constexpr = 2 if paired else 1  # numbers that are read as one
    if paired:
        k_head = k_head.to(tl.pointer_type(tl.int16), bitcast=True)
        v_head = v_head.to(tl.pointer_type(tl.int16), bitcast=True)
        q_evens, q_odds = tl.split(tl.reshape(q, [q.shape[0], D_PADDED // 2, 2]))
        evens, odds = tl.split(tl.reshape(acc, [acc.shape[0], D_PADDED // 2, 2]))
        if REST > 0:
            rest_evens, rest_odds = tl.split(tl.reshape(q_rest, [q.shape[0], REST_PADDED // 2, 2]))
    lane = tl.arange(0, N)
    d = tl.arange(0, D_PADDED // at_once)
    blocks = block_ids(table_row, first, last, low, N, BLOCK_SIZE)
    for start in range(first, last, N):
        token = start + lane
        exists = (token >= low) & (token < last)
        place = blocks.to(tl.int64) * (BLOCK_STRIDE // at_once) + token % BLOCK_SIZE * (
            TOKEN_STRIDE // at_once
        )
        # a step ahead, so that K and V needn't wait for them
        blocks = block_ids(table_row, start + N, last, low, N, BLOCK_SIZE)
        k = _load(k_head, place, exists, d, D // at_once, D_PADDED // at_once, BOUNDED)
        if LATENT:
            v = k
        else:
            v = _load(v_head, place, exists, d, D // at_once, D_PADDED // at_once, BOUNDED)
        if REST > 0:
            some = tl.arange(0, REST_PADDED // at_once)
            k_rest = _load(
                k_head + D // at_once,
                place,
                exists,
                some,
                REST // at_once,
                REST_PADDED // at_once,
                BOUNDED,
            )
        if paired:
            k_evens, k_odds = apart(k, q.dtype)
            scores = tl.dot(q_evens, tl.trans(k_evens), input_precision=PRECISION)  # [M, N]
            scores = tl.dot(q_odds, tl.trans(k_odds), scores, input_precision=PRECISION)
            if REST > 0:
                k_evens, k_odds = apart(k_rest, q.dtype)
                scores = tl.dot(rest_evens, tl.trans(k_evens), scores, input_precision=PRECISION)
                scores = tl.dot(rest_odds, tl.trans(k_odds), scores, input_precision=PRECISION)
        else:
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if REST > 0:
                scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision=PRECISION)
        factor = scale
        if CAPPED:
            scores = tanh(scores * scale)
            factor = cap
        if CAUSAL:
            seen = exists[None, :] & (token[None, :] <= last_seen[:, None])
            if WINDOW > 0:
                seen &= token[None, :] > position[:, None] - WINDOW
            # scaled before: where all is hidden, HIDDEN - top must be 0, not what an FMA leaves
            scores = tl.where(seen, scores * factor, HIDDEN)
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - new_top[:, None])
        else:
            if BOUNDED:
                scores = tl.where(exists[None, :], scores, HIDDEN)
            new_top = tl.maximum(top, tl.max(scores, 1) * factor)
            weights = tl.exp2(scores * factor - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        weights = weights.to(q.dtype)
        if paired:
            v_evens, v_odds = apart(v, q.dtype)
            evens = tl.dot(weights, v_evens, evens * shrink[:, None], input_precision=PRECISION)
            odds = tl.dot(weights, v_odds, odds * shrink[:, None], input_precision=PRECISION)
        else:
            acc = tl.dot(weights, v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    if paired:
        acc = tl.interleave(evens, odds)
    return acc, top, total


@triton.jit
def _load(head, place, exists, d, D: tl.constexpr, D_PADDED: tl.constexpr, BOUNDED: tl.constexpr):
    """Load elements `d` of the tokens at `place`; 0 for nonexistent tokens."""
    at = head + place[:, None] + d[None, :]
    if BOUNDED and D != D_PADDED:
        values = tl.load(at, mask=exists[:, None] & (d < D)[None, :], other=0.0)
    elif BOUNDED:
        values = tl.load(at, mask=exists[:, None], other=0.0)
    elif D != D_PADDED:
        values = tl.load(at, mask=(d < D)[None, :], other=0.0)
    else:
        values = tl.load(at)
    return values


@triton.jit
def apart(pairs, dtype: tl.constexpr):
    """The two numbers of FP8 in each of the 16 bits, widened. Read so, V lies in shared memory as
    matrix units take it: bytes would be fetched one by one."""
    if INTERPRETED or dtype != tl.float16:
        codes = pairs.to(tl.uint16, bitcast=True)
        low = (codes & 0xFF).to(tl.uint8)
        high = (codes >> 8).to(tl.uint8)
        low = low.to(tl.float8e4nv, bitcast=True).to(dtype)
        high = high.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        # the same of two pairs at once: bytes 0 and 2 are two numbers of the first result, 1 and 3
        # of the second
        low, high = tl.inline_asm_elementwise(
            """{
                .reg .b16 evens, odds;
                .reg .b32 sorted;
                prmt.b32 sorted, $2, 0, 0x3120;
                mov.b32 {evens, odds}, sorted;
                cvt.rn.f16x2.e4m3x2 $0, evens;
                cvt.rn.f16x2.e4m3x2 $1, odds;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return low, high
