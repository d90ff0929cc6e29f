# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment, var-annotated"
# ruff: noqa: N803, N806 (constants are upper case)
"""Feed-forwards of a mixture of experts in MXFP4 for up to 8 tokens, on matrix units.

A program computes some outputs of one expert for all tokens that chose it; the pairs of a token and
an expert aren't sorted. Its warps split the inputs. A thread requests all of its weights at once,
16 bytes at a time, and widens them in registers to what its matrix unit reads from it. Twin:
`dovetail.nn.format.base.plain_experts`.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.errors import DovetailError
from dovetail.nn.kernels.dependent_launch import pdl_options
from dovetail.nn.kernels.launch import launch
from dovetail.nn.kernels.one_row_float8 import index
from dovetail.nn.kernels.stored_experts import BITS, CHUNK, FP4, RAISED, VALUES, Stored
from dovetail.nn.kernels.widening import (
    LOWERED,
    SCALED_E2M1,
    SCALED_E2M1_REGISTERS,
)

TOKENS = 8  # columns of a matrix unit
MOST_CHUNKS = 8  # of a warp: more don't fit into registers
LEAST_WARPS = 4
# activations
SILU = 0
CLAMPED = 3


class Tiling(NamedTuple):
    """Outputs of a program, pairs if gated, and its warps."""

    outputs: int
    warps: int


# measured on an H200
FIRST = Tiling(8, 4)
LAST = Tiling(16, 4)


@gluon.jit
def _slots(ids, expert, token, tokens, TOP: gl.constexpr):
    """Return the slot in which each token chose the expert; -1 if it didn't."""
    slot = token * 0 - 1
    for other in gl.static_range(TOP):
        chosen = gl.load(ids + token * TOP + other, mask=token < tokens, other=-1)
        slot = gl.where(chosen == expert, other, slot)
    return slot


@gluon.jit
def _widened(fours, codes):
    """`widening.scaled_e2m1`, for codes of four scales in each number."""
    return gl.inline_asm_elementwise(
        SCALED_E2M1,
        SCALED_E2M1_REGISTERS,
        [
            fours,
            (codes & 255) * 0x00800080,
            (codes >> 8 & 255) * 0x00800080,
            (codes >> 16 & 255) * 0x00800080,
            (codes >> 24 & 255) * 0x00800080,
        ],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _requested(
    values,  # of the expert
    scales,
    output,  # [1, rows, 1]
    real,
    block,  # [warps, 1, 1]
    i,  # [1, 1, 32]
    STORED: gl.constexpr,
    BLOCKS: gl.constexpr,
    CHUNKS: gl.constexpr,
):
    """Return a tile's weights and codes of scales, in tuples with one tensor for each chunk."""
    num_warps: gl.constexpr = block.shape[0]
    fours = ()
    codes = ()
    for chunk in gl.static_range(CHUNKS):
        own = block + chunk * num_warps
        there = real & (own < BLOCKS)
        fours += (gl.load(values + output * (BLOCKS * 32) + (own * 32 + i), mask=there, other=0),)
        codes += (gl.load(scales + own * STORED + output, mask=there, other=0),)
    return fours, codes


@gluon.jit
def _store(
    sums,  # [warps, rows, M]
    bias,
    ids,
    shares,
    out,
    tokens,
    pair,
    expert,
    first,
    OUTPUTS: gl.constexpr,
    TOP: gl.constexpr,
    PAIRS: gl.constexpr,
    N: gl.constexpr,
    FACTOR: gl.constexpr,
    GATED: gl.constexpr,
    CLAMPED: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    BIASED: gl.constexpr,
):
    """Store a tile's outputs, from `first` on, of the tokens that chose the expert."""
    M: gl.constexpr = sums.shape[2]
    stored: gl.constexpr = OUTPUTS * 2 if GATED else OUTPUTS
    result = gl.sum(sums, 0) * FACTOR
    up = result
    if GATED:
        result, up = gl.split(gl.permute(gl.reshape(result, [N // 8, 2, 8, M]), [0, 2, 3, 1]))
        result = gl.reshape(result, [N, M])
        up = gl.reshape(up, [N, M])
    n_layout: gl.constexpr = gl.SliceLayout(1, result.type.layout)
    token_layout: gl.constexpr = gl.SliceLayout(0, result.type.layout)
    n = first + gl.expand_dims(gl.arange(0, N, layout=n_layout), 1)
    token = gl.expand_dims(gl.arange(0, M, layout=token_layout), 0)
    if PAIRS == 1:
        to_slot = token + pair
        there = token == 0
    else:
        to_slot = _slots(ids, expert, token, tokens, TOP)
        there = to_slot >= 0
    to_pair = token * TOP + to_slot
    real = n < OUTPUTS
    if BIASED:
        at_bias = bias + expert * stored + n
        result += gl.load(at_bias, mask=real, other=0.0).to(gl.float32)
        if GATED:
            up += gl.load(at_bias + OUTPUTS, mask=real, other=0.0).to(gl.float32)
    if GATED:
        if CLAMPED:
            result = gl.minimum(result, LIMIT)
            up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT) + 1.0
            result = result / (1.0 + gl.exp(-ALPHA * result)) * up
        else:
            result = result / (1.0 + gl.exp(-result)) * up
        to = to_pair
    else:
        result *= gl.load(shares + to_pair, mask=there, other=0.0)
        to = to_slot * tokens + token
    gl.store(out + to * OUTPUTS + n, result.to(out.dtype.element_ty), mask=there & real)


@gluon.jit
def _multiply(
    x,  # GATED: [tokens, INPUTS]; not, [tokens * TOP, INPUTS]
    values,  # [experts, STORED, 32 * BLOCKS] int16; GATED: gates, then ups
    scales,  # [experts, BLOCKS, STORED] int32
    bias,  # [experts, STORED]
    ids,  # [tokens, TOP]
    shares,  # [tokens, TOP]
    out,  # GATED: [tokens * TOP, OUTPUTS]; not, [TOP, tokens, OUTPUTS]
    tokens,
    INPUTS: gl.constexpr,
    OUTPUTS: gl.constexpr,  # GATED: pairs
    BLOCKS: gl.constexpr,  # of 128 inputs
    CHUNKS: gl.constexpr,  # blocks of a warp
    TOP: gl.constexpr,
    PAIRS: gl.constexpr,  # at least tokens * TOP, a power of two; 1: one token
    M: gl.constexpr,
    N: gl.constexpr,
    FACTOR: gl.constexpr,
    GATED: gl.constexpr,
    CLAMPED: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    BIASED: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute N outputs of the expert of a pair, for all tokens that chose it, unless an earlier pair
    has the same."""
    per_output: gl.constexpr = 2 if GATED else 1
    rows: gl.constexpr = N * per_output  # 8 gates, then their 8 ups, and so on
    stored: gl.constexpr = OUTPUTS * per_output
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[num_warps, 1, 1], instr_shape=[1, 16, 8]
    )
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 8)
    inputs_layout: gl.constexpr = gl.DotOperandLayout(1, sums_layout, 8)
    pairs_layout: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    pair = gl.program_id(1)
    first = gl.program_id(0) * N
    if PDL:
        if GATED:  # before the next kernel, which then finds the ids, may begin
            gdc_wait()
        gdc_launch_dependents()
    expert = gl.load(ids + pair)
    is_first = True
    if PAIRS > 1:
        other = gl.arange(0, PAIRS, layout=pairs_layout)
        others = gl.load(ids + other, mask=other < pair, other=-1)
        is_first = gl.max((others == expert).to(gl.int32), 0) == 0
    if is_first:
        row = index(rows, 1, weights_layout)
        own_row = first + (row // 16 * 8 + row % 8 if GATED else row)
        output = own_row + (row // 8 % 2 * OUTPUTS if GATED else 0)
        i = index(32, 2, weights_layout)
        block = index(num_warps, 0, weights_layout)
        own_values = values + expert.to(gl.int64) * (stored * BLOCKS * 32)
        own_scales = scales + expert.to(gl.int64) * (stored * BLOCKS)
        fours, codes = _requested(
            own_values, own_scales, output, own_row < OUTPUTS, block, i, stored, BLOCKS, CHUNKS
        )
        if PDL and not GATED:
            gdc_wait()
        column = index(M, 2, inputs_layout)
        if PAIRS == 1:
            at_input = column * 0 + (0 if GATED else pair * INPUTS)
        else:  # columns of other tokens aren't stored
            slot = _slots(ids, expert, column, tokens, TOP)
            at_input = gl.where(slot < 0, 0, column if GATED else column * TOP + slot) * INPUTS
        k = index(32, 1, inputs_layout)
        own_block = index(num_warps, 0, inputs_layout)
        sums = gl.zeros([num_warps, rows, M], gl.float32, layout=sums_layout)
        for chunk in gl.static_range(CHUNKS):
            wide = _widened(fours[chunk], codes[chunk])
            for quarter in gl.static_range(4):
                at = (own_block + chunk * num_warps) * 128 + quarter * 32 + k
                inputs = gl.load(x + at_input + at, mask=at < INPUTS, other=0.0)
                sums = mma_v2(wide[quarter], inputs, sums)
        _store(
            sums,
            bias,
            ids,
            shares,
            out,
            tokens,
            pair,
            expert,
            first,
            OUTPUTS,
            TOP,
            PAIRS,
            N,
            FACTOR,
            GATED,
            CLAMPED,
            ALPHA,
            LIMIT,
            BIASED,
        )


def multiply(
    x,
    layer: Stored,
    bias,
    ids,
    weights,
    out,
    tiling: Tiling,
    gating: dict[str, int | float] | None = None,
) -> None:
    """Compute one of the layers. The last one must follow on the first, whose ids and weights it
    reads before that has ended. `gating`: of the first one."""
    tokens, top = ids.shape
    outputs = out.shape[-1]
    blocks = ceil(layer.inputs / CHUNK)
    pairs = tokens * top
    gating = gating or {"ACTIVATION": -1, "ALPHA": 1.0, "LIMIT": 0.0}
    launch(_multiply, (ceil(outputs / tiling.outputs), pairs))(
        x,
        layer.values,
        layer.scales,
        x if bias is None else bias,
        ids,
        weights,
        out,
        tokens,
        INPUTS=layer.inputs,
        OUTPUTS=outputs,
        BLOCKS=blocks,
        CHUNKS=ceil(blocks / tiling.warps),
        TOP=top,
        PAIRS=1 if tokens == 1 else triton.next_power_of_2(pairs),
        M=TOKENS,
        N=tiling.outputs,
        FACTOR=2.0**LOWERED.value,
        GATED=gating["ACTIVATION"] >= 0,
        CLAMPED=gating["ACTIVATION"] == CLAMPED,
        ALPHA=gating["ALPHA"],
        LIMIT=gating["LIMIT"],
        BIASED=bias is not None,
        num_warps=tiling.warps,
        **pdl_options(x.device),
    )


def experts(
    x: torch.Tensor,
    gate_up: Stored,
    down: Stored,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    gating: dict[str, int | float],
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return parts [k, tokens, hidden] float32 of the weighted sum of gated experts that `takes`
    accepts, for x [tokens, hidden] bfloat16, contiguous; ids [tokens, k] int32, weights [tokens, k]
    float32. `gating`: see `experts.gating`."""
    tokens, top = ids.shape
    inner = torch.empty((tokens * top, down.inputs), dtype=x.dtype, device=x.device)
    out = torch.empty((top, tokens, down.outputs), dtype=torch.float32, device=x.device)
    multiply(x, gate_up, gate_up_bias, ids, weights, inner, FIRST, gating)
    multiply(inner, down, down_bias, ids, weights, out, LAST)
    return out


def takes(gate_up: Stored, down: Stored, gating: dict[str, int | float], tokens: int) -> bool:
    """True if the kernels can multiply these weights, for this many tokens."""
    return (
        tokens <= TOKENS
        and gating["ACTIVATION"] in (SILU, CLAMPED)
        and all(
            layer.kind == FP4 and layer.inputs <= MOST_CHUNKS * LEAST_WARPS * CHUNK
            for layer in (gate_up, down)
        )
    )


def check(device: torch.device) -> None:
    """Raise unless they compute correct values here: Gluon may change between versions of
    Triton."""
    outputs, inputs = 24, 224
    torch.manual_seed(0)
    words = torch.randint(-(2**15), 2**15, (3, outputs, 64), dtype=torch.int16)
    scales = torch.randint(RAISED + 126, RAISED + 129, (3, 2, outputs, 4), dtype=torch.uint8)
    layer = Stored(
        words.to(device),
        inputs,
        scales.view(torch.int32)[..., 0].to(device),
        group=32,
        kind=FP4,
    )
    bits = torch.tensor(BITS, dtype=torch.int16)[:, :, None]  # [four, bits, 1]
    fours = words.view(3, outputs, 2, 1, 32)
    codes = torch.stack([(fours >> bits[:, bit] & 1).int() << bit for bit in range(4)])
    values = torch.tensor((*VALUES, *(-value for value in VALUES)))[codes.sum(0)]
    spread = scales.transpose(1, 2).int() - (127 + RAISED)
    wide = torch.ldexp(values, spread[..., None]).flatten(2)[:, :, :inputs]
    ids = torch.tensor([[2, 0], [1, 2]], dtype=torch.int32)
    # small integers, so that sums are exact
    x = torch.arange(4 * inputs).remainder(7).sub(3).view(4, inputs).bfloat16()
    shares = torch.tensor([[1.0, 2.0], [4.0, 0.5]])
    out = torch.zeros(2, 2, outputs, device=device)
    ours = (x.to(device), layer, None, ids.to(device), shares.to(device), out)
    multiply(*ours, Tiling(16, 2))
    products = torch.einsum("pk,pnk->pn", x.float(), wide[ids.flatten().long()])
    exact = (products * shares.flatten()[:, None]).view(2, 2, outputs).transpose(0, 1)
    if not torch.equal(out.cpu(), exact):
        raise DovetailError("they compute wrong numbers")
