# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Attention of a tower, and rotation of its queries or keys. Twins, with documentation:
`tower_grids.attended` and `rotated`.

Attention is FlashAttention-2 (Dao, arXiv:2307.08691) with tiles that the tensor memory accelerator
brings. Tiles have a power of 2 of columns, so a head of 72 numbers is one of 64 and one of 16 of
which 8 are zero, where padding all would take 128. cuDNN's attention is as fast, but may need a plan
for each number of patches; this kernel is compiled once for all.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dovetail.nn.kernels.launch import launch

HIDDEN = tl.constexpr(-1.0e30)  # score of a key of another sequence
QUERIES = 128  # of a program
KEYS = 64  # of a step
FEW = 96  # numbers of a head that four warps keep in registers
STAGES = 3


@triton.jit
def _with_keys(
    q_left,
    q_right,
    k_left,
    k_right,
    v_left,
    v_right,
    left,
    right,
    highest,
    total,
    first,
    end,
    head,
    scale,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return sums `left`, `right` and `total`, and scaled scores `highest`, with keys from `first`
    on; MASKED: before `end` only."""
    k = k_left.load([first, head, 0]).reshape(KEYS, LEFT)
    scores = tl.dot(q_left, k.T)
    if RIGHT > 0:
        k = k_right.load([first, head, LEFT]).reshape(KEYS, RIGHT)
        scores = tl.dot(q_right, k.T, scores)
    if MASKED:
        scores = tl.where(first + tl.arange(0, KEYS)[None, :] < end, scores, HIDDEN)
    now = tl.maximum(highest, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - now[:, None])  # one instruction before the exponential
    factor = tl.exp2(highest - now)
    total = total * factor + tl.sum(weights, 1)
    v = v_left.load([first, head, 0]).reshape(KEYS, LEFT)
    weights = weights.to(v.dtype)
    left = tl.dot(weights, v, left * factor[:, None])
    if RIGHT > 0:
        v = v_right.load([first, head, LEFT]).reshape(KEYS, RIGHT)
        right = tl.dot(weights, v, right * factor[:, None])
    return left, right, now, total


@triton.jit
def _attended(
    q_left,  # tiles [QUERIES, 1, LEFT] of [tokens, heads, SIZE]
    q_right,  # tiles [QUERIES, 1, RIGHT]
    k_left,  # tiles [KEYS, 1, LEFT] of [tokens, heads / SHARED, SIZE]
    k_right,
    v_left,
    v_right,
    out,  # [tokens, HEADS, SIZE]
    starts,  # [sequences + 1] int32
    scale,  # above 0, for powers of 2
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,  # heads of one K and V
    SIZE: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,  # 0: there is no right part
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Compute some queries of one sequence and head."""
    head = tl.program_id(1)
    start = tl.load(starts + tl.program_id(2))
    end = tl.load(starts + tl.program_id(2) + 1)
    first = start + tl.program_id(0) * QUERIES
    if first >= end:
        return
    kv_head = head // SHARED
    q = q_left.load([first, head, 0]).reshape(QUERIES, LEFT)
    left = tl.zeros([QUERIES, LEFT], tl.float32)
    right = tl.zeros([QUERIES, RIGHT if RIGHT > 0 else 1], tl.float32)
    more = q
    if RIGHT > 0:
        more = q_right.load([first, head, LEFT]).reshape(QUERIES, RIGHT)
    highest = tl.full([QUERIES], HIDDEN, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    last = start + (end - start) // KEYS * KEYS
    for key in range(start, last, KEYS):
        left, right, highest, total = _with_keys(
            q, more, k_left, k_right, v_left, v_right, left, right, highest, total, key, end,
            kv_head, scale, LEFT, RIGHT, KEYS, MASKED=False,
        )  # fmt: skip
    if last < end:
        left, right, highest, total = _with_keys(
            q, more, k_left, k_right, v_left, v_right, left, right, highest, total, last, end,
            kv_head, scale, LEFT, RIGHT, KEYS, MASKED=True,
        )  # fmt: skip
    token = first + tl.arange(0, QUERIES)
    to = out + (token.to(tl.int64)[:, None] * HEADS + head) * SIZE
    i = tl.arange(0, LEFT)[None, :]
    is_own = token[:, None] < end
    values = (left / total[:, None]).to(out.dtype.element_ty)
    tl.store(to + i, values, mask=is_own & (i < SIZE))
    if RIGHT > 0:
        i = LEFT + tl.arange(0, RIGHT)[None, :]
        values = (right / total[:, None]).to(out.dtype.element_ty)
        tl.store(to + i, values, mask=is_own & (i < SIZE))


def attended(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float,
) -> torch.Tensor:
    """Heads have 16 to 128 numbers, a multiple of 8, which are contiguous."""
    _, heads, size = q.shape
    left = max(16, 1 << (size.bit_length() - 1))
    right = max(16, triton.next_power_of_2(size - left)) if size > left else 0
    tiles = [
        TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, 1, columns])
        for x, rows in ((q, QUERIES), (k, KEYS), (v, KEYS))
        for columns in (left, right or left)
    ]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch(_attended, (triton.cdiv(longest, QUERIES), heads, len(starts) - 1))(
        *tiles,
        out,
        starts,
        scale * math.log2(math.e),
        HEADS=heads,
        SHARED=heads // k.shape[1],
        SIZE=size,
        LEFT=left,
        RIGHT=right,
        QUERIES=QUERIES,
        KEYS=KEYS,
        num_warps=4 if size <= FEW else 8,
        num_stages=STAGES,
    )
    return out


@triton.jit
def _rotated(
    x,  # [tokens, HEADS, 2 * HALF], tokens TOKEN numbers apart
    cos,  # [tokens, 2 * HALF]
    sin,
    out,  # [tokens, HEADS, 2 * HALF]
    TOKEN: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):
    """Compute all heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, PADDED_HEADS)[:, None]
    i = tl.arange(0, PADDED_HALF)[None, :]
    mask = (head < HEADS) & (i < HALF)
    at = head * (2 * HALF) + i
    left = tl.load(x + token * TOKEN + at, mask=mask).to(tl.float32)
    right = tl.load(x + token * TOKEN + at + HALF, mask=mask).to(tl.float32)
    angle = token * (2 * HALF) + i
    left_cos = tl.load(cos + angle, mask=i < HALF).to(tl.float32)
    left_sin = tl.load(sin + angle, mask=i < HALF).to(tl.float32)
    right_cos = tl.load(cos + angle + HALF, mask=i < HALF).to(tl.float32)
    right_sin = tl.load(sin + angle + HALF, mask=i < HALF).to(tl.float32)
    to = out + token * (HEADS * 2 * HALF) + at
    tl.store(to, left * left_cos - right * left_sin, mask=mask)
    tl.store(to + HALF, right * right_cos + left * right_sin, mask=mask)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    tokens, heads, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(_rotated, (tokens,))(
        x,
        cos,
        sin,
        out,
        TOKEN=x.stride(0),
        HEADS=heads,
        HALF=size // 2,
        PADDED_HEADS=triton.next_power_of_2(heads),
        PADDED_HALF=triton.next_power_of_2(size // 2),
        num_warps=4,
    )
    return out
