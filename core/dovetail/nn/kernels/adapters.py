# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"
# ruff: noqa: N803 (constants are upper case)
"""LoRA adapters of a linear layer, as another for each token. Tokens are sorted by slot, padded to
whole blocks per slot, like the pairs of `expert_sorting`; blocks of slot 0 are skipped. Two kernels
per layer: the first multiplies by A, some inputs per program, so that few tokens occupy the whole
GPU; the second adds these shares up, and adds their product with B to the layer's outputs. Twin:
`dovetail.nn.adapters`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.expert_sorting import sort
from dovetail.nn.kernels.launch import launch

# up to that many tokens, blocks have the former number of rows
FEW_TOKENS = 512
FEW_ROWS = 16
MANY_ROWS = 64
BYTES_AT_ONCE = 256  # of the inputs of a token, if rows are few; otherwise half
PROGRAMS = 128  # of the first kernel: about one for each multiprocessor
MOST_SHARES = 8  # each program of the second reads all


class SortedTokens(NamedTuple):
    """Tokens of a step by slot."""

    places: torch.Tensor  # [blocks, rows] int32: tokens, or their number where there is none
    slots: torch.Tensor  # [blocks] int32; -1: not needed


@triton.jit(do_not_specialize=["tokens"])
def _multiply_a(
    x,  # [tokens, INPUTS]
    a,  # [slots, RANKS, INPUTS]
    places,
    slots,
    inner,  # [shares, tokens, RANKS] float32
    tokens,
    slot_stride,  # numbers from one slot to the next
    INPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    SHARE: tl.constexpr,  # inputs per program
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute COLUMNS products of a block's tokens with a share of the inputs."""
    block = tl.program_id(0)
    share = tl.program_id(2)
    m = tl.arange(0, ROWS)
    r = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    i = tl.arange(0, AT_ONCE)
    let_next_begin(PDL)
    wait(PDL)
    slot = tl.load(slots + block)
    if slot > 0:
        t = tl.load(places + block * ROWS + m)
        real = t < tokens
        a_at = a + slot.to(tl.int64) * slot_stride + r[None, :] * INPUTS + i[:, None]
        x_at = x + t.to(tl.int64)[:, None] * INPUTS + i[None, :]
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for at in range(share * SHARE, min(share * SHARE + SHARE, INPUTS), AT_ONCE):
            within = at + i < INPUTS
            left = tl.load(x_at + at, mask=real[:, None] & within[None, :], other=0.0)
            right = tl.load(a_at + at, mask=within[:, None] & (r < RANKS)[None, :], other=0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
        place = inner + (share * tokens + t).to(tl.int64)[:, None] * RANKS + r[None, :]
        tl.store(place, total, mask=real[:, None] & (r < RANKS)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _add_b(
    inner,
    b,  # [slots, OUTPUTS, RANK]
    y,  # [tokens, OUTPUTS]
    places,
    slots,
    pieces,  # [pieces, 3]: first output and end, of a single module, and the module
    tokens,
    slot_stride,
    OUTPUTS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,  # ranks
    PDL: tl.constexpr,
):
    """Add the sum of the shares, times B, to one piece of the outputs of a block's tokens."""
    block = tl.program_id(0)
    piece = tl.program_id(1)
    m = tl.arange(0, ROWS)
    i = tl.arange(0, AT_ONCE)
    start = tl.load(pieces + 3 * piece)
    end = tl.load(pieces + 3 * piece + 1)
    module = tl.load(pieces + 3 * piece + 2)
    n = start + tl.arange(0, COLUMNS)
    let_next_begin(PDL)
    wait(PDL)
    slot = tl.load(slots + block)
    if slot > 0:
        t = tl.load(places + block * ROWS + m)
        real = t < tokens
        y_at = y + t.to(tl.int64)[:, None] * OUTPUTS + n[None, :]
        mask = real[:, None] & (n < end)[None, :]
        b_at = b + slot.to(tl.int64) * slot_stride + n[None, :] * RANK + i[:, None]
        total = tl.load(y_at, mask=mask, other=0.0).to(tl.float32)
        for at in range(0, RANK, AT_ONCE):
            inner_at = inner + t.to(tl.int64)[:, None] * RANKS + (module * RANK + at + i)[None, :]
            left = tl.zeros([ROWS, AT_ONCE], tl.float32)
            for share in tl.static_range(SHARES):
                left += tl.load(
                    inner_at + share * tokens.to(tl.int64) * RANKS, mask=real[:, None], other=0.0
                )
            right = tl.load(b_at + at, mask=(n < end)[None, :], other=0.0)
            total = tl.dot(left.to(y.dtype.element_ty), right, total, input_precision="ieee")
        tl.store(y_at, total.to(y.dtype.element_ty), mask=mask)


def sorted_tokens(slots: torch.Tensor, count: int) -> SortedTokens:
    """Sort tokens by their slots [tokens] int32, of which there are `count`, slot 0 included."""
    return SortedTokens(*sort(slots, count, FEW_ROWS if len(slots) <= FEW_TOKENS else MANY_ROWS))


def add(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    pieces: torch.Tensor,
    width: int,
    tokens: SortedTokens,
) -> None:
    """Add to y [tokens, out] what the tokens' adapters compute of x [tokens, in]. a [slots,
    modules * rank, in] and b [slots, out, rank] are each contiguous within a slot. `pieces` [any,
    3] int32: (first output, end, module), each of at most `width` outputs, a power of two."""
    count, inputs = x.shape
    (_, ranks, _), (_, outputs, rank) = a.shape, b.shape
    blocks, rows = tokens.places.shape
    columns = min(64, triton.next_power_of_2(ranks))
    column_blocks = triton.cdiv(ranks, columns)
    few = rows == FEW_ROWS
    at_once = BYTES_AT_ONCE // x.element_size() // (1 if few else 2)
    chunks = triton.cdiv(inputs, at_once)
    shares = max(1, min(MOST_SHARES, PROGRAMS // (blocks * column_blocks), chunks // 2))
    share = triton.cdiv(chunks, shares) * at_once
    shares = triton.cdiv(inputs, share)
    inner = torch.empty((shares, count, ranks), dtype=torch.float32, device=x.device)
    sizes = {"ROWS": rows, "RANKS": ranks, "num_warps": 4 if few else 8, **pdl_options(x.device)}
    launch(_multiply_a, (blocks, column_blocks, shares))(
        *(x, a, tokens.places, tokens.slots, inner, count, a.stride(0)),
        INPUTS=inputs,
        SHARE=share,
        COLUMNS=columns,
        AT_ONCE=at_once,
        num_stages=3,
        **sizes,
    )
    launch(_add_b, (blocks, len(pieces)))(
        *(inner, b, y, tokens.places, tokens.slots, pieces, count, b.stride(0)),
        OUTPUTS=outputs,
        RANK=rank,
        SHARES=shares,
        COLUMNS=width,
        AT_ONCE=min(64, rank & -rank),
        **sizes,
    )
