# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"
# ruff: noqa: N803, N806 (constants are upper case)
"""Feed-forwards of a mixture of experts. A pair is a token and one of its k chosen experts; pair p
belongs to token p // k.

Few pairs are computed one by one: a program computes some outputs of a pair, without matrix units,
like `one_row`. `expert_sorting` sorts more by expert, padded to whole blocks per expert, so that a
program reads weights once per block:

    ids     5 2 5 7 2 …                      pairs 0, 1, 2, …
    places  1 4 · · | 0 2 · · | 3 · · · | …   pairs; blocks of expert 2, of 5, of 7, …; unneeded blocks come last

The numbers of pairs and blocks depend only on the number of tokens, so that graphs can be recorded.
The k products of a token are summed in order. Twin: `dovetail.nn.format.base.plain_experts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dovetail.nn.activation import RELU2, Activation, ClampedSwiGLU
from dovetail.nn.kernels.available import has_few_experts_float8
from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.expert_sorting import sort
from dovetail.nn.kernels.float8_products import narrowed
from dovetail.nn.kernels.launch import launch
from dovetail.nn.kernels.stored_experts import CHUNK, FLOAT8, FP4, INT4, Stored
from dovetail.nn.kernels.streamed import add_int4
from dovetail.nn.kernels.widening import (
    e2m1_to_16_bits,
    float8_to_16_bits,
    pairs_to_16_bits,
    power_of_two,
    shifted,
)

# of a thread in `_sorted_float8`, for the last layer: three programs then fit a processor
REGISTERS = 168
# pairs of an expert, more than which are computed by products of float8 inputs, if inputs may be
# rounded
NARROW_FROM = 16
# ungated, the first layer has ups alone, of which it takes relu squared
CLAMPED = 3
UNGATED = 4
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2, RELU2: UNGATED}


@dataclass(frozen=True, slots=True)
class FewTiling:
    """Outputs per program (pairs if gated), and its warps."""

    outputs: int
    warps: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """Share of one program: places, outputs (pairs if gated), inputs per chunk, chunks in flight,
    warps."""

    rows: int
    outputs: int
    inputs: int
    stages: int
    warps: int


class Few(NamedTuple):
    """Tilings if pairs are computed one by one."""

    gate_up: FewTiling
    down: FewTiling


class Many(NamedTuple):
    """Tilings if pairs are sorted. Both layers have the same number of places per block."""

    gate_up: Tiling
    down: Tiling


@triton.jit
def _activated(gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """All float32. Ungated, `gate` is all there is."""
    if ACTIVATION == 4:
        gate = tl.maximum(gate, 0.0)
        up = gate
    elif ACTIVATION == 3:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
        gate = gate / (1.0 + tl.exp(-ALPHA * gate))
    elif ACTIVATION == 2:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1.0 + tl.exp(-2.0 * inner))
    elif ACTIVATION == 1:
        gate = 0.5 * gate * (1.0 + tl.math.erf(gate * 0.7071067811865476))
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    return gate * up


@triton.jit
def _scales_of(
    scales,
    expert,
    outputs,
    INPUTS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SHARING: tl.constexpr,
):
    """Return the address of the scales or zeros of an expert with this number of outputs."""
    groups: tl.constexpr = 1 if KIND == 0 or GROUP == 0 else (INPUTS + GROUP - 1) // GROUP
    return scales + expert * (outputs // SHARING * groups)


@triton.jit
def _tile(values, expert, outputs, n, real, BYTES: tl.constexpr, PADDED: tl.constexpr):
    """The weights of outputs n, as stored."""
    i = tl.arange(0, PADDED)
    place = values + (expert * outputs + n)[:, None] * BYTES + i[None, :]
    if values.dtype.element_ty == tl.uint8:
        return tl.load(place, mask=real[:, None] & (i < BYTES)[None, :], other=0)
    else:
        return tl.load(place, mask=real[:, None] & (i < BYTES)[None, :], other=0.0)


@triton.jit
def _product(
    tile,  # [N, PADDED] as stored
    row,  # [INPUTS]
    scales,
    zeros,
    expert,
    outputs,
    n,
    real,
    INPUTS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SHARING: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
):
    """[N] float32: a tile times a row."""
    N: tl.constexpr = tile.shape[0]
    PADDED: tl.constexpr = tile.shape[1]
    i = tl.arange(0, PADDED)
    scale_at = _scales_of(scales, expert, outputs, INPUTS, KIND, GROUP, SHARING)
    if KIND < 2:
        inputs = tl.load(row + i, mask=i < INPUTS, other=0.0).to(tl.float32)
        if KIND == 0:
            total = tl.sum(tile.to(tl.float32) * inputs[None, :], 1)
        elif GROUP == 0:
            total = tl.sum(
                float8_to_16_bits(tile, row.dtype.element_ty).to(tl.float32) * inputs[None, :], 1
            )
            total *= tl.load(scale_at + n, mask=real, other=0.0)
        else:
            groups: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
            products = (
                float8_to_16_bits(tile, row.dtype.element_ty).to(tl.float32) * inputs[None, :]
            )
            sums = tl.sum(tl.reshape(products, (N, PADDED // GROUP, GROUP)), 2)
            g = tl.arange(0, PADDED // GROUP)[None, :]
            total = tl.sum(
                sums
                * tl.load(
                    scale_at + (n // SHARING)[:, None] * groups + g,
                    mask=real[:, None] & (g < groups),
                    other=0.0,
                ),
                1,
            )
    else:
        PART: tl.constexpr = 32 if GROUP == 32 else 64
        c = tl.arange(0, PADDED // PART) * PART
        DTYPE: tl.constexpr = row.dtype.element_ty
        if KIND == 2:
            low, high = pairs_to_16_bits(tile, DTYPE)
        else:
            low, high = e2m1_to_16_bits(tile, DTYPE)
        total = tl.zeros([N], tl.float32)
        for half in tl.static_range(2):
            at = i // 64 * 128 + i % 64 + half * 64
            inputs = tl.load(row + at, mask=at < INPUTS, other=0.0).to(tl.float32)
            group = (c // 64 * 128 + c % 64 + half * 64) // GROUP
            place = group[None, :] * outputs + n[:, None]
            there = real[:, None] & (group * GROUP < INPUTS)[None, :]
            weights = low if half == 0 else high
            if KIND == 2:
                if ASYMMETRIC:
                    zero = tl.load(
                        _scales_of(zeros, expert, outputs, INPUTS, KIND, GROUP, SHARING) + place,
                        mask=there,
                        other=0,
                    )
                else:
                    zero = tl.full(place.shape, 8, tl.uint8)
                spread = tl.reshape(weights, (N, PADDED // PART, PART))
                spread = (spread - shifted(zero, DTYPE)[:, :, None]).to(tl.float32)
                scale = tl.load(scale_at + place, mask=there, other=0.0).to(tl.float32)
            else:
                spread = tl.reshape(weights.to(tl.float32), (N, PADDED // PART, PART))
                scale = power_of_two(tl.load(scale_at + place, mask=there, other=0))
            sums = tl.sum(spread * tl.reshape(inputs, (1, PADDED // PART, PART)), 2)
            total += tl.sum(sums * scale, 1)
    return total


@triton.jit
def _few_gate_up(
    x,  # [tokens, INPUTS]
    values,  # [experts, 2 * OUTPUTS, BYTES]; ungated: OUTPUTS
    scales,
    zeros,
    bias,  # [experts, 2 * OUTPUTS], or OUTPUTS
    ids,  # [tokens, TOP]
    out,  # [tokens * TOP, OUTPUTS]
    INPUTS: tl.constexpr,
    BYTES: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SHARING: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOP: tl.constexpr,
    PADDED: tl.constexpr,
    N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute N outputs of one pair."""
    pair = tl.program_id(1)
    n = tl.program_id(0) * N + tl.arange(0, N)
    real = n < OUTPUTS
    let_next_begin(PDL)
    wait(PDL)
    expert = tl.load(ids + pair).to(tl.int64)
    stored: tl.constexpr = OUTPUTS if ACTIVATION == 4 else 2 * OUTPUTS
    gates = _tile(values, expert, stored, n, real, BYTES, PADDED)
    ups = gates
    if ACTIVATION != 4:
        ups = _tile(values, expert, stored, n + OUTPUTS, real, BYTES, PADDED)
    row = x + (pair // TOP).to(tl.int64) * INPUTS
    gate = _product(
        gates, row, scales, zeros, expert, stored, n, real, INPUTS, KIND, GROUP, SHARING, ASYMMETRIC
    )
    up = gate
    if ACTIVATION != 4:
        up = _product(
            ups,
            row,
            scales,
            zeros,
            expert,
            stored,
            n + OUTPUTS,
            real,
            INPUTS,
            KIND,
            GROUP,
            SHARING,
            ASYMMETRIC,
        )
    if BIASED:
        at = bias + expert * stored + n
        gate += tl.load(at, mask=real, other=0.0).to(tl.float32)
        if ACTIVATION != 4:
            up += tl.load(at + OUTPUTS, mask=real, other=0.0).to(tl.float32)
    result = _activated(gate, up, ACTIVATION, ALPHA, LIMIT)
    tl.store(out + pair.to(tl.int64) * OUTPUTS + n, result.to(out.dtype.element_ty), mask=real)


@triton.jit
def _few_down(
    x,  # [tokens * TOP, INPUTS]
    values,  # [experts, OUTPUTS, BYTES]
    scales,
    zeros,
    bias,  # [experts, OUTPUTS]
    ids,  # [tokens, TOP]
    weights,  # [tokens, TOP]
    out,  # [tokens, OUTPUTS] float32
    INPUTS: tl.constexpr,
    BYTES: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SHARING: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOP: tl.constexpr,
    PADDED: tl.constexpr,
    N: tl.constexpr,
    AHEAD: tl.constexpr,  # pairs whose weights are requested at once
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute N outputs of one token: the sum over its pairs."""
    token = tl.program_id(1)
    n = tl.program_id(0) * N + tl.arange(0, N)
    real = n < OUTPUTS
    let_next_begin(PDL)
    wait(PDL)
    sums = tl.zeros([N], tl.float32)
    for first in tl.static_range(0, TOP, AHEAD):
        tiles = ()
        for ahead in tl.static_range(AHEAD):
            if first + ahead < TOP:
                tiles += (
                    _tile(
                        values,
                        tl.load(ids + token * TOP + first + ahead).to(tl.int64),
                        OUTPUTS,
                        n,
                        real,
                        BYTES,
                        PADDED,
                    ),
                )
        for ahead in tl.static_range(AHEAD):
            if first + ahead < TOP:
                pair = token * TOP + first + ahead
                expert = tl.load(ids + pair).to(tl.int64)
                row = x + pair.to(tl.int64) * INPUTS
                product = _product(
                    tiles[ahead],
                    row,
                    scales,
                    zeros,
                    expert,
                    OUTPUTS,
                    n,
                    real,
                    INPUTS,
                    KIND,
                    GROUP,
                    SHARING,
                    ASYMMETRIC,
                )
                if BIASED:
                    product += tl.load(bias + expert * OUTPUTS + n, mask=real, other=0.0).to(
                        tl.float32
                    )
                sums += product * tl.load(weights + pair)
    tl.store(out + token.to(tl.int64) * OUTPUTS + n, sums, mask=real)


@triton.jit
def _added(
    sums,  # [N, M]
    inputs,  # [K, M]; of 4-bit weights the lower 64 of CHUNK
    higher,  # the other 64
    values,
    scales,
    zeros,
    expert,
    outputs,
    n,
    real,
    at,
    INPUTS: tl.constexpr,
    BYTES: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SHARING: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    PRECISION: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Return the sums plus the products of inputs from `at` on."""
    weight = values + expert * outputs * BYTES
    scale_at = _scales_of(scales, expert, outputs, INPUTS, KIND, GROUP, SHARING)
    if KIND >= 2:
        if KIND == 2:
            zero_at = _scales_of(zeros, expert, outputs, INPUTS, KIND, GROUP, SHARING)
            sums = add_int4(
                sums,
                inputs,
                higher,
                weight,
                scale_at,
                zero_at,
                n,
                real,
                at // 128,
                outputs,
                BYTES,
                GROUP,
                ASYMMETRIC,
            )
        else:
            i = at // 2 + tl.arange(0, 64)
            pairs = tl.load(
                weight + n.to(tl.int64)[:, None] * BYTES + i[None, :], mask=real[:, None], other=0
            )
            low, high = e2m1_to_16_bits(pairs, inputs.dtype)
            sums = tl.dot(
                _scaled_fp4(low, scale_at, n, real, at // 32, outputs, INPUTS), inputs, sums
            )
            sums = tl.dot(
                _scaled_fp4(high, scale_at, n, real, at // 32 + 2, outputs, INPUTS), higher, sums
            )
    else:
        k = at + tl.arange(0, inputs.shape[0])
        inside = (k >= 0) if WHOLE else (k < INPUTS)
        tile = tl.load(
            weight + n.to(tl.int64)[:, None] * INPUTS + k[None, :],
            mask=real[:, None] & inside[None, :],
            other=0.0,
        )
        if KIND == 0:
            sums = tl.dot(tile, inputs, sums, input_precision=PRECISION)
        elif GROUP == 0:
            sums = tl.dot(float8_to_16_bits(tile, inputs.dtype), inputs, sums)
        else:
            groups: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
            scale = tl.load(scale_at + n // SHARING * groups + at // GROUP, mask=real, other=0.0)
            sums += tl.dot(float8_to_16_bits(tile, inputs.dtype), inputs) * scale[:, None]
    return sums


@triton.jit
def _scaled_fp4(weights, scales, n, real, group, outputs, INPUTS: tl.constexpr):
    """Weights [N, 64] of two groups from `group` on times their scales: exact."""
    both = group + tl.arange(0, 2)
    there = real[:, None] & (both * 32 < INPUTS)[None, :]
    scale = power_of_two(
        tl.load(scales + both[None, :] * outputs + n[:, None], mask=there, other=0)
    )
    spread = tl.reshape(weights, (weights.shape[0], 2, 32)).to(tl.float32) * scale[:, :, None]
    return tl.reshape(spread.to(weights.dtype), (weights.shape[0], 64))


@triton.jit(do_not_specialize=["pairs", "tokens"])
def _sorted(
    x,  # [tokens, INPUTS]; GATED: not, [pairs, INPUTS]
    values,  # [experts, outputs, BYTES]; GATED: gates, then ups
    scales,
    zeros,
    bias,  # [experts, outputs]; GATED: likewise
    weights,  # [pairs] float32; not GATED
    places,
    experts,
    out,  # GATED: [pairs, OUTPUTS]; or [TOP, tokens, OUTPUTS]
    pairs,
    tokens,
    INPUTS: tl.constexpr,
    BYTES: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SHARING: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    OUTPUTS: tl.constexpr,  # GATED: pairs of them
    TOP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute N outputs of one block, transposed: matrix units process 64 rows at once, and a block
    may have fewer places."""
    block = tl.program_id(1)
    n = tl.program_id(0) * N + tl.arange(0, N)
    let_next_begin(PDL)
    wait(PDL)
    expert = tl.load(experts + block).to(tl.int64)
    if expert >= 0:
        pair = tl.load(places + block * M + tl.arange(0, M))
        there = pair < pairs
        real = n < OUTPUTS
        row = x + (pair // TOP if GATED else pair).to(tl.int64)[None, :] * INPUTS
        PAIRED: tl.constexpr = GATED and ACTIVATION != 4
        stored: tl.constexpr = 2 * OUTPUTS if PAIRED else OUTPUTS
        sums = tl.zeros([N, M], tl.float32)
        ups = tl.zeros([N, M], tl.float32)
        WHOLE: tl.constexpr = INPUTS % K == 0
        HALF: tl.constexpr = K // 2 if KIND >= 2 else K
        for at in tl.range(0, INPUTS, K, num_stages=STAGES):
            k = at + tl.arange(0, HALF)
            inside = (k >= 0) if WHOLE else (k < INPUTS)
            inputs = tl.load(row + k[:, None], mask=there[None, :] & inside[:, None], other=0.0)
            if KIND >= 2:
                k += HALF
                inside = (k >= 0) if WHOLE else (k < INPUTS)
                higher = tl.load(row + k[:, None], mask=there[None, :] & inside[:, None], other=0.0)
            else:
                higher = inputs
            sums = _added(
                sums,
                inputs,
                higher,
                values,
                scales,
                zeros,
                expert,
                stored,
                n,
                real,
                at,
                INPUTS,
                BYTES,
                KIND,
                GROUP,
                SHARING,
                ASYMMETRIC,
                PRECISION,
                WHOLE,
            )
            if PAIRED:
                ups = _added(
                    ups,
                    inputs,
                    higher,
                    values,
                    scales,
                    zeros,
                    expert,
                    stored,
                    n + OUTPUTS,
                    real,
                    at,
                    INPUTS,
                    BYTES,
                    KIND,
                    GROUP,
                    SHARING,
                    ASYMMETRIC,
                    PRECISION,
                    WHOLE,
                )
        if KIND == 1 and GROUP == 0:
            of_output = _scales_of(scales, expert, stored, INPUTS, KIND, GROUP, SHARING) + n
            sums *= tl.load(of_output, mask=real, other=0.0)[:, None]
            if PAIRED:
                ups *= tl.load(of_output + OUTPUTS, mask=real, other=0.0)[:, None]
        if BIASED:
            at_bias = bias + expert * stored + n
            sums += tl.load(at_bias, mask=real, other=0.0).to(tl.float32)[:, None]
            if PAIRED:
                ups += tl.load(at_bias + OUTPUTS, mask=real, other=0.0).to(tl.float32)[:, None]
        if GATED:
            result = _activated(sums, ups, ACTIVATION, ALPHA, LIMIT)
            to = pair
        else:
            result = sums * tl.load(weights + pair, mask=there, other=0.0)[None, :]
            to = pair % TOP * tokens + pair // TOP
        tl.store(
            out + to.to(tl.int64)[:, None] * OUTPUTS + n[None, :],
            tl.trans(result).to(out.dtype.element_ty),
            mask=there[:, None] & real[None, :],
        )


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
    expert = tl.load(experts + block).to(tl.int64)
    if expert >= 0:
        pair = tl.load(places + block * M + tl.arange(0, M))
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
            result = _activated(sums, ups, ACTIVATION, ALPHA, LIMIT)
            to = pair
        else:
            result = sums * tl.load(weights + pair, mask=there, other=0.0)[:, None]
            to = pair % TOP * tokens + pair // TOP
        tl.store(
            out + to.to(tl.int64)[:, None] * OUTPUTS + n[None, :],
            result.to(out.dtype.element_ty),
            mask=there[:, None] & real[None, :],
        )


def choice_for(
    tokens: int, per_token: int, gate_up: Stored, inner: int, bytes_each: int = 2
) -> Few | Many:
    """Return the tilings for this number of tokens with `per_token` experts of `inner` size each,
    and activations of `bytes_each`. Measured with `bench.experts` on an H100, for 128 experts of
    2,048 x 768; in MXFP4 for 32 of 2,880 x 2,880."""
    pairs = tokens * per_token
    count = len(gate_up.values)
    if tokens == 1 or 4 * pairs < count:  # an expert chosen by two tokens is then read twice
        one = FewTiling(1, min(8, max(1, 2 * triton.next_power_of_2(gate_up.inputs) // 4096)))
        if gate_up.kind == FP4 and inner <= 4096:  # more would not fit into registers
            return Few(FewTiling(2, max(1, one.warps // 2)), FewTiling(4, 4))
        return Few(one, FewTiling(8, 8) if gate_up.kind == FLOAT8 and inner <= 1024 else one)
    average = pairs / count  # places of an expert
    if gate_up.narrows and average > NARROW_FROM:
        return Many(Tiling(64, 64, CHUNK, 4, 4), Tiling(64, 128, CHUNK, 3, 4))
    rows = (
        128 if average >= 128 else min(64, max(16, int(triton.next_power_of_2(ceil(2 * average)))))
    )
    wide = 128 // (bytes_each // 2)  # what fits into shared memory
    if rows == 128:
        return Many(Tiling(128, 128, wide // 2, 3, 8), Tiling(128, 128, wide // 2, 3, 4))
    if rows == 64:
        return Many(Tiling(64, 64, wide, 4, 4), Tiling(64, 128, wide // 2, 4, 4))
    stages = 3 if gate_up.kind in (FLOAT8, FP4) else 4
    return Many(Tiling(rows, 64, wide, stages, 4), Tiling(rows, 64, wide, stages, 4))


def experts(
    x: torch.Tensor,
    gate_up: Stored,
    down: Stored,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: Activation,
    ids: torch.Tensor,
    weights: torch.Tensor,
    choice: Few | Many | None = None,
) -> torch.Tensor:
    """Like `WeightFormat.experts`, for contiguous tensors: x [tokens, hidden], ids [tokens, k]
    int32, weights [tokens, k] float32."""
    (tokens, per_token), count = ids.shape, len(gate_up.values)
    if not tokens:
        return torch.empty((1, 0, down.outputs), dtype=x.dtype, device=x.device)
    if (
        choice is None
        and gate_up_bias is None
        and down_bias is None
        and takes_few(x, gate_up, down, activation, ids)
    ):
        from dovetail.nn.kernels import few_experts_float8

        return few_experts_float8.experts(x, gate_up, down, ids, weights)[None]
    inner = torch.empty((tokens * per_token, down.inputs), dtype=x.dtype, device=x.device)
    choice = choice or choice_for(tokens, per_token, gate_up, down.inputs, x.element_size())
    around = gating(activation)
    if isinstance(choice, Few):
        out = torch.empty((1, tokens, down.outputs), dtype=torch.float32, device=x.device)
        few_layer(x, gate_up, gate_up_bias, ids, weights, inner, choice.gate_up, around)
        few_layer(inner, down, down_bias, ids, weights, out, choice.down, {})
        return out
    places, blocks = sort(ids, count, choice.gate_up.rows)
    out = torch.empty((per_token, tokens, down.outputs), dtype=x.dtype, device=x.device)
    if gate_up.narrows and down.narrows and tokens * per_token > NARROW_FROM * count:
        float8_layer(
            x, gate_up, gate_up_bias, weights, places, blocks, inner, choice.gate_up, around
        )
        float8_layer(inner, down, down_bias, weights, places, blocks, out, choice.down, {})
        return out
    many_layer(x, gate_up, gate_up_bias, weights, places, blocks, inner, choice.gate_up, around)
    many_layer(inner, down, down_bias, weights, places, blocks, out, choice.down, {})
    return out


def takes_few(
    x: torch.Tensor, gate_up: Stored, down: Stored, activation: Activation, ids: torch.Tensor
) -> bool:
    """True if `few_experts_float8` computes experts without biases of tokens x."""
    if (
        activation != "silu"
        or gate_up.kind != FLOAT8
        or x.itemsize != 2
        or not has_few_experts_float8(x.device)
    ):
        return False
    from dovetail.nn.kernels import few_experts_float8

    tokens, per_token = ids.shape
    return isinstance(
        choice_for(tokens, per_token, gate_up, down.inputs), Few
    ) and few_experts_float8.takes(gate_up, down, per_token)


def gating(activation: Activation) -> dict[str, int | float]:
    if isinstance(activation, ClampedSwiGLU):
        return {"ACTIVATION": CLAMPED, "ALPHA": activation.alpha, "LIMIT": activation.limit}
    return {"ACTIVATION": ACTIVATIONS[activation], "ALPHA": 1.0, "LIMIT": 0.0}


def few_layer(
    x, layer: Stored, bias, ids, weights, out, tiling: FewTiling, around: dict[str, int | float]
) -> None:
    """`around`: of gate and up, or empty."""
    (tokens, per_token), outputs = ids.shape, out.shape[-1]
    padded = max(
        triton.next_power_of_2(layer.values.shape[2]),
        layer.group if layer.kind == FLOAT8 else 64 if layer.kind else 1,
    )
    sizes = layer.constants() | {
        "OUTPUTS": outputs,
        "TOP": per_token,
        "PADDED": padded,
        "N": tiling.outputs,
    }
    options = (
        sizes | {"BIASED": bias is not None, "num_warps": tiling.warps} | pdl_options(x.device)
    )
    bias = x if bias is None else bias
    grid = triton.cdiv(outputs, tiling.outputs)
    if around:
        launch(_few_gate_up, (grid, tokens * per_token))(
            x, *layer.tensors(), bias, ids, out, **options, **around
        )
    else:
        launch(_few_down, (grid, tokens))(
            x, *layer.tensors(), bias, ids, weights, out, AHEAD=min(per_token, 8), **options
        )


def many_layer(
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
    """`around`: of gate and up, or empty."""
    constants: dict[str, Any] = layer.constants() | {
        "K": CHUNK if layer.kind >= INT4 else gcd(tiling.inputs, layer.group)
    }
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    _launch_sorted(
        _sorted,
        (x, *layer.tensors()),
        constants | {"PRECISION": precision},
        bias,
        weights,
        places,
        blocks,
        out,
        tiling,
        around,
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
        "K": gcd(tiling.inputs, layer.group)
    }
    if not around:
        constants["maxnreg"] = REGISTERS
    _launch_sorted(
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


def _launch_sorted(
    kernel,
    inputs,
    constants,
    bias,
    weights,
    places,
    blocks,
    out,
    tiling: Tiling,
    around: dict[str, int | float],
) -> None:
    outputs, (tokens, per_token) = out.shape[-1], weights.shape
    launch(kernel, (triton.cdiv(outputs, tiling.outputs), len(blocks)))(
        *inputs,
        weights if bias is None else bias,
        weights,
        places,
        blocks,
        out,
        tokens * per_token,
        tokens,
        OUTPUTS=outputs,
        TOP=per_token,
        M=tiling.rows,
        N=tiling.outputs,
        GATED=bool(around),
        BIASED=bias is not None,
        STAGES=tiling.stages,
        num_warps=tiling.warps,
        **constants,
        **(around or {"ACTIVATION": 0, "ALPHA": 1.0, "LIMIT": 0.0}),
        **pdl_options(out.device),
    )
