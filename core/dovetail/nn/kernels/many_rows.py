# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""A linear layer of some dozens of rows, on the matrix units of a Hopper: as in `one_row` a program asks for weights before its input is there. The
tensor memory accelerator brings them, as many as have room in shared memory. Twin: `dovetail.nn.linear`.

A program computes a tile of the output, over all inputs or over a part of them:

    weights  | chunk 0 | chunk 1 | …  asked for at once, as many as are held
                       wait           until the kernel before has written the input
    inputs   | chunk 0 | chunk 1 | …  through a ring of stages
    products   chunk 0,  chunk 1,  …  each as soon as both are there; then their places are for those that follow
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from math import ceil

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language import debug_barrier  # of all threads of a program; Gluon's own has another name from Triton 3.7 on
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.errors import DovetailError
from dovetail.nn.kernels.dependent_launch import pdl_options
from dovetail.nn.kernels.described import in_tiles
from dovetail.nn.kernels.launch import launch

MOST_ROWS = 256  # with more, torch's products are quicker
MOST_ROWS_OF_FLOAT8 = {(False, False): 128, (True, False): 64, (False, True): 256}  # likewise of float8, by (gated, in_parts)
MOST_ROWS_OF_BLOCKS = 256  # likewise of float8 with scales for blocks
CHUNK_OF_GROUPS = 128  # inputs with one scale, where weights have blocks
MOST_BYTES = {1: 256 << 20, 2: 96 << 20, 4: 24 << 20}  # of weights, by the tiles that the rows make; likewise
MOST_BYTES_OF_HALF_A_TILE = 16 << 20  # if that has all rows, in parts a quarter: what isn't there is slow to read
MOST_INPUTS = 2048  # of several tiles, unless in parts
SHARED_BYTES = 208 << 10  # of a multiprocessor, for its programs; what is left is for the kernels around
PROCESSORS = 132
GROUP_ROWS = 64  # that four warps compute together
MOST_STAGES = 8  # for inputs
LEAST_STAGES = 4
MOST_PARTS = 4
PART_COST = 8  # of a byte of sums that the next kernel adds up, in bytes that a program reads


@dataclass(frozen=True, slots=True)
class Tiling:
    """The share of one program: rows, outputs (pairs, if gated), and into how many parts the inputs are split; how many inputs a chunk has, and how
    many chunks of the weights and of the inputs fit into shared memory."""

    rows: int
    outputs: int
    parts: int
    chunk: int
    held: int
    stages: int


@gluon.jit(do_not_specialize=["rows"])
def _linear(
    x,  # descriptor of [rows, inputs], in tiles of [M, K]
    weight,  # of [outputs, inputs], in tiles of [N, K]; GATED: gates, then ups
    bias,  # [outputs]; GATED: likewise
    out,  # [rows, outputs]; or [parts, rows, outputs], sums to be added up
    x_scales,  # of float8 numbers: [rows] float32, or GROUPS: [rows, GROUPS], of K inputs each
    scales,  # of float8 weights: [outputs], or GROUPS: [outputs / SHARING, GROUPS]; GATED: gates', then ups'
    rows,
    outputs,  # GATED: pairs
    M: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    CHUNKS: gl.constexpr,  # of a program
    HELD: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    BIASED: gl.constexpr,
    SCALED: gl.constexpr,
    GROUPS: gl.constexpr,
    SHARING: gl.constexpr,  # a multiple of N
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = x.dtype
    size: gl.constexpr = 1 if SCALED else 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, N, 32 // size])
    input_bytes: gl.constexpr = M * K * size
    weight_bytes: gl.constexpr = N * K * size * (2 if GATED else 1)
    m0, n0, part = gl.program_id(1) * M, gl.program_id(0) * N, gl.program_id(2)
    k0 = part * (CHUNKS * K)
    inputs = gl.allocate_shared_memory(dtype, [STAGES, M, K], x.layout)
    weights = gl.allocate_shared_memory(dtype, [HELD, N, K], weight.layout)
    if GATED:
        ups = gl.allocate_shared_memory(dtype, [HELD, N, K], weight.layout)
    input_there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    weight_there = gl.allocate_shared_memory(gl.int64, [HELD, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(input_there.index(i), count=1)
    for i in gl.static_range(HELD):
        mbarrier.init(weight_there.index(i), count=1)
    fence_async_shared()
    debug_barrier()
    if PDL:
        gdc_launch_dependents()
    for i in gl.static_range(HELD):
        mbarrier.expect(weight_there.index(i), weight_bytes)
        tma.async_copy_global_to_shared(weight, [n0, k0 + i * K], weight_there.index(i), weights.index(i))
        if GATED:
            tma.async_copy_global_to_shared(weight, [outputs + n0, k0 + i * K], weight_there.index(i), ups.index(i))
    for i in gl.static_range(STAGES):
        mbarrier.expect(input_there.index(i), input_bytes)
    if PDL:
        gdc_wait()
    for i in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(x, [m0, k0 + i * K], input_there.index(i), inputs.index(i))

    n = n0 + gl.arange(0, N, layout=gl.SliceLayout(0, layout))
    m = m0 + gl.arange(0, M, layout=gl.SliceLayout(1, layout))
    sums = gl.zeros([M, N], gl.float32, layout=layout)
    if GATED:
        up_sums = gl.zeros([M, N], gl.float32, layout=layout)
    if GROUPS > 0:  # the tile's outputs have the same scales
        row_scales = x_scales + m * GROUPS + part * CHUNKS
        weight_scales = scales + n0 // SHARING * GROUPS + part * CHUNKS
        next_scale = gl.load(row_scales, mask=m < rows, other=0.0) * gl.load(weight_scales)
        if GATED:
            next_up_scale = gl.load(row_scales, mask=m < rows, other=0.0) * gl.load(weight_scales + outputs // SHARING * GROUPS)
    elif STAGES == CHUNKS and HELD == CHUNKS:  # nothing is waited for in the loop, so that what it carries is still being computed
        sums = warpgroup_mma_init(sums)
        if GATED:
            up_sums = warpgroup_mma_init(up_sums)
    for k in range(CHUNKS):
        mbarrier.wait(weight_there.index(k % HELD), (k // HELD) & 1)
        mbarrier.wait(input_there.index(k % STAGES), (k // STAGES) & 1)
        if GROUPS > 0:  # sums of a group are scaled before they are added
            zeros = gl.zeros([M, N], gl.float32, layout=layout)
            some = warpgroup_mma(inputs.index(k % STAGES), weights.index(k % HELD).permute((1, 0)), zeros, use_acc=False, is_async=True)
            if GATED:
                more_ups = warpgroup_mma(inputs.index(k % STAGES), ups.index(k % HELD).permute((1, 0)), zeros, use_acc=False, is_async=True)
            scale, there = next_scale, (m < rows) & (k + 1 < CHUNKS)
            of_row = gl.load(row_scales + k + 1, mask=there, other=0.0)
            next_scale = of_row * gl.load(weight_scales + k + 1, mask=k + 1 < CHUNKS, other=0.0)
            if GATED:
                up_scale = next_up_scale
                next_up_scale = of_row * gl.load(weight_scales + outputs // SHARING * GROUPS + k + 1, mask=k + 1 < CHUNKS, other=0.0)
                some, more_ups = warpgroup_mma_wait(0, deps=[some, more_ups])
                up_sums += more_ups * gl.expand_dims(up_scale, 1)
            else:
                some = warpgroup_mma_wait(0, deps=[some])
            sums += some * gl.expand_dims(scale, 1)
        else:
            sums = warpgroup_mma(inputs.index(k % STAGES), weights.index(k % HELD).permute((1, 0)), sums, is_async=True)
            if GATED:
                up_sums = warpgroup_mma(inputs.index(k % STAGES), ups.index(k % HELD).permute((1, 0)), up_sums, is_async=True)
        if STAGES < CHUNKS or HELD < CHUNKS:
            if GROUPS > 0:
                pass
            elif GATED:
                sums, up_sums = warpgroup_mma_wait(2, deps=[sums, up_sums])
            else:
                sums = warpgroup_mma_wait(1, deps=[sums])
            debug_barrier()  # chunk k - 1 is done with, by all warps
        if STAGES < CHUNKS:
            place, more = (k + STAGES - 1) % STAGES, (k > 0) & (k + STAGES - 1 < CHUNKS)
            mbarrier.expect(input_there.index(place), input_bytes, pred=more)
            at = k0 + (k + STAGES - 1) * K
            tma.async_copy_global_to_shared(x, [m0, at], input_there.index(place), inputs.index(place), pred=more)
        if HELD < CHUNKS:
            place, more = (k + HELD - 1) % HELD, (k > 0) & (k + HELD - 1 < CHUNKS)
            mbarrier.expect(weight_there.index(place), weight_bytes, pred=more)
            at = k0 + (k + HELD - 1) * K
            tma.async_copy_global_to_shared(weight, [n0, at], weight_there.index(place), weights.index(place), pred=more)
            if GATED:
                tma.async_copy_global_to_shared(weight, [outputs + n0, at], weight_there.index(place), ups.index(place), pred=more)
    if GROUPS == 0:
        if GATED:
            sums, up_sums = warpgroup_mma_wait(0, deps=[sums, up_sums])
        else:
            sums = warpgroup_mma_wait(0, deps=[sums])
        if SCALED:
            of_rows = gl.expand_dims(gl.load(x_scales + m, mask=m < rows, other=0.0), 1)
            sums *= of_rows * gl.expand_dims(gl.load(scales + n), 0)
            if GATED:
                up_sums *= of_rows * gl.expand_dims(gl.load(scales + outputs + n), 0)
    if BIASED:
        sums += gl.expand_dims(gl.load(bias + n).to(gl.float32), 0)
    if GATED:
        if BIASED:
            up_sums += gl.expand_dims(gl.load(bias + outputs + n).to(gl.float32), 0)
        sums = sums / (1.0 + gl.exp(-sums)) * up_sums
    at_out = gl.expand_dims(part * rows + m, 1) * outputs + gl.expand_dims(n, 0)
    gl.store(out + at_out, sums.to(out.dtype.element_ty), mask=gl.expand_dims(m < rows, 1))


def tiling_for(weight: torch.Tensor, rows: int, *, gated: bool = False, in_parts: bool = False, sharing: int = 0) -> Tiling | None:
    """Return a tiling for a layer's weight [outputs, inputs]; None if torch is quicker or no tiling fits. `in_parts`: sums may be left in parts.
    `sharing`: outputs that share scales of groups of inputs, if there are such; a tile's are among them."""
    outputs, inputs = weight.shape
    if weight.element_size() == 1:
        return _tiling_of_float8(rows, inputs, outputs // (2 if gated else 1), gated, in_parts, sharing)
    tiles = 1 << (ceil(rows / GROUP_ROWS) - 1).bit_length()  # to the next power of two: each tiling is a kernel to compile
    if rows > MOST_ROWS or weight.nbytes > MOST_BYTES[tiles]:
        return None
    if rows <= GROUP_ROWS // (4 if in_parts else 2) and weight.nbytes > MOST_BYTES_OF_HALF_A_TILE:
        return None
    if (tiles > 1 and inputs > MOST_INPUTS and not in_parts) or (tiles > 2 and gated):
        return None
    return _cheapest(tiles * GROUP_ROWS, inputs, outputs // (2 if gated else 1), 2 if gated else 1, in_parts)


def _tiling_of_float8(rows: int, inputs: int, outputs: int, gated: bool, in_parts: bool, sharing: int) -> Tiling | None:
    """Return the quickest one measured on an H200 for the layers of Qwen3-8B. An output has few bytes, so that many outputs go together."""
    most = MOST_ROWS_OF_BLOCKS if sharing else MOST_ROWS_OF_FLOAT8[gated, in_parts]
    if rows > most:
        return None
    large = rows > GROUP_ROWS
    sizes = [(2 * GROUP_ROWS, 32 if gated else 64), (GROUP_ROWS, 64)] if large else [(GROUP_ROWS, 64 if gated else 128), (GROUP_ROWS, 32)]
    chunks = (CHUNK_OF_GROUPS,) if sharing else (128, 64)
    for m, n in sizes:
        if outputs % n or (sharing and sharing % n):
            continue
        parts, programs = 1, ceil(rows / m) * outputs // n
        while in_parts and parts < MOST_PARTS and programs * parts < PROCESSORS * 3 // 4 and inputs % (2 * parts * chunks[0]) == 0:
            parts *= 2
        at_once = 2 if programs * parts > PROCESSORS else 1
        if tiling := _with_room(m, n, parts, inputs // parts, 2 if gated else 1, SHARED_BYTES // at_once, 1, chunks):
            return tiling
    return None


@cache
def _cheapest(rows: int, inputs: int, outputs: int, per_output: int, in_parts: bool) -> Tiling | None:
    """The one with which programs read least, weighed as measured on an H200. None if there is none."""
    every = product((GROUP_ROWS, 2 * GROUP_ROWS), (16, 32, 64, 128), range(1, MOST_PARTS + 1) if in_parts else (1,), (1, 2))
    costs = {}
    for m, n, parts, at_once in every:
        if outputs % n or inputs % parts:
            continue
        tiling = _with_room(m, n, parts, inputs // parts, per_output, SHARED_BYTES // at_once, 2, (128, 64))
        if tiling is not None:
            costs[tiling] = _cost(tiling, at_once, rows, inputs, outputs, per_output)
    return min(costs, key=lambda tiling: costs[tiling], default=None)


def _with_room(m: int, n: int, parts: int, inputs: int, per_output: int, shared_bytes: int, size: int, chunks_of: tuple[int, ...]) -> Tiling | None:
    """All inputs of a program if they have room beside some weights, since they are what is waited for; else as many chunks of either, and what is
    left is the inputs'. Large chunks, for each costs a round."""
    for chunk in chunks_of:
        chunks, of_weights, of_inputs = inputs // chunk, size * n * chunk * per_output, size * m * chunk
        least = min(chunks, LEAST_STAGES)
        if inputs % chunk:
            continue
        left = shared_bytes - chunks * of_inputs
        if chunks <= MOST_STAGES and left >= (least + 1) * of_weights:
            return Tiling(m, n, parts, chunk, min(chunks, left // of_weights), chunks)
        both = shared_bytes // (of_weights + of_inputs)
        if both >= least:
            held = min(chunks, both)
            return Tiling(m, n, parts, chunk, held, min(chunks, MOST_STAGES, (shared_bytes - held * of_weights) // of_inputs))
    return None


def _cost(tiling: Tiling, at_once: int, rows: int, inputs: int, outputs: int, per_output: int) -> float:
    """Bytes that the multiprocessor reads which has most to do; half for weights that are there before the input is."""
    programs = ceil(rows / tiling.rows) * outputs // tiling.outputs * tiling.parts
    share = inputs // tiling.parts
    early = tiling.held * tiling.chunk / share
    of_program = 2 * share * (tiling.rows + tiling.outputs * per_output * (1 - early / 2))
    waves = ceil(programs / (PROCESSORS * at_once))
    of_processor = max(1.0, programs / PROCESSORS) if waves == 1 else waves * at_once
    parts_bytes = 4 * tiling.parts * rows * outputs / PROCESSORS if tiling.parts > 1 else 0.0
    return of_processor * of_program + PART_COST * parts_bytes


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tiling: Tiling,
    gated: bool = False,
    in_parts: bool = False,
    into: torch.Tensor | None = None,
    x_scales: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [rows, inputs] and weight [outputs, inputs], contiguous, float16 or bfloat16 -> [rows, outputs]; adds up in float32.

    Or both are float8, to be multiplied by `x_scales` and `scales`, [rows] and [outputs] float32, or [rows, groups] and [outputs / n, groups] with
    one scale for `CHUNK_OF_GROUPS` inputs; the result is `dtype`.

    `gated`, `into` [rows, outputs]: as of `one_row.linear`. `in_parts`: -> [parts, rows, outputs] float32, whose sum over the parts it is
    (`rms_norm.add_and_norm`).
    """
    rows, inputs = x.shape
    outputs = weight.shape[0] // (2 if gated else 1)
    shape, kind = ((tiling.parts, rows, outputs), torch.float32) if in_parts else ((rows, outputs), dtype or x.dtype)
    out = torch.empty(shape, dtype=kind, device=x.device) if into is None else into
    groups = scales.shape[1] if scales is not None and scales.ndim == 2 else 0
    launch(_linear, (outputs // tiling.outputs, ceil(rows / tiling.rows), tiling.parts))(
        in_tiles(x, tiling.rows, tiling.chunk),
        in_tiles(weight, tiling.outputs, tiling.chunk),
        weight if bias is None else bias,
        out,
        weight if x_scales is None else x_scales,
        weight if scales is None else scales,
        rows,
        outputs,
        M=tiling.rows,
        N=tiling.outputs,
        K=tiling.chunk,
        CHUNKS=inputs // tiling.parts // tiling.chunk,
        HELD=tiling.held,
        STAGES=tiling.stages,
        GATED=gated,
        BIASED=bias is not None,
        SCALED=scales is not None,
        GROUPS=groups,
        SHARING=len(weight) // len(scales) if groups and scales is not None else 1,
        num_warps=4 * tiling.rows // GROUP_ROWS,
        **pdl_options(x.device),
    )
    return out


def check(device: torch.device) -> None:
    """Raises unless it computes what it should here: what it is written in may change from one Triton to the next."""
    numbers = torch.arange(32 * 256, device=device).remainder(7).sub(3).view(32, 256)  # small and whole, so that sums are exact
    x, weight = numbers[:20].bfloat16(), numbers.bfloat16()
    ours = linear(x, weight, tiling=Tiling(64, 32, 1, 64, 3, 3))
    if not torch.equal(ours, (x.float() @ weight.float().t()).bfloat16()):
        raise DovetailError("it computes wrong numbers")
