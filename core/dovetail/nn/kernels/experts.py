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
from dovetail.nn.kernels.available import (
    has_few_experts_float8,
    has_few_experts_fp4,
    has_float8_products,
    has_split_experts,
)
from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.expert_sorting import sort
from dovetail.nn.kernels.experts_float8 import float8_layer, split_layer
from dovetail.nn.kernels.fp4_as_float8 import as_float8
from dovetail.nn.kernels.launch import launch
from dovetail.nn.kernels.sorted_experts import Tiling, activated, launch_sorted
from dovetail.nn.kernels.stored_experts import CHUNK, FLOAT8, FP4, INT4, RAISED, Stored
from dovetail.nn.kernels.streamed import add_int4
from dovetail.nn.kernels.widening import (
    LOWERED,
    e2m1_to_float16,
    factors_of_e2m1,
    float8_to_16_bits,
    pairs_to_16_bits,
    power_of_two,
    scaled_e2m1,
    shifted,
)

RAISED_BY = tl.constexpr(RAISED)
FACTOR = tl.constexpr(2.0**LOWERED.value)  # makes up for `scaled_e2m1`
# pairs of an expert, more than which are computed by products of float8 inputs, if inputs may be
# rounded
NARROW_FROM = 16
# likewise, more than which are computed by such products of FP4 weights that are converted before
CONVERT_FROM = 256
# ungated, the first layer has ups alone, of which it takes relu squared
CLAMPED = 3
UNGATED = 4
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2, RELU2: UNGATED}


@dataclass(frozen=True, slots=True)
class FewTiling:
    """Outputs per program (pairs if gated), and its warps."""

    outputs: int
    warps: int


class Few(NamedTuple):
    """Tilings if pairs are computed one by one."""

    gate_up: FewTiling
    down: FewTiling


class Many(NamedTuple):
    """Tilings if pairs are sorted, in blocks of as many places as a program of the first layer has.
    Those of the last one may have a part of a block, if inputs are rounded to float8."""

    gate_up: Tiling
    down: Tiling


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
    if values.dtype.element_ty.is_int():
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
    elif KIND == 2:
        PART: tl.constexpr = 32 if GROUP == 32 else 64
        c = tl.arange(0, PADDED // PART) * PART
        DTYPE: tl.constexpr = row.dtype.element_ty
        low, high = pairs_to_16_bits(tile, DTYPE)
        total = tl.zeros([N], tl.float32)
        for half in tl.static_range(2):
            at = i // 64 * 128 + i % 64 + half * 64
            inputs = tl.load(row + at, mask=at < INPUTS, other=0.0).to(tl.float32)
            group = (c // 64 * 128 + c % 64 + half * 64) // GROUP
            place = group[None, :] * outputs + n[:, None]
            there = real[:, None] & (group * GROUP < INPUTS)[None, :]
            weights = low if half == 0 else high
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
            sums = tl.sum(spread * tl.reshape(inputs, (1, PADDED // PART, PART)), 2)
            total += tl.sum(sums * scale, 1)
    else:
        chunks: tl.constexpr = (INPUTS + 127) // 128
        chunk = tl.arange(0, PADDED // 32)
        codes = tl.load(
            scales + (expert * chunks + chunk)[None, :] * outputs + n[:, None],
            mask=real[:, None] & (chunk < chunks)[None, :],
            other=0,
        )
        fours = e2m1_to_float16(tile)  # exact
        total = tl.zeros([N], tl.float32)
        for quarter in tl.static_range(4):
            at = i // 32 * 128 + i % 32 + quarter * 32
            inputs = tl.load(row + at, mask=at < INPUTS, other=0.0).to(tl.float32)
            scale = power_of_two(((codes >> (8 * quarter)) & 255) - RAISED_BY)
            spread = tl.reshape(fours[quarter].to(tl.float32), (N, PADDED // 32, 32))
            sums = tl.sum(spread * tl.reshape(inputs, (1, PADDED // 32, 32)), 2)
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
    result = activated(gate, up, ACTIVATION, ALPHA, LIMIT)
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
def _scaled_e2m1(weights, codes, DTYPE: tl.constexpr):
    """Weights [N, inputs] times the scales [N] in the lowest bytes of codes: exact."""
    return (weights.to(tl.float32) * power_of_two((codes & 255) - RAISED_BY)[:, None]).to(DTYPE)


@triton.jit
def _sums_fp4(
    row,  # [1, M]: where there is no place, of any
    values,
    scales,
    expert,
    first,  # output
    INPUTS: tl.constexpr,
    BYTES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PAIRED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return products [N, M] of places' inputs and weights, and those of the ups if PAIRED; gates
    and ups are multiplied as one tile."""
    ROWS: tl.constexpr = 2 * N if PAIRED else N
    stored: tl.constexpr = 2 * OUTPUTS if PAIRED else OUTPUTS
    r = tl.arange(0, ROWS)
    real = (r >= 0) if OUTPUTS % N == 0 else (first + r % N < OUTPUTS)
    n = first + r % N + r // N * OUTPUTS
    place = values + expert * (stored * BYTES) + n[:, None] * BYTES + tl.arange(0, 32)[None, :]
    code_place = scales + expert * (stored * ((INPUTS + 127) // 128)) + n
    k = tl.arange(0, 32)[:, None]
    sums = tl.zeros([ROWS, M], tl.float32)
    for at in tl.range(0, INPUTS, 128, num_stages=STAGES):
        x0 = tl.load(row + (at + k))
        if INPUTS % 128 == 0:
            x1 = tl.load(row + (at + 32 + k))
            x2 = tl.load(row + (at + 64 + k))
            x3 = tl.load(row + (at + 96 + k))
        else:
            x1 = tl.load(row + (at + 32 + k), mask=at + 32 < INPUTS, other=0.0)
            x2 = tl.load(row + (at + 64 + k), mask=at + 64 < INPUTS, other=0.0)
            x3 = tl.load(row + (at + 96 + k), mask=at + 96 < INPUTS, other=0.0)
        fours = tl.load(place + at // 4, mask=real[:, None], other=0)
        codes = tl.load(code_place + at // 128 * stored, mask=real, other=0)
        if x0.dtype == tl.bfloat16:
            w0, w1, w2, w3 = scaled_e2m1(
                fours,
                factors_of_e2m1(codes)[:, None],
                factors_of_e2m1(codes >> 8)[:, None],
                factors_of_e2m1(codes >> 16)[:, None],
                factors_of_e2m1(codes >> 24)[:, None],
            )
        else:
            w0, w1, w2, w3 = e2m1_to_float16(fours)
            w0 = _scaled_e2m1(w0, codes, x0.dtype)
            w1 = _scaled_e2m1(w1, codes >> 8, x0.dtype)
            w2 = _scaled_e2m1(w2, codes >> 16, x0.dtype)
            w3 = _scaled_e2m1(w3, codes >> 24, x0.dtype)
        sums = tl.dot(w0, x0, sums)
        sums = tl.dot(w1, x1, sums)
        sums = tl.dot(w2, x2, sums)
        sums = tl.dot(w3, x3, sums)
    if row.dtype.element_ty == tl.bfloat16:
        sums *= FACTOR
    if PAIRED:
        return tl.split(tl.permute(tl.reshape(sums, (2, N, M)), (1, 2, 0)))
    else:
        return sums, sums


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
        source = (pair // TOP if GATED else pair).to(tl.int64)
        row = x + source[None, :] * INPUTS
        PAIRED: tl.constexpr = GATED and ACTIVATION != 4
        stored: tl.constexpr = 2 * OUTPUTS if PAIRED else OUTPUTS
        if KIND == 3:
            sums, ups = _sums_fp4(
                x + tl.where(there, source, 0)[None, :] * INPUTS,
                values,
                scales,
                expert,
                tl.program_id(0) * N,
                INPUTS,
                BYTES,
                OUTPUTS,
                PAIRED,
                M,
                N,
                STAGES,
            )
        else:
            sums = tl.zeros([N, M], tl.float32)
            ups = tl.zeros([N, M], tl.float32)
            WHOLE: tl.constexpr = INPUTS % K == 0
            HALF: tl.constexpr = K // 2 if KIND == 2 else K
            for at in tl.range(0, INPUTS, K, num_stages=STAGES):
                k = at + tl.arange(0, HALF)
                inside = (k >= 0) if WHOLE else (k < INPUTS)
                inputs = tl.load(row + k[:, None], mask=there[None, :] & inside[:, None], other=0.0)
                if KIND == 2:
                    k += HALF
                    inside = (k >= 0) if WHOLE else (k < INPUTS)
                    higher = tl.load(
                        row + k[:, None], mask=there[None, :] & inside[:, None], other=0.0
                    )
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
    if gate_up.narrows:
        if average > NARROW_FROM:
            if average < 128:
                return Many(Tiling(64, 64, CHUNK, 4, 4), Tiling(64, 128, CHUNK, 3, 4))
            if gate_up.group:
                return Many(Tiling(128, 128, CHUNK, 3, 8), Tiling(64, 128, CHUNK, 3, 4))
            return Many(Tiling(128, 64, CHUNK, 3, 4), Tiling(128, 128, CHUNK, 4, 8))
        rows = 16 if average <= 8 else 32
        return Many(Tiling(rows, 64, CHUNK, 4, 4), Tiling(rows, 128, CHUNK, 4, 8))
    rows = (
        128 if average >= 128 else min(64, max(16, int(triton.next_power_of_2(ceil(2 * average)))))
    )
    wide = 128 // (bytes_each // 2)  # what fits into shared memory
    if rows == 128:
        return Many(Tiling(128, 128, wide // 2, 3, 8), Tiling(128, 128, wide // 2, 3, 4))
    if rows == 64:
        stages = 3 if gate_up.kind == FP4 else 4
        return Many(Tiling(64, 64, wide, stages, 4), Tiling(64, 128, wide // 2, 4, 4))
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
    around = gating(activation)
    if (
        choice is None
        and x.dtype == torch.bfloat16
        and takes_few_fp4(gate_up, down, around, tokens)
    ):
        from dovetail.nn.kernels import few_experts_fp4

        return few_experts_fp4.experts(
            x, gate_up, down, gate_up_bias, down_bias, around, ids, weights
        )
    inner = torch.empty((tokens * per_token, down.inputs), dtype=x.dtype, device=x.device)
    converts = choice is None and converts_to_float8(x, gate_up, tokens * per_token)
    if converts:
        gate_up = as_float8(gate_up)
    choice = choice or choice_for(tokens, per_token, gate_up, down.inputs, x.element_size())
    if isinstance(choice, Few):
        out = torch.empty((1, tokens, down.outputs), dtype=torch.float32, device=x.device)
        few_layer(x, gate_up, gate_up_bias, ids, weights, inner, choice.gate_up, around)
        few_layer(inner, down, down_bias, ids, weights, out, choice.down, {})
        return out
    places, blocks = sort(ids, count, choice.gate_up.rows)
    out = torch.empty((per_token, tokens, down.outputs), dtype=x.dtype, device=x.device)
    multiply = many_layer
    if gate_up.narrows and tokens * per_token > NARROW_FROM * count:
        multiply = float8_layer
    elif gate_up.narrows and has_split_experts(x.device):
        multiply = split_layer
    multiply(x, gate_up, gate_up_bias, weights, places, blocks, inner, choice.gate_up, around)
    if converts:
        del gate_up
        down = as_float8(down)
    multiply(inner, down, down_bias, weights, places, blocks, out, choice.down, {})
    return out


def converts_to_float8(x: torch.Tensor, gate_up: Stored, pairs: int) -> bool:
    """True if FP4 weights are converted to float8 before products."""
    return (
        gate_up.kind == FP4
        and x.dtype == torch.bfloat16
        and pairs > CONVERT_FROM * len(gate_up.values)
        and has_float8_products(x.device)
    )


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


def takes_few_fp4(
    gate_up: Stored, down: Stored, gating: dict[str, int | float], tokens: int
) -> bool:
    """True if `few_experts_fp4` computes experts of bfloat16 tokens."""
    if gate_up.kind != FP4 or not has_few_experts_fp4(gate_up.values.device):
        return False
    from dovetail.nn.kernels import few_experts_fp4

    return few_experts_fp4.takes(gate_up, down, gating, tokens)


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
        triton.next_power_of_2(layer.constants()["BYTES"]),
        layer.group if layer.kind == FLOAT8 else 64 if layer.kind == INT4 else 32,
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
    launch_sorted(
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
