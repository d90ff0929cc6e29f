# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Linear layer for a few to some dozens of rows, on Hopper's matrix units. Like `one_row`, a
program requests weights before its input is available: the tensor memory accelerator loads as many
as fit into shared memory. Twin: `dovetail.nn.linear`.

A program computes a tile of the output, over all inputs or over a part of them:

    weights  | chunk 0 | chunk 1 | …  requested at once, as many as are held
                       wait           until the previous kernel has written the input
    inputs   | chunk 0 | chunk 1 | …  through a ring of stages
    products   chunk 0,  chunk 1,  …  each as soon as both are loaded; then their buffers are reused

Matrix units multiply at least 64 rows by 8 columns. With fewer than 64 rows the tile is computed
transposed: its outputs are the rows, so that 2 to 8 rows of the input are multiplied as 8. A row's
result doesn't depend on the others.
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
from triton.language import (
    debug_barrier,
)  # barrier of a program; Gluon's own is renamed in Triton 3.7
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.errors import DovetailError
from dovetail.nn.kernels.dependent_launch import pdl_options
from dovetail.nn.kernels.described import in_tiles
from dovetail.nn.kernels.launch import launch

MOST_ROWS = 256  # above, torch.matmul is faster
MOST_ROWS_OF_FLOAT8 = {
    (False, False): 128,
    (True, False): 64,
    (False, True): 256,
}  # likewise for float8, by (gated, in_parts)
MOST_ROWS_OF_BLOCKS = 256  # likewise for float8 with block scales
CHUNK_OF_GROUPS = 128  # inputs per scale, if weights have block scales
MOST_BYTES = {
    1: 256 << 20,
    2: 96 << 20,
    4: 24 << 20,
}  # of weights, by the number of row tiles; likewise
# of weights; above, 2 to 32 or 2 to 64 rows have tilings for large layers
LARGE_BYTES = 16 << 20
VERY_LARGE_BYTES = 128 << 20
LEAST_PROGRAMS = 40  # of such tilings; fewer weren't measured
MOST_INPUTS = 2048  # with several tiles, unless in parts
# of a multiprocessor for these programs; the rest is for neighboring kernels
SHARED_BYTES = 208 << 10
PROCESSORS = 132
GROUP_ROWS = 64  # computed by four warps together; or outputs, if there are fewer rows
LEAST_ROWS = 8  # of a tile
MOST_STAGES = 8  # of the ring of inputs
LEAST_STAGES = 4
MOST_PARTS = 4
PART_COST = 8  # cost of a byte of partial sums, relative to a byte read by a program


@dataclass(frozen=True, slots=True)
class Tiling:
    """Share of one program: rows, outputs (pairs if gated), and number of parts that the inputs are
    split into; inputs per chunk, and number of chunks of weights and of inputs in shared memory."""

    rows: int
    outputs: int
    parts: int
    chunk: int
    held: int
    stages: int

    @property
    def outputs_first(self) -> bool:
        """True if matrix units take the outputs as rows, of which they need `GROUP_ROWS`, since
        there are fewer rows."""
        return self.rows < GROUP_ROWS


@gluon.jit
def _operands(inputs, weights, OUTPUTS_FIRST: gl.constexpr):
    """Return the operands of a product of inputs [M, K] and weights [N, K]: of [M, N] sums, or [N,
    M]."""
    if OUTPUTS_FIRST:
        return weights, inputs.permute((1, 0))
    else:
        return inputs, weights.permute((1, 0))


@gluon.jit(do_not_specialize=["rows"])
def _linear(
    x,  # descriptor of [rows, inputs], in tiles of [M, K]
    weight,  # of [outputs, inputs], in tiles of [N, K]; GATED: gates, then ups
    bias,  # [outputs]; GATED: likewise
    out,  # [rows, outputs]; or [parts, rows, outputs], partial sums
    x_scales,  # of float8 inputs: [rows] float32; GROUPS: [rows, GROUPS], for K inputs each
    # of float8 weights: [outputs]; GROUPS: [outputs / SHARING, GROUPS]; GATED: gates', then ups'
    scales,
    rows,
    outputs,  # GATED: pairs
    M: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    CHUNKS: gl.constexpr,  # per program
    HELD: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    BIASED: gl.constexpr,
    SCALED: gl.constexpr,
    GROUPS: gl.constexpr,
    SHARING: gl.constexpr,  # a multiple of N
    OUTPUTS_FIRST: gl.constexpr,  # compute the tile's transpose
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = x.dtype
    size: gl.constexpr = 1 if SCALED else 2
    across: gl.constexpr = M if OUTPUTS_FIRST else N
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, across, 32 // size]
    )
    along_rows: gl.constexpr = 0 if OUTPUTS_FIRST else 1  # dimension to add to numbers of rows
    along_outputs: gl.constexpr = 1 - along_rows
    shape: gl.constexpr = [N, M] if OUTPUTS_FIRST else [M, N]
    input_bytes: gl.constexpr = M * K * size
    weight_bytes: gl.constexpr = N * K * size * (2 if GATED else 1)
    m0 = gl.program_id(1) * M
    n0 = gl.program_id(0) * N
    part = gl.program_id(2)
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
        tma.async_copy_global_to_shared(
            weight, [n0, k0 + i * K], weight_there.index(i), weights.index(i)
        )
        if GATED:
            tma.async_copy_global_to_shared(
                weight, [outputs + n0, k0 + i * K], weight_there.index(i), ups.index(i)
            )
    for i in gl.static_range(STAGES):
        mbarrier.expect(input_there.index(i), input_bytes)
    if PDL:
        gdc_wait()
    for i in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(x, [m0, k0 + i * K], input_there.index(i), inputs.index(i))

    n = n0 + gl.arange(0, N, layout=gl.SliceLayout(along_outputs, layout))
    m = m0 + gl.arange(0, M, layout=gl.SliceLayout(along_rows, layout))
    sums = gl.zeros(shape, gl.float32, layout=layout)
    if GATED:
        up_sums = gl.zeros(shape, gl.float32, layout=layout)
    if GROUPS > 0:  # the tile's outputs share scales
        row_scales = x_scales + m * GROUPS + part * CHUNKS
        weight_scales = scales + n0 // SHARING * GROUPS + part * CHUNKS
        next_scale = gl.load(row_scales, mask=m < rows, other=0.0) * gl.load(weight_scales)
        if GATED:
            next_up_scale = gl.load(row_scales, mask=m < rows, other=0.0) * gl.load(
                weight_scales + outputs // SHARING * GROUPS
            )
    elif (
        STAGES == CHUNKS and HELD == CHUNKS
    ):  # no waits in the loop, so products stay in flight across iterations
        sums = warpgroup_mma_init(sums)
        if GATED:
            up_sums = warpgroup_mma_init(up_sums)
    for k in range(CHUNKS):
        mbarrier.wait(weight_there.index(k % HELD), (k // HELD) & 1)
        mbarrier.wait(input_there.index(k % STAGES), (k // STAGES) & 1)
        left, right = _operands(inputs.index(k % STAGES), weights.index(k % HELD), OUTPUTS_FIRST)
        if GATED:
            up_left, up_right = _operands(
                inputs.index(k % STAGES), ups.index(k % HELD), OUTPUTS_FIRST
            )
        if GROUPS > 0:  # scale the sums of each group before adding them
            zeros = gl.zeros(shape, gl.float32, layout=layout)
            some = warpgroup_mma(left, right, zeros, use_acc=False, is_async=True)
            if GATED:
                more_ups = warpgroup_mma(up_left, up_right, zeros, use_acc=False, is_async=True)
            scale = next_scale
            there = (m < rows) & (k + 1 < CHUNKS)
            of_row = gl.load(row_scales + k + 1, mask=there, other=0.0)
            next_scale = of_row * gl.load(weight_scales + k + 1, mask=k + 1 < CHUNKS, other=0.0)
            if GATED:
                up_scale = next_up_scale
                next_up_scale = of_row * gl.load(
                    weight_scales + outputs // SHARING * GROUPS + k + 1,
                    mask=k + 1 < CHUNKS,
                    other=0.0,
                )
                some, more_ups = warpgroup_mma_wait(0, deps=[some, more_ups])
                up_sums += more_ups * gl.expand_dims(up_scale, along_rows)
            else:
                some = warpgroup_mma_wait(0, deps=[some])
            sums += some * gl.expand_dims(scale, along_rows)
        else:
            sums = warpgroup_mma(left, right, sums, is_async=True)
            if GATED:
                up_sums = warpgroup_mma(up_left, up_right, up_sums, is_async=True)
        if STAGES < CHUNKS or HELD < CHUNKS:
            if GROUPS > 0:
                pass
            elif GATED:
                sums, up_sums = warpgroup_mma_wait(2, deps=[sums, up_sums])
            else:
                sums = warpgroup_mma_wait(1, deps=[sums])
            debug_barrier()  # all warps are done with chunk k - 1
        if STAGES < CHUNKS:
            place = (k + STAGES - 1) % STAGES
            more = (k > 0) & (k + STAGES - 1 < CHUNKS)
            mbarrier.expect(input_there.index(place), input_bytes, pred=more)
            at = k0 + (k + STAGES - 1) * K
            tma.async_copy_global_to_shared(
                x, [m0, at], input_there.index(place), inputs.index(place), pred=more
            )
        if HELD < CHUNKS:
            place = (k + HELD - 1) % HELD
            more = (k > 0) & (k + HELD - 1 < CHUNKS)
            mbarrier.expect(weight_there.index(place), weight_bytes, pred=more)
            at = k0 + (k + HELD - 1) * K
            tma.async_copy_global_to_shared(
                weight, [n0, at], weight_there.index(place), weights.index(place), pred=more
            )
            if GATED:
                tma.async_copy_global_to_shared(
                    weight,
                    [outputs + n0, at],
                    weight_there.index(place),
                    ups.index(place),
                    pred=more,
                )
    if GROUPS == 0:
        if GATED:
            sums, up_sums = warpgroup_mma_wait(0, deps=[sums, up_sums])
        else:
            sums = warpgroup_mma_wait(0, deps=[sums])
        if SCALED:
            of_rows = gl.expand_dims(gl.load(x_scales + m, mask=m < rows, other=0.0), along_rows)
            sums *= of_rows * gl.expand_dims(gl.load(scales + n), along_outputs)
            if GATED:
                up_sums *= of_rows * gl.expand_dims(gl.load(scales + outputs + n), along_outputs)
    if BIASED:
        sums += gl.expand_dims(gl.load(bias + n).to(gl.float32), along_outputs)
    if GATED:
        if BIASED:
            up_sums += gl.expand_dims(gl.load(bias + outputs + n).to(gl.float32), along_outputs)
        sums = sums / (1.0 + gl.exp(-sums)) * up_sums
    at_out = gl.expand_dims(part * rows + m, along_rows) * outputs + gl.expand_dims(
        n, along_outputs
    )
    gl.store(out + at_out, sums.to(out.dtype.element_ty), mask=gl.expand_dims(m < rows, along_rows))


def tiling_for(
    weight: torch.Tensor,
    rows: int,
    *,
    gated: bool = False,
    in_parts: bool = False,
    sharing: int = 0,
) -> Tiling | None:
    """Return a tiling for a layer's weight [outputs, inputs]; None if torch is faster or no tiling
    fits. `in_parts`: partial sums are allowed. `sharing`: number of outputs that share the scales
    of input groups, 0 without groups; a tile stays within one such range."""
    outputs, inputs = weight.shape
    if weight.element_size() == 1:
        return _tiling_of_float8(
            rows, inputs, outputs // (2 if gated else 1), gated, in_parts, sharing
        )
    if (
        weight.nbytes > (LARGE_BYTES if rows <= GROUP_ROWS // 2 else VERY_LARGE_BYTES)
        and rows <= GROUP_ROWS
    ):
        tiling = _tiling_of_large(
            rows, inputs, outputs // (2 if gated else 1), 2 if gated else 1, in_parts
        )
        if tiling is not None:
            return tiling
    tiles = _in_groups(rows) // GROUP_ROWS
    if rows > MOST_ROWS or weight.nbytes > MOST_BYTES[tiles]:
        return None
    if rows <= GROUP_ROWS // (4 if in_parts else 2) and weight.nbytes > LARGE_BYTES:
        return None
    if (tiles > 1 and inputs > MOST_INPUTS and not in_parts) or (tiles > 2 and gated):
        return None
    return _cheapest(
        tiles * GROUP_ROWS, inputs, outputs // (2 if gated else 1), 2 if gated else 1, in_parts
    )


def tiling_in_order(weight: torch.Tensor, rows: int) -> Tiling | None:
    """Return a tiling that adds up over all inputs of a 16-bit weight [outputs, inputs] in their
    order, whatever the number of rows; None if torch is faster or no tiling fits."""
    outputs, inputs = weight.shape
    if rows > MOST_ROWS:
        return None
    return _cheapest(_in_groups(rows), inputs, outputs, 1, in_parts=False)


def _in_groups(rows: int) -> int:
    """Return the number of rows, up to `GROUP_ROWS` times a power of two: each tiling is a kernel
    to compile."""
    return GROUP_ROWS << (ceil(rows / GROUP_ROWS) - 1).bit_length()


def _tiling_of_large(
    rows: int, inputs: int, outputs: int, per_output: int, in_parts: bool
) -> Tiling | None:
    """Return a tiling for a layer of more weights than multiprocessors hold, measured on an H100:
    one program per multiprocessor, with as many weights in flight as fit, and parts if there are
    too few programs."""
    tiles = outputs // GROUP_ROWS
    m = max(LEAST_ROWS, 1 << (rows - 1).bit_length())
    most = min(MOST_PARTS, PROCESSORS // max(1, tiles)) if in_parts else 1
    parts = max((parts for parts in range(1, most + 1) if inputs % (parts * 128) == 0), default=1)
    if outputs % GROUP_ROWS or tiles * parts < LEAST_PROGRAMS:
        return None
    return _with_room(m, GROUP_ROWS, parts, inputs // parts, per_output, SHARED_BYTES, 2, (128, 64))


def _tiling_of_float8(
    rows: int, inputs: int, outputs: int, gated: bool, in_parts: bool, sharing: int
) -> Tiling | None:
    """Return the fastest tiling measured on an H200 for the layers of Qwen3-8B. Outputs have few
    bytes, so tiles have many of them."""
    most = MOST_ROWS_OF_BLOCKS if sharing else MOST_ROWS_OF_FLOAT8[gated, in_parts]
    if rows > most:
        return None
    large = rows > GROUP_ROWS
    sizes = (
        [(2 * GROUP_ROWS, 32 if gated else 64), (GROUP_ROWS, 64)]
        if large
        else [(GROUP_ROWS, 64 if gated else 128), (GROUP_ROWS, 32)]
    )
    chunks = (CHUNK_OF_GROUPS,) if sharing else (128, 64)
    for m, n in sizes:
        if outputs % n or (sharing and sharing % n):
            continue
        parts = 1
        programs = ceil(rows / m) * outputs // n
        while (
            in_parts
            and parts < MOST_PARTS
            and programs * parts < PROCESSORS * 3 // 4
            and inputs % (2 * parts * chunks[0]) == 0
        ):
            parts *= 2
        at_once = 2 if programs * parts > PROCESSORS else 1
        if tiling := _with_room(
            m, n, parts, inputs // parts, 2 if gated else 1, SHARED_BYTES // at_once, 1, chunks
        ):
            return tiling
    return None


@cache
def _cheapest(
    rows: int, inputs: int, outputs: int, per_output: int, in_parts: bool
) -> Tiling | None:
    """Return the tiling with the lowest `_cost`, with weights measured on an H200; None if none
    fits."""
    every = product(
        (GROUP_ROWS, 2 * GROUP_ROWS),
        (16, 32, 64, 128),
        range(1, MOST_PARTS + 1) if in_parts else (1,),
        (1, 2),
    )
    costs = {}
    for m, n, parts, at_once in every:
        if outputs % n or inputs % parts:
            continue
        tiling = _with_room(
            m, n, parts, inputs // parts, per_output, SHARED_BYTES // at_once, 2, (128, 64)
        )
        if tiling is not None:
            costs[tiling] = _cost(tiling, at_once, rows, inputs, outputs, per_output)
    return min(costs, key=lambda tiling: costs[tiling], default=None)


def _with_room(
    m: int,
    n: int,
    parts: int,
    inputs: int,
    per_output: int,
    shared_bytes: int,
    size: int,
    chunks_of: tuple[int, ...],
) -> Tiling | None:
    """Return a tiling that holds all inputs of a program if they fit beside some weights, since
    programs wait for inputs; otherwise equally many chunks of both, with the remaining space for
    inputs. Prefers large chunks, since each costs an iteration."""
    for chunk in chunks_of:
        chunks = inputs // chunk
        of_weights = size * n * chunk * per_output
        of_inputs = size * m * chunk
        least = min(chunks, LEAST_STAGES)
        if inputs % chunk:
            continue
        left = shared_bytes - chunks * of_inputs
        if chunks <= MOST_STAGES and left >= (least + 1) * of_weights:
            return Tiling(m, n, parts, chunk, min(chunks, left // of_weights), chunks)
        both = shared_bytes // (of_weights + of_inputs)
        if both >= least:
            held = min(chunks, both)
            return Tiling(
                m,
                n,
                parts,
                chunk,
                held,
                min(chunks, MOST_STAGES, (shared_bytes - held * of_weights) // of_inputs),
            )
    return None


def _cost(
    tiling: Tiling, at_once: int, rows: int, inputs: int, outputs: int, per_output: int
) -> float:
    """Return the bytes read by the busiest multiprocessor; weights loaded before the input is
    available count half."""
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
    """Multiply x [rows, inputs] by weight [outputs, inputs], contiguous, float16 or bfloat16 ->
    [rows, outputs]; accumulates in float32.

    If both are float8, `x_scales` and `scales` are their multipliers: [rows] and [outputs] float32,
    or [rows, groups] and [outputs / n, groups] with one scale for `CHUNK_OF_GROUPS` inputs; the
    result is `dtype`.

    `gated`, `into` [rows, outputs]: see `one_row.linear`. `in_parts`: return partial sums [parts,
    rows, outputs] float32 (see `rms_norm.add_and_norm`).
    """
    rows, inputs = x.shape
    outputs = weight.shape[0] // (2 if gated else 1)
    shape, kind = (
        ((tiling.parts, rows, outputs), torch.float32)
        if in_parts
        else ((rows, outputs), dtype or x.dtype)
    )
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
        OUTPUTS_FIRST=tiling.outputs_first,
        num_warps=4 * max(tiling.rows, GROUP_ROWS) // GROUP_ROWS,
        **pdl_options(x.device),
    )
    return out


def check(device: torch.device) -> None:
    """Raise unless it computes correct values here: Gluon may change between versions of Triton."""
    # small integers, so that sums are exact
    numbers = torch.arange(64 * 256, device=device).remainder(7).sub(3).view(64, 256)
    x = numbers[:20].bfloat16()
    weight = numbers.bfloat16()
    exact = (x.float() @ weight.float().t()).bfloat16()
    for rows, tiling in ((20, Tiling(64, 32, 1, 64, 3, 3)), (5, Tiling(8, 64, 1, 64, 3, 3))):
        if not torch.equal(linear(x[:rows], weight, tiling=tiling), exact[:rows]):
            raise DovetailError("it computes wrong numbers")
