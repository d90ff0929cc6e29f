# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"
# ruff: noqa: N803, N806 (constants are upper case)
"""The feed-forwards of a mixture of experts. A pair is a token and one of the k experts that it has chosen; pair p is of token p // k.

Few pairs are computed one by one: a program has some outputs of a pair, on ordinary units, as in `one_row`. More are sorted by expert, each expert's
padded to whole blocks, whose weights a program reads once:

    ids     5 2 5 7 2 …                      pairs 0, 1, 2, …
    places  1 4 · · | 0 2 · · | 3 · · · | …   pairs; blocks of expert 2, of 5, of 7, …; blocks that aren't needed come last

The numbers of pairs and blocks depend on the number of tokens alone, so that graphs can be recorded. The k products of a token are added up in their
order. Twin: `dovetail.nn.format.base.plain_experts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dovetail.nn.activation import Activation, ClampedSwiGLU
from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.launch import launch

SORTED_AT_ONCE = 4096  # pairs
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2}
CLAMPED = 3


class Stored(NamedTuple):
    """The weights of one layer of all experts, [experts, outputs, inputs]."""

    values: torch.Tensor
    inputs: int

    @property
    def outputs(self) -> int:
        return self.values.shape[1]


@dataclass(frozen=True, slots=True)
class FewTiling:
    """Outputs of a program (pairs, if gated), and its warps."""

    outputs: int
    warps: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """The share of a program: places, outputs (pairs, if gated), inputs that it computes with at once; chunks of these that are under way, warps."""

    rows: int
    outputs: int
    inputs: int
    stages: int
    warps: int


class Few(NamedTuple):
    """Pairs are computed one by one."""

    gate_up: FewTiling
    down: FewTiling


class Many(NamedTuple):
    """Pairs are sorted. Both layers have blocks of as many places."""

    gate_up: Tiling
    down: Tiling


@triton.jit
def _activated(gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """All float32."""
    if ACTIVATION == 3:
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
def _few_gate_up(
    x,  # [tokens, INPUTS]
    values,  # [experts, 2 * OUTPUTS, INPUTS]
    bias,  # [experts, 2 * OUTPUTS]
    ids,  # [tokens, TOP]
    out,  # [tokens * TOP, OUTPUTS]
    INPUTS: tl.constexpr,
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
    """N outputs of one pair."""
    pair, n, i = tl.program_id(1), tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, PADDED)
    real, inside = n < OUTPUTS, i < INPUTS
    let_next_begin(PDL)
    wait(PDL)
    expert = tl.load(ids + pair).to(tl.int64)
    mask = real[:, None] & inside[None, :]
    place = values + (expert * (2 * OUTPUTS) + n)[:, None] * INPUTS + i[None, :]
    gates = tl.load(place, mask=mask, other=0.0)
    ups = tl.load(place + OUTPUTS * INPUTS, mask=mask, other=0.0)
    inputs = tl.load(x + (pair // TOP).to(tl.int64) * INPUTS + i, mask=inside, other=0.0).to(tl.float32)
    gate = tl.sum(gates.to(tl.float32) * inputs[None, :], 1)
    up = tl.sum(ups.to(tl.float32) * inputs[None, :], 1)
    if BIASED:
        at = bias + expert * (2 * OUTPUTS) + n
        gate += tl.load(at, mask=real, other=0.0).to(tl.float32)
        up += tl.load(at + OUTPUTS, mask=real, other=0.0).to(tl.float32)
    result = _activated(gate, up, ACTIVATION, ALPHA, LIMIT)
    tl.store(out + pair.to(tl.int64) * OUTPUTS + n, result.to(out.dtype.element_ty), mask=real)


@triton.jit
def _few_down(
    x,  # [tokens * TOP, INPUTS]
    values,  # [experts, OUTPUTS, INPUTS]
    bias,  # [experts, OUTPUTS]
    ids,  # [tokens, TOP]
    weights,  # [tokens, TOP]
    out,  # [tokens, OUTPUTS] float32
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOP: tl.constexpr,
    PADDED: tl.constexpr,
    N: tl.constexpr,
    AHEAD: tl.constexpr,  # pairs whose weights are asked for at once
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    """N outputs of one token: the sum over its pairs."""
    token, n, i = tl.program_id(1), tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, PADDED)
    real, inside = n < OUTPUTS, i < INPUTS
    mask = real[:, None] & inside[None, :]
    let_next_begin(PDL)
    wait(PDL)
    sums = tl.zeros([N], tl.float32)
    for first in tl.static_range(0, TOP, AHEAD):
        tiles = ()
        for ahead in tl.static_range(AHEAD):
            if first + ahead < TOP:
                expert = tl.load(ids + token * TOP + first + ahead).to(tl.int64)
                tiles += (tl.load(values + (expert * OUTPUTS + n)[:, None] * INPUTS + i[None, :], mask=mask, other=0.0),)
        for ahead in tl.static_range(AHEAD):
            if first + ahead < TOP:
                pair = token * TOP + first + ahead
                inputs = tl.load(x + pair.to(tl.int64) * INPUTS + i, mask=inside, other=0.0).to(tl.float32)
                product = tl.sum(tiles[ahead].to(tl.float32) * inputs[None, :], 1)
                if BIASED:
                    product += tl.load(bias + tl.load(ids + pair).to(tl.int64) * OUTPUTS + n, mask=real, other=0.0).to(tl.float32)
                sums += product * tl.load(weights + pair)
    tl.store(out + token.to(tl.int64) * OUTPUTS + n, sums, mask=real)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def _sort(
    ids,  # [pairs]
    places,  # [blocks, BLOCK]: pairs, or `pairs` where there is none
    experts,  # [blocks]: of a block; -1: it isn't needed
    pairs,
    blocks,
    COUNT: tl.constexpr,  # experts
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The pairs of one expert, in their order."""
    expert, e = tl.program_id(0), tl.arange(0, PADDED)
    i, j = tl.arange(0, CHUNK), tl.arange(0, BLOCK)
    let_next_begin(PDL)
    wait(PDL)
    counts = tl.zeros([PADDED], tl.int32)
    for at in range(0, pairs, CHUNK):
        chosen = tl.load(ids + at + i, mask=at + i < pairs, other=0)
        counts += tl.histogram(chosen, PADDED, mask=at + i < pairs)
    needed = (counts + BLOCK - 1) // BLOCK
    first = tl.sum(tl.where(e < expert, needed, 0), 0)
    count = tl.sum(tl.where(e == expert, counts, 0), 0)
    own = (count + BLOCK - 1) // BLOCK
    start = first * BLOCK
    tl.store(places + start + count + j, pairs, mask=count + j < own * BLOCK)
    for block in range(own):
        tl.store(experts + first + block, expert)
    if expert == COUNT - 1:
        for block in range(first + own, blocks):
            tl.store(experts + block, -1)
    for at in range(0, pairs, CHUNK):
        chosen = tl.load(ids + at + i, mask=at + i < pairs, other=-1)
        mine = (chosen == expert).to(tl.int32)
        tl.store(places + start + tl.cumsum(mine, 0) - 1, at + i, mask=mine > 0)
        start += tl.sum(mine, 0)


@triton.jit(do_not_specialize=["pairs", "tokens"])
def _sorted(
    x,  # [tokens, INPUTS]; GATED: not, [pairs, INPUTS]
    values,  # [experts, outputs, INPUTS]; GATED: gates, then ups
    bias,  # [experts, outputs]; GATED: likewise
    weights,  # [pairs] float32; not GATED
    places,
    experts,
    out,  # GATED: [pairs, OUTPUTS]; or [TOP, tokens, OUTPUTS]
    pairs,
    tokens,
    INPUTS: tl.constexpr,
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
    """N outputs of one block, transposed: a matrix unit takes 64 rows at once, and a block may have fewer places."""
    block, n = tl.program_id(1), tl.program_id(0) * N + tl.arange(0, N)
    let_next_begin(PDL)
    wait(PDL)
    expert = tl.load(experts + block).to(tl.int64)
    if expert >= 0:
        pair = tl.load(places + block * M + tl.arange(0, M))
        there, real = pair < pairs, n < OUTPUTS
        row = x + (pair // TOP if GATED else pair).to(tl.int64)[None, :] * INPUTS
        stored: tl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
        weight = values + (expert * stored + n)[:, None] * INPUTS
        sums, ups = tl.zeros([N, M], tl.float32), tl.zeros([N, M], tl.float32)
        WHOLE: tl.constexpr = INPUTS % K == 0
        for at in tl.range(0, INPUTS, K, num_stages=STAGES):
            k = at + tl.arange(0, K)
            inside = (k >= 0) if WHOLE else (k < INPUTS)
            inputs = tl.load(row + k[:, None], mask=there[None, :] & inside[:, None], other=0.0)
            tile = tl.load(weight + k[None, :], mask=real[:, None] & inside[None, :], other=0.0)
            sums = tl.dot(tile, inputs, sums, input_precision=PRECISION)
            if GATED:
                tile = tl.load(weight + OUTPUTS * INPUTS + k[None, :], mask=real[:, None] & inside[None, :], other=0.0)
                ups = tl.dot(tile, inputs, ups, input_precision=PRECISION)
        if BIASED:
            at_bias = bias + expert * stored + n
            sums += tl.load(at_bias, mask=real, other=0.0).to(tl.float32)[:, None]
            if GATED:
                ups += tl.load(at_bias + OUTPUTS, mask=real, other=0.0).to(tl.float32)[:, None]
        if GATED:
            result, to = _activated(sums, ups, ACTIVATION, ALPHA, LIMIT), pair
        else:
            result = sums * tl.load(weights + pair, mask=there, other=0.0)[None, :]
            to = pair % TOP * tokens + pair // TOP
        tl.store(
            out + to.to(tl.int64)[:, None] * OUTPUTS + n[None, :], tl.trans(result).to(out.dtype.element_ty), mask=there[:, None] & real[None, :]
        )


def choice_for(tokens: int, per_token: int, gate_up: Stored, bytes_each: int = 2) -> Few | Many:
    """Return the tilings for so many tokens, which have chosen `per_token` experts each, of activations of so many bytes. Measured with
    `bench.experts` on an H100, for 128 experts of 2,048 x 768."""
    pairs, count = tokens * per_token, len(gate_up.values)
    if tokens == 1 or 4 * pairs < count:  # an expert that two tokens have chosen is read twice then
        held = 2 * triton.next_power_of_2(gate_up.inputs)
        return Few(FewTiling(1, min(8, max(1, held // 4096))), FewTiling(1, min(8, max(1, held // 4096))))
    average = pairs / count  # places of an expert
    rows = 128 if average >= 128 else min(64, max(16, int(triton.next_power_of_2(ceil(2 * average)))))
    wide = 128 // (bytes_each // 2)  # what fits into shared memory
    if rows == 128:
        return Many(Tiling(128, 128, wide // 2, 3, 8), Tiling(128, 128, wide // 2, 3, 4))
    if rows == 64:
        return Many(Tiling(64, 64, wide, 4, 4), Tiling(64, 128, wide // 2, 4, 4))
    return Many(Tiling(rows, 64, wide, 4, 4), Tiling(rows, 64, wide, 4, 4))


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
    """As `WeightFormat.experts`, for contiguous tensors: x [tokens, hidden], ids [tokens, k] int32, weights [tokens, k] float32."""
    (tokens, per_token), count = ids.shape, len(gate_up.values)
    if not tokens:
        return torch.empty((1, 0, down.outputs), dtype=x.dtype, device=x.device)
    choice = choice or choice_for(tokens, per_token, gate_up, x.element_size())
    around = gating(activation)
    inner = torch.empty((tokens * per_token, gate_up.outputs // 2), dtype=x.dtype, device=x.device)
    if isinstance(choice, Few):
        out = torch.empty((1, tokens, down.outputs), dtype=torch.float32, device=x.device)
        few_layer(x, gate_up, gate_up_bias, ids, weights, inner, choice.gate_up, around)
        few_layer(inner, down, down_bias, ids, weights, out, choice.down, {})
        return out
    places, blocks = sort(ids, count, choice.gate_up.rows)
    out = torch.empty((per_token, tokens, down.outputs), dtype=x.dtype, device=x.device)
    many_layer(x, gate_up, gate_up_bias, weights, places, blocks, inner, choice.gate_up, around)
    many_layer(inner, down, down_bias, weights, places, blocks, out, choice.down, {})
    return out


def sort(ids: torch.Tensor, count: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pairs [blocks, block] int32 of ids [tokens, k] int32 by expert, of which there are `count`, and the expert [blocks] of each block:
    see the top of this file."""
    pairs = ids.numel()
    blocks = min(pairs, (pairs + count * (block - 1)) // block)
    places = torch.empty((blocks, block), dtype=torch.int32, device=ids.device)
    experts = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    chunk = min(SORTED_AT_ONCE, triton.next_power_of_2(pairs))
    launch(_sort, (count,))(
        ids,
        places,
        experts,
        pairs,
        blocks,
        COUNT=count,
        PADDED=triton.next_power_of_2(max(count, 2)),
        BLOCK=block,
        CHUNK=chunk,
        num_warps=8 if chunk > 1024 else 4,
        **pdl_options(ids.device),
    )
    return places, experts


def gating(activation: Activation) -> dict[str, int | float]:
    if isinstance(activation, ClampedSwiGLU):
        return {"ACTIVATION": CLAMPED, "ALPHA": activation.alpha, "LIMIT": activation.limit}
    return {"ACTIVATION": ACTIVATIONS[activation], "ALPHA": 1.0, "LIMIT": 0.0}


def few_layer(x, layer: Stored, bias, ids, weights, out, tiling: FewTiling, around: dict[str, int | float]) -> None:
    """`around`: of gate and up, or empty."""
    (tokens, per_token), outputs = ids.shape, out.shape[-1]
    sizes = {"INPUTS": layer.inputs, "OUTPUTS": outputs, "TOP": per_token, "PADDED": triton.next_power_of_2(layer.inputs), "N": tiling.outputs}
    options = sizes | {"BIASED": bias is not None, "num_warps": tiling.warps} | pdl_options(x.device)
    bias = x if bias is None else bias
    grid = triton.cdiv(outputs, tiling.outputs)
    if around:
        launch(_few_gate_up, (grid, tokens * per_token))(x, layer.values, bias, ids, out, **options, **around)
    else:
        launch(_few_down, (grid, tokens))(x, layer.values, bias, ids, weights, out, AHEAD=min(per_token, 8), **options)


def many_layer(x, layer: Stored, bias, weights, places, blocks, out, tiling: Tiling, around: dict[str, int | float]) -> None:
    """`around`: of gate and up, or empty."""
    outputs, (tokens, per_token) = out.shape[-1], weights.shape
    launch(_sorted, (triton.cdiv(outputs, tiling.outputs), len(blocks)))(
        x,
        layer.values,
        x if bias is None else bias,
        weights,
        places,
        blocks,
        out,
        tokens * per_token,
        tokens,
        INPUTS=layer.inputs,
        OUTPUTS=outputs,
        TOP=per_token,
        M=tiling.rows,
        N=tiling.outputs,
        K=tiling.inputs,
        GATED=bool(around),
        BIASED=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        STAGES=tiling.stages,
        num_warps=tiling.warps,
        **(around or {"ACTIVATION": 0, "ALPHA": 1.0, "LIMIT": 0.0}),
        **pdl_options(x.device),
    )
