# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"
# ruff: noqa: N803 (constants are upper case)
"""A linear layer of one row whose weights have 4 bits: `one_row`, but for reading the weights, eight in each 32-bit word. Twin: `dequantized` of the
format in `dovetail.nn.format.int4`.

A weight is put into the upper bits of the mantissa of 16, which makes it a float32 in two operations; what that adds is subtracted from the sums. The
products of a word's low halves and of its high ones are summed apart, since these may belong to two groups, and then scaled.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.launch import launch
from dovetail.nn.kernels.streamed import Stored

WORDS = 8192  # of a program: with fewer outputs, scales are read more often than needed; measured on an H200, as are the warps
WARPS = 4


@triton.jit
def _sums(words, inputs, scales, zeros, n, real, w, outputs, INPUTS: tl.constexpr, GROUP: tl.constexpr, ASYMMETRIC: tl.constexpr):
    """[N] float32: outputs n; words [N, PADDED] int32, inputs a tuple of 8 [PADDED]."""
    even, odd = tl.zeros(words.shape, tl.float32), tl.zeros(words.shape, tl.float32)
    for at in tl.static_range(8):
        moved = words << (19 - 4 * at) if at < 5 else words >> (4 * at - 19)
        raised = ((moved & 0x00780000) | 0x41800000).to(tl.float32, bitcast=True)  # 16 and the weight
        if at % 2 == 0:
            even += raised * inputs[at][None, :]
        else:
            odd += raised * inputs[at][None, :]
    low = inputs[0] + inputs[2] + inputs[4] + inputs[6]
    high = inputs[1] + inputs[3] + inputs[5] + inputs[7]
    first = w // 16 * 128 + w % 16 * 4  # input of a word's lowest bits
    even_there, odd_there = real[:, None] & (first < INPUTS)[None, :], real[:, None] & (first + 64 < INPUTS)[None, :]
    even_at, odd_at = (first // GROUP)[None, :] * outputs + n[:, None], ((first + 64) // GROUP)[None, :] * outputs + n[:, None]
    if ASYMMETRIC:
        even -= (tl.load(zeros + even_at, mask=even_there, other=0).to(tl.float32) + 16.0) * low[None, :]
        odd -= (tl.load(zeros + odd_at, mask=odd_there, other=0).to(tl.float32) + 16.0) * high[None, :]
    else:
        even -= 24.0 * low[None, :]
        odd -= 24.0 * high[None, :]
    if GROUP >= 128:
        return tl.sum((even + odd) * tl.load(scales + even_at, mask=even_there, other=0.0).to(tl.float32), 1)
    even *= tl.load(scales + even_at, mask=even_there, other=0.0).to(tl.float32)
    odd *= tl.load(scales + odd_at, mask=odd_there, other=0.0).to(tl.float32)
    return tl.sum(even + odd, 1)


@triton.jit
def _linear_int4(
    x,  # [INPUTS]
    weight,  # [outputs, WORDS] int32; GATED: gates, then ups
    scales,  # [groups, outputs]; GATED: likewise
    zeros,  # likewise
    bias,  # [outputs]; GATED: likewise
    norm,  # [INPUTS]
    out,  # [outputs]; ADDS: it is added to
    outputs,  # GATED: pairs
    eps,
    INPUTS: tl.constexpr,
    WORDS: tl.constexpr,
    PADDED: tl.constexpr,  # words
    N: tl.constexpr,
    GROUP: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    """N outputs."""
    n, w = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, PADDED)
    real, there = n < outputs, w < WORDS
    mask = real[:, None] & there[None, :]
    stored = outputs * 2 if GATED else outputs
    let_next_begin(PDL)
    words = tl.load(weight + n.to(tl.int64)[:, None] * WORDS + w[None, :], mask=mask, other=0)
    if GATED:
        up_words = tl.load(weight + (n + outputs).to(tl.int64)[:, None] * WORDS + w[None, :], mask=mask, other=0)
    wait(PDL)
    first = w // 16 * 128 + w % 16 * 4
    inputs, squares = (), tl.zeros([PADDED], tl.float32)
    for at in tl.static_range(8):
        i = first + at % 2 * 64 + at // 2
        values = tl.load(x + i, mask=there & (i < INPUTS), other=0.0).to(tl.float32)
        squares += values * values
        inputs += (values,)
    if NORMED:
        scale = tl.rsqrt(tl.sum(squares, 0) / INPUTS + eps)
        normed = ()
        for at in tl.static_range(8):
            i = first + at % 2 * 64 + at // 2
            values = inputs[at] * scale * tl.load(norm + i, mask=there & (i < INPUTS), other=0.0).to(tl.float32)
            normed += (values.to(x.dtype.element_ty).to(tl.float32),)  # rounded as the twin does it
        inputs = normed
    sums = _sums(words, inputs, scales, zeros, n, real, w, stored, INPUTS, GROUP, ASYMMETRIC)
    if BIASED:
        sums += tl.load(bias + n, mask=real, other=0.0).to(tl.float32)
    if GATED:
        ups = _sums(up_words, inputs, scales, zeros, n + outputs, real, w, stored, INPUTS, GROUP, ASYMMETRIC)
        if BIASED:
            ups += tl.load(bias + outputs + n, mask=real, other=0.0).to(tl.float32)
        sums = sums / (1.0 + tl.exp(-sums)) * ups
    if ADDS:
        sums += tl.load(out + n, mask=real, other=0.0).to(tl.float32)
    tl.store(out + n, sums.to(out.dtype.element_ty), mask=real)


def linear(
    x: torch.Tensor,
    weight: Stored,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
    at_once: int | None = None,
    warps: int | None = None,
) -> torch.Tensor:
    """x [1, inputs], contiguous, and a weight of 4 bits -> [1, outputs], like x; computes in float32.

    `norm`, `gated`, `out`, `into`: as of `one_row.linear`. `at_once`: outputs of a program, and `warps`: its warps, instead of those measured
    as best.
    """
    words = weight.values.view(torch.int32)
    outputs = len(words) // (2 if gated else 1)
    adds = out is not None
    if out is None:
        out = torch.empty((1, outputs), dtype=x.dtype, device=x.device) if into is None else into
    norm_weight, eps = norm or (weight.scales, 0.0)
    padded = triton.next_power_of_2(words.shape[1])
    at_once = at_once or max(2, min(16, WORDS // padded // (4 if gated else 1)))
    launch(_linear_int4, (triton.cdiv(outputs, at_once),))(
        x,
        words,
        weight.scales,
        weight.values if weight.zeros is None else weight.zeros,
        weight.scales if bias is None else bias,
        norm_weight,
        out,
        outputs,
        eps,
        INPUTS=weight.inputs,
        WORDS=words.shape[1],
        PADDED=padded,
        N=at_once,
        GROUP=weight.group,
        ASYMMETRIC=weight.zeros is not None,
        NORMED=norm is not None,
        GATED=gated,
        ADDS=adds,
        BIASED=bias is not None,
        num_warps=warps or WARPS,
        **pdl_options(x.device),
    )
    return out
