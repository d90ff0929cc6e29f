# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"
# ruff: noqa: N803, N806 (constants are upper case)
"""Feed-forwards of a mixture of experts in float8 for sorted pairs (see the top of `experts`), by
products of float8 by float8, on a Hopper: weights aren't widened.

For many places of an expert, inputs are rounded to e4m3. For few, where reading the weights takes
longer than multiplying, an input is split into two numbers of e4m3, which together have all bits of
a bfloat16. Twins: `float8_products.twin_of_narrowed` or `twin_of_split`, and
`dovetail.nn.format.base.plain_experts`.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl

from dovetail.errors import DovetailError
from dovetail.nn.kernels.dependent_launch import let_next_begin, wait
from dovetail.nn.kernels.expert_sorting import sort
from dovetail.nn.kernels.float8_products import narrowed, split
from dovetail.nn.kernels.sorted_experts import Tiling, activated, launch_sorted
from dovetail.nn.kernels.stored_experts import FLOAT8, Stored

# of a thread in `_sorted_float8`, for the last layer: three programs then fit a processor
REGISTERS = 168
# places of a block of `_sorted_float8`, from which on it looks whether the second half is empty
HALVED: tl.constexpr = tl.constexpr(128)


@triton.jit
def _products(
    x_tile,
    x_scale,
    weight,
    scale_at,
    at,
    k,
    inside,
    n,
    real,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    SHARING: tl.constexpr,
    N: tl.constexpr,
):
    """[M, N] float32: float8 inputs [M, K] from `at` on times the weights of outputs n, and the
    scales if they are by groups."""
    tile = tl.load(
        weight + n.to(tl.int64)[None, :] * INPUTS + k[:, None],
        mask=real[None, :] & inside[:, None],
        other=0.0,
    )
    products = tl.dot(x_tile, tile)
    if GROUP > 0:
        groups: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
        if SHARING % N == 0:  # all outputs of the program share it
            products *= (
                x_scale * tl.load(scale_at + tl.min(n, 0) // SHARING * groups + at // GROUP)
            )[:, None]
        else:
            scale = tl.load(scale_at + n // SHARING * groups + at // GROUP, mask=real, other=0.0)
            products *= x_scale[:, None] * scale[None, :]
    return products


@triton.jit
def _float8_block(
    block,  # the index of its first place
    expert,
    n,
    x,
    x_scales,
    values,
    scales,
    bias,
    weights,
    places,
    out,
    pairs,
    tokens,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    SHARING: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BIASED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute N outputs of M places from `block` on: see `_sorted_float8`."""
    pair = tl.load(places + block + tl.arange(0, M))
    there = pair < pairs
    real = n < OUTPUTS
    source = (pair // TOP if GATED else pair).to(tl.int64)
    PAIRED: tl.constexpr = GATED and ACTIVATION != 4
    stored: tl.constexpr = 2 * OUTPUTS if PAIRED else OUTPUTS
    groups: tl.constexpr = (INPUTS + GROUP - 1) // GROUP if GROUP > 0 else 1
    weight = values + expert * (stored * INPUTS)
    scale_at = scales + expert * (stored // SHARING * groups)
    sums = tl.zeros([M, N], tl.float32)
    ups = tl.zeros([M, N], tl.float32)
    WHOLE: tl.constexpr = INPUTS % K == 0
    for at in tl.range(0, INPUTS, K, num_stages=STAGES):
        k = at + tl.arange(0, K)
        inside = (k >= 0) if WHOLE else (k < INPUTS)
        inputs = tl.load(
            x + source[:, None] * INPUTS + k[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        if GROUP > 0:
            x_scale = tl.load(x_scales + source * groups + at // GROUP, mask=there, other=0.0)
        else:
            x_scale = tl.full([M], 1.0, tl.float32)
        sums += _products(
            inputs, x_scale, weight, scale_at, at, k, inside, n, real, INPUTS, GROUP, SHARING, N
        )
        if PAIRED:
            ups += _products(
                inputs,
                x_scale,
                weight,
                scale_at,
                at,
                k,
                inside,
                n + OUTPUTS,
                real,
                INPUTS,
                GROUP,
                SHARING,
                N,
            )
    if GROUP == 0:
        x_scale = tl.load(x_scales + source, mask=there, other=0.0)[:, None]
        sums *= x_scale * tl.load(scale_at + n, mask=real, other=0.0)[None, :]
        if PAIRED:
            ups *= x_scale * tl.load(scale_at + OUTPUTS + n, mask=real, other=0.0)[None, :]
    if BIASED:
        at_bias = bias + expert * stored + n
        sums += tl.load(at_bias, mask=real, other=0.0).to(tl.float32)[None, :]
        if PAIRED:
            ups += tl.load(at_bias + OUTPUTS, mask=real, other=0.0).to(tl.float32)[None, :]
    if GATED:
        result = activated(sums, ups, ACTIVATION, ALPHA, LIMIT)
        to = pair
    else:
        result = sums * tl.load(weights + pair, mask=there, other=0.0)[:, None]
        to = pair % TOP * tokens + pair // TOP
    tl.store(
        out + to.to(tl.int64)[:, None] * OUTPUTS + n[None, :],
        result.to(out.dtype.element_ty),
        mask=there[:, None] & real[None, :],
    )


@triton.jit(do_not_specialize=["pairs", "tokens"])
def _sorted_float8(
    x,  # float8, otherwise as of `_sorted`
    x_scales,  # [rows of x, INPUTS / GROUP], or [rows of x]
    values,
    scales,
    bias,
    weights,
    places,
    experts,
    out,
    pairs,
    tokens,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    SHARING: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOP: tl.constexpr,
    M: tl.constexpr,
    PARTS: tl.constexpr,  # of a block
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BIASED: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """`_sorted` of float8 inputs and float8 weights, not transposed: a row's scale is then in few
    registers."""
    block = tl.program_id(1)
    n = tl.program_id(0) * N + tl.arange(0, N)
    let_next_begin(PDL)
    wait(PDL)
    expert = tl.load(experts + block // PARTS).to(tl.int64)
    if expert >= 0:
        if M < HALVED or tl.load(places + block * M + M // 2) < pairs:
            _float8_block(
                block * M,
                expert,
                n,
                x,
                x_scales,
                values,
                scales,
                bias,
                weights,
                places,
                out,
                pairs,
                tokens,
                INPUTS,
                GROUP,
                SHARING,
                OUTPUTS,
                TOP,
                M,
                N,
                K,
                GATED,
                ACTIVATION,
                ALPHA,
                LIMIT,
                BIASED,
                STAGES,
            )
        else:  # the second half is empty
            _float8_block(
                block * M,
                expert,
                n,
                x,
                x_scales,
                values,
                scales,
                bias,
                weights,
                places,
                out,
                pairs,
                tokens,
                INPUTS,
                GROUP,
                SHARING,
                OUTPUTS,
                TOP,
                M // 2,
                N,
                K,
                GATED,
                ACTIVATION,
                ALPHA,
                LIMIT,
                BIASED,
                STAGES,
            )


@triton.jit
def _scales_from(
    scale_at,
    n,
    at,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    SHARING: tl.constexpr,
    SHARED: tl.constexpr,
):
    """The scales of inputs from `at` on: of outputs n [N], or a number if they are SHARED; zeros
    from INPUTS on."""
    groups: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    of_group = scale_at + at // GROUP
    if SHARED:
        return tl.load(of_group + tl.min(n, 0) // SHARING * groups, mask=at < INPUTS, other=0.0)
    else:
        return tl.load(of_group + n // SHARING * groups, mask=(n >= 0) & (at < INPUTS), other=0.0)


@triton.jit
def _scaled(products, of_inputs, scale, SHARED: tl.constexpr):
    """Products [N, M] times the scales of their inputs, and of outputs."""
    if SHARED:
        return products * (of_inputs * scale)[None, :]
    else:
        return products * scale[:, None] * of_inputs[None, :]


@triton.jit(do_not_specialize=["pairs", "tokens", "rows"])
def _sorted_split(
    x,  # float8 [2, rows, INPUTS], otherwise all as of `_sorted`
    x_scales,  # [2, rows, INPUTS / K]
    values,
    scales,
    bias,
    weights,
    places,
    experts,
    out,
    pairs,
    tokens,
    rows,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    SHARING: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BIASED: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """`_sorted` of float8 weights, which aren't widened: inputs are the sums of two float8 numbers.
    Scales are read an iteration ahead."""
    block = tl.program_id(1)
    n = tl.program_id(0) * N + tl.arange(0, N)
    let_next_begin(PDL)
    wait(PDL)
    expert = tl.load(experts + block).to(tl.int64)
    if expert >= 0:
        pair = tl.load(places + block * M + tl.arange(0, M))
        there = pair < pairs
        real = n < OUTPUTS
        source = (pair // TOP if GATED else pair).to(tl.int64)
        PAIRED: tl.constexpr = GATED and ACTIVATION != 4
        SHARED: tl.constexpr = SHARING % N == 0
        stored: tl.constexpr = 2 * OUTPUTS if PAIRED else OUTPUTS
        x_groups: tl.constexpr = (INPUTS + K - 1) // K
        groups: tl.constexpr = (INPUTS + GROUP - 1) // GROUP if GROUP > 0 else 1
        weight = values + expert * (stored * INPUTS)
        scale_at = scales + expert * (stored // SHARING * groups)
        low_x = x + rows.to(tl.int64) * INPUTS
        of_x = x_scales + source * x_groups
        of_low_x = of_x + rows * x_groups
        m = tl.minimum(n, OUTPUTS - 1)
        sums = tl.zeros([N, M], tl.float32)
        ups = tl.zeros([N, M], tl.float32)
        WHOLE: tl.constexpr = INPUTS % K == 0
        of_high = tl.load(of_x, mask=there, other=0.0)
        of_low = tl.load(of_low_x, mask=there, other=0.0)
        if GROUP > 0:
            scale = _scales_from(scale_at, m, 0, INPUTS, GROUP, SHARING, SHARED)
            if PAIRED:
                ups_scale = _scales_from(scale_at, m + OUTPUTS, 0, INPUTS, GROUP, SHARING, SHARED)
        for at in tl.range(0, INPUTS, K, num_stages=STAGES):
            k = at + tl.arange(0, K)
            inside = (k >= 0) if WHOLE else (k < INPUTS)
            there_inside = there[None, :] & inside[:, None]
            input_place = source[None, :] * INPUTS + k[:, None]
            high = tl.load(x + input_place, mask=there_inside, other=0.0)
            low = tl.load(low_x + input_place, mask=there_inside, other=0.0)
            place = weight + n.to(tl.int64)[:, None] * INPUTS + k[None, :]
            tile = tl.load(place, mask=real[:, None] & inside[None, :], other=0.0)
            more = there & (at + K < INPUTS)
            next_of_high = tl.load(of_x + at // K + 1, mask=more, other=0.0)
            next_of_low = tl.load(of_low_x + at // K + 1, mask=more, other=0.0)
            if GROUP > 0:
                next_scale = _scales_from(scale_at, m, at + K, INPUTS, GROUP, SHARING, SHARED)
                sums += _scaled(tl.dot(tile, high), of_high, scale, SHARED)
                sums += _scaled(tl.dot(tile, low), of_low, scale, SHARED)
                scale = next_scale
            else:
                sums += tl.dot(tile, high) * of_high[None, :]
                sums += tl.dot(tile, low) * of_low[None, :]
            if PAIRED:
                tile = tl.load(
                    place + OUTPUTS * INPUTS, mask=real[:, None] & inside[None, :], other=0.0
                )
                if GROUP > 0:
                    next_scale = _scales_from(
                        scale_at, m + OUTPUTS, at + K, INPUTS, GROUP, SHARING, SHARED
                    )
                    ups += _scaled(tl.dot(tile, high), of_high, ups_scale, SHARED)
                    ups += _scaled(tl.dot(tile, low), of_low, ups_scale, SHARED)
                    ups_scale = next_scale
                else:
                    ups += tl.dot(tile, high) * of_high[None, :]
                    ups += tl.dot(tile, low) * of_low[None, :]
            of_high = next_of_high
            of_low = next_of_low
        if GROUP == 0:
            sums *= tl.load(scale_at + n, mask=real, other=0.0)[:, None]
            if PAIRED:
                ups *= tl.load(scale_at + OUTPUTS + n, mask=real, other=0.0)[:, None]
        if BIASED:
            at_bias = bias + expert * stored + n
            sums += tl.load(at_bias, mask=real, other=0.0).to(tl.float32)[:, None]
            if PAIRED:
                ups += tl.load(at_bias + OUTPUTS, mask=real, other=0.0).to(tl.float32)[:, None]
        if GATED:
            result = activated(sums, ups, ACTIVATION, ALPHA, LIMIT)
            to = pair
        else:
            result = sums * tl.load(weights + pair, mask=there, other=0.0)[None, :]
            to = pair % TOP * tokens + pair // TOP
        tl.store(
            out + to.to(tl.int64)[:, None] * OUTPUTS + n[None, :],
            tl.trans(result).to(out.dtype.element_ty),
            mask=there[:, None] & real[None, :],
        )


def float8_layer(
    x,
    layer: Stored,
    bias,
    weights,
    places,
    blocks,
    out,
    tiling: Tiling,
    around: dict[str, int | float],
) -> None:
    """`many_layer` with inputs rounded to e4m3, for a layer that `narrows`."""
    narrow, x_scales = narrowed(x, layer.group)
    constants = {name: layer.constants()[name] for name in ("INPUTS", "GROUP", "SHARING")} | {
        "K": gcd(tiling.inputs, layer.group),
        "PARTS": places.shape[1] // tiling.rows,
    }
    if not around and tiling.rows == 64:
        constants["maxnreg"] = REGISTERS
    launch_sorted(
        _sorted_float8,
        (narrow, x_scales, *layer.tensors()[:2]),
        constants,
        bias,
        weights,
        places,
        blocks,
        out,
        tiling,
        around,
    )


def split_layer(
    x,
    layer: Stored,
    bias,
    weights,
    places,
    blocks,
    out,
    tiling: Tiling,
    around: dict[str, int | float],
) -> None:
    """`many_layer` for a layer that `narrows`, with bfloat16 inputs split into two numbers of e4m3."""
    group = gcd(tiling.inputs, layer.group)
    both, x_scales = split(x, group)
    constants = {name: layer.constants()[name] for name in ("INPUTS", "GROUP", "SHARING")}
    launch_sorted(
        _sorted_split,
        (both, x_scales, *layer.tensors()[:2]),
        constants | {"K": group},
        bias,
        weights,
        places,
        blocks,
        out,
        tiling,
        around,
        len(x),
    )


def check(device: torch.device) -> None:
    """Raise unless `split_layer` computes correct values here: not every version of ptxas compiles
    it correctly."""
    outputs, inputs, tokens = 128, 256, 40
    torch.manual_seed(0)
    # small integers, but of more bits than e4m3 has: matrix units add float8 products in some 14
    x = torch.randint(-31, 32, (tokens, inputs)).bfloat16()
    numbers = torch.randint(-1, 2, (2, outputs, inputs)).float()
    scales = torch.tensor([[[1.0, 2.0]], [[0.5, 4.0]]])
    layer = Stored(
        numbers.to(torch.float8_e4m3fn).to(device),
        inputs,
        scales.to(device),
        group=128,
        kind=FLOAT8,
        narrows=True,
    )
    ids = torch.randint(0, 2, (tokens, 1), dtype=torch.int32)
    shares = torch.ones(tokens, 1, device=device)
    out = torch.zeros(1, tokens, outputs, device=device)
    places, blocks = sort(ids.to(device), 2, 16)
    split_layer(
        x.to(device), layer, None, shares, places, blocks, out, Tiling(16, 64, 128, 3, 4), {}
    )
    wide = numbers * scales.repeat_interleave(128, 2)
    exact = torch.einsum("tk,tnk->tn", x.float(), wide[ids[:, 0].long()])
    if not torch.allclose(out[0].cpu(), exact, rtol=0.0, atol=exact.abs().max().item() * 2**-9):
        raise DovetailError("they compute wrong numbers")
