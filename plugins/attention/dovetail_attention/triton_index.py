# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Kernels of attention to the tokens that an indexer selects (DeepSeek-V3.2). A *line* is a query
token: of a decode, a chunk or a prefill alike. Grids depend on the number of lines and the longest
row possible only, and programs beyond a line's tokens exit, so that a CUDA graph may replay them.

      index_scores       index keys of a row, and queries      scores of its tokens
      choose             scores                                positions of the `TOP_K` best
      find_entries       positions, block table                where K of these is, in a list
      attend_selected    K in this list                        parts of the output
      merge_splits       parts                                 the output

Lines of up to `TOP_K` tokens aren't scored: all of these are selected.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail_attention.triton_decode import load_rest, merged
from dovetail_attention.triton_tile import HIDDEN, attend_range, nothing_seen, to_multiply

DIGITS = tl.constexpr(256)


@triton.jit(do_not_specialize=["first"])
def index_scores(
    q,  # [lines, HEADS, D]
    weights,  # [lines, HEADS] float32
    keys,  # the layer's index keys, in block 0
    table,  # [rows, TABLE_STRIDE] int32
    lines,  # [lines, 2] int32: row, and tokens up to the line's own
    scores,  # [some lines, SCORES_STRIDE] float32
    first,  # the line of scores[0]
    TABLE_STRIDE: tl.constexpr,
    SCORES_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    M: tl.constexpr,  # HEADS, padded
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    N: tl.constexpr,  # keys at once
    SHARE: tl.constexpr,  # keys of a program
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    TOP_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the scores of a share of a line's tokens: sum over heads of weight * max(0, q · key)."""
    line = (first + tl.program_id(1)).to(tl.int64)
    row = tl.load(lines + line * 2).to(tl.int64)
    seen = tl.load(lines + line * 2 + 1)
    start = tl.program_id(0) * SHARE
    if (seen > TOP_K) & (start < seen):
        head = tl.arange(0, M)
        d = tl.arange(0, D_PADDED)
        real = (head < HEADS)[:, None] & (d < D)[None, :]
        query = tl.load(q + (line * HEADS + head[:, None]) * D + d[None, :], mask=real, other=0.0)
        weight = tl.load(weights + line * HEADS + head, mask=head < HEADS, other=0.0)
        out = scores + tl.program_id(1).to(tl.int64) * SCORES_STRIDE
        for at in range(start, tl.minimum(start + SHARE, seen), N):
            token = at + tl.arange(0, N)
            exists = token < seen
            block = tl.load(
                table + row * TABLE_STRIDE + token // BLOCK_SIZE, mask=exists, other=0
            ).to(tl.int64)
            place = block * BLOCK_STRIDE + token % BLOCK_SIZE * TOKEN_STRIDE
            key = tl.load(
                keys + place[:, None] + d[None, :],
                mask=exists[:, None] & (d < D)[None, :],
                other=0.0,
            )
            products = tl.dot(query, tl.trans(key), input_precision=PRECISION)  # [M, N]
            score = tl.sum(weight[:, None] * tl.maximum(products, 0.0), 0)
            tl.store(out + token, score, mask=exists)


@triton.jit(do_not_specialize=["first"])
def choose(
    scores,  # [some lines, SCORES_STRIDE] float32
    lines,
    selected,  # [lines, TOP_K] int32
    first,
    SCORES_STRIDE: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
):
    """Write the positions of a line's tokens with the highest scores, ascending; of equal scores
    the earliest. The lowest that counts is found digit by digit (radix select)."""
    line = (first + tl.program_id(0)).to(tl.int64)
    seen = tl.load(lines + line * 2 + 1)
    own = scores + tl.program_id(0).to(tl.int64) * SCORES_STRIDE
    out = selected + line * TOP_K
    if seen <= TOP_K:
        for at in range(0, seen, N):
            token = at + tl.arange(0, N)
            tl.store(out + token, token, mask=token < seen)
    else:
        digits = tl.arange(0, DIGITS)
        lowest = tl.full([], 0, tl.uint32)  # its first digits
        left = tl.full([], TOP_K, tl.int32)  # how many of those with these digits count
        for level in tl.static_range(4):
            counts = tl.zeros([DIGITS], tl.int32)
            for at in range(0, seen, N):
                code, inside = _codes(own, at, seen, N)
                if level > 0:
                    inside &= (code >> (32 - 8 * level)) == lowest
                digit = ((code >> (24 - 8 * level)) & 255).to(tl.int32)
                counts += tl.histogram(digit, DIGITS, mask=inside)
            higher = tl.sum(counts, 0) - tl.cumsum(counts, 0)
            found = tl.sum((higher >= left).to(tl.int32), 0)
            left -= tl.sum(tl.where(digits == found, higher, 0), 0)
            lowest = (lowest << 8) | found.to(tl.uint32)
        written = tl.full([], 0, tl.int32)
        equals = tl.full([], 0, tl.int32)
        for at in range(0, seen, N):
            code, exists = _codes(own, at, seen, N)
            equal = (exists & (code == lowest)).to(tl.int32)
            before = equals + tl.cumsum(equal, 0) - equal
            taken = ((exists & (code > lowest)) | ((equal > 0) & (before < left))).to(tl.int32)
            place = written + tl.cumsum(taken, 0) - taken
            tl.store(out + place, at + tl.arange(0, N), mask=taken > 0)
            written += tl.sum(taken, 0)
            equals += tl.sum(equal, 0)


@triton.jit
def _codes(scores, at, seen, N: tl.constexpr):
    """Return whole numbers in the order of the scores of tokens from `at` on, uint32, and which
    exist."""
    token = at + tl.arange(0, N)
    exists = token < seen
    # -0 is 0
    score = tl.load(scores + token, mask=exists, other=0.0) + 0.0
    bits = score.to(tl.uint32, bitcast=True)
    flipped = tl.where((bits >> 31) == 1, 0xFFFFFFFF, 0x80000000).to(tl.uint32)
    return bits ^ flipped, exists


@triton.jit
def find_entries(
    selected,  # [lines, TOP_K] int32
    lines,
    table,
    entries,  # [lines, TOP_K] int32
    TABLE_STRIDE: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,  # from one block to the next
    TOKEN_ENTRIES: tl.constexpr,
):
    """Write where K of N selected tokens of a line begins."""
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(lines + line * 2).to(tl.int64)
    seen = tl.load(lines + line * 2 + 1)
    at = tl.program_id(1) * N + tl.arange(0, N)
    exists = at < tl.minimum(seen, TOP_K)
    token = tl.load(selected + line * TOP_K + at, mask=exists, other=0)
    block = tl.load(table + row * TABLE_STRIDE + token // BLOCK_SIZE, mask=exists, other=0)
    entry = block * BLOCK_ENTRIES + token % BLOCK_SIZE * TOKEN_ENTRIES
    tl.store(entries + line * TOP_K + at, entry, mask=exists)


@triton.jit
def attend_selected(
    q,
    out,  # [lines, HEADS, D]
    k_cache,
    entries,  # [lines, TOP_K] int32
    lines,
    partial,  # [lines * SPLITS, HEADS, D] float32
    partial_lse,  # [lines * SPLITS, HEADS] float32, base 2
    k_scale,  # [] float32
    scale,
    Q_TOKEN_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,  # GROUP, padded
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    REST: tl.constexpr,
    REST_PADDED: tl.constexpr,
    N: tl.constexpr,
    ENTRY: tl.constexpr,  # numbers
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,  # K is FP8
    PRECISION: tl.constexpr,
):
    """Attend with a group of a line's heads over one of SPLITS parts of its selected tokens, and no
    others. A line without any gets zeros."""
    line = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    count = tl.minimum(tl.load(lines + line * 2 + 1), TOP_K)
    member = tl.arange(0, M)
    d = tl.arange(0, D_PADDED)
    head = tl.program_id(1) * GROUP + member
    real = (member < GROUP)[:, None] & (d < D)[None, :]
    own = q + line * Q_TOKEN_STRIDE
    query = to_multiply(
        tl.load(own + head[:, None] * (D + REST) + d[None, :], mask=real, other=0.0), SCALED
    )
    if REST > 0:
        q_rest = load_rest(own, head, member < GROUP, D + REST, D, REST, REST_PADDED, SCALED)
    else:
        q_rest = query
    if SCALED:
        scale *= tl.load(k_scale)
    begin = split * (tl.cdiv(tl.cdiv(count, N), SPLITS) * N)
    end = tl.minimum(begin + tl.cdiv(tl.cdiv(count, N), SPLITS) * N, count)
    acc, top, total = nothing_seen(M, D_PADDED)
    acc, top, total = attend_range(
        acc,
        top,
        total,
        query,
        q_rest,
        k_cache,
        k_cache,
        entries + line * TOP_K,
        begin,
        end,
        begin,
        member,
        member,
        scale,
        0.0,
        D,
        D_PADDED,
        REST,
        REST_PADDED,
        LATENT=True,
        N=N,
        BLOCK_SIZE=1,
        BLOCK_STRIDE=ENTRY,
        TOKEN_STRIDE=0,
        BOUNDED=True,
        CAUSAL=False,
        WINDOW=0,
        CAPPED=False,
        PRECISION=PRECISION,
    )
    some = begin < end
    acc = tl.where(some, acc / tl.where(some, total, 1.0)[:, None], 0.0)
    if SCALED:
        acc *= tl.load(k_scale)
    if SPLITS == 1:
        place = (line * HEADS + head[:, None]) * D + d[None, :]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=real)
    else:
        at = (line * SPLITS + split) * HEADS + head
        lse = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), HIDDEN)
        tl.store(partial + at[:, None] * D + d[None, :], acc, mask=real)
        tl.store(partial_lse + at, lse, mask=member < GROUP)


@triton.jit
def merge_splits(
    partial,
    partial_lse,
    out,  # [lines, HEADS, D]
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    N: tl.constexpr,  # parts that are put together at once
):
    """Put the parts of one head of a line together."""
    line = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) + tl.arange(0, 1)
    d = tl.arange(0, D_PADDED)
    inside = head[:, None] * D + d[None, :]
    real = (head < HEADS)[:, None] & (d < D)[None, :]
    values, _ = merged(
        partial,
        partial_lse,
        line * SPLITS,
        SPLITS,
        1,
        head,
        inside,
        head < HEADS,
        real,
        HEADS,
        D,
        D_PADDED,
        N,
    )
    tl.store(out + line * HEADS * D + inside, values.to(out.dtype.element_ty), mask=real)
