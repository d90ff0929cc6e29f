# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment, var-annotated"
# ruff: noqa: N803 (constants are upper case)
"""Linear layer for one row with float8 weights, on matrix units. Like `one_row`, a program requests
all weights of some outputs before its input is available, and fuses the operations around the
layer; but it issues at most half as many instructions, so that a program, which reads nothing
meanwhile, finishes sooner.

Matrix units multiply [16, 16] by [16, 8], but there is one row of inputs, not eight. So each warp
cuts its inputs into eight slices, and an output's weights likewise. Of the products of each slice
of weights with each slice of inputs, the 8 on the diagonal of 64 are needed, and then added up:

    weights of output 0, slice 0 │ w … │              slice   0 1 … 7          │ ✓        │
    weights of output 0, slice 1 │ w … │   inputs of    │ x x … x │         =  │   ✓      │   ✓: the slices are the same
                               … │     │   a slice, ↓   │ …       │            │     …    │
    weights of output 0, slice 7 │ w … │                                       │        ✓ │

Weights become float16, which is exact. Inputs also become float16, multiplied by a power of two per
slice that moves the slice's largest magnitude to between 2**14 and 2**15: a bfloat16 is exact
unless it is below 2**-31 of that magnitude. A thread loads the 16 weights that its matrix unit
reads from it, so that neither weights nor inputs go through shared memory. Twin:
`Float8.dequantized` and a product.
"""

from __future__ import annotations

from math import ceil

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.errors import DovetailError
from dovetail.nn.kernels.dependent_launch import pdl_options
from dovetail.nn.kernels.gpu import gpu_of
from dovetail.nn.kernels.launch import launch

WARPS = 4
SLICES = 8  # per warp
SLICE = 128  # inputs; with block scales, the inputs of a block
CHUNK = WARPS * SLICES * SLICE  # inputs that a program multiplies per iteration
LEAST_INPUTS = 2048  # with fewer, half of the warps would be idle
MOST_HELD = 16  # chunks of weights over all outputs of a program: what fits into registers
REGISTERS = 128  # per thread, with half of them for weights: four programs fit then


@gluon.jit
def index(size: gl.constexpr, dim: gl.constexpr, layout: gl.constexpr):
    """Return 0 to size - 1 along one of three dimensions; the others have size 1."""
    first: gl.constexpr = 1 if dim == 0 else 0
    second: gl.constexpr = 1 if dim == 2 else 2
    numbers = gl.arange(0, size, layout=gl.SliceLayout(first, gl.SliceLayout(second, layout)))
    return gl.expand_dims(gl.expand_dims(numbers, first), second)


@gluon.jit
def added(sums, weights, inputs, scales):
    """Return sums plus the products, on the diagonal, of a chunk's weights [warps, outputs and
    slices, SLICE] and inputs [warps, SLICE, slices] float32, times `scales` [warps, outputs and
    slices, 1], or a number."""
    num_warps: gl.constexpr = sums.shape[0]
    rows: gl.constexpr = sums.shape[1]
    layout: gl.constexpr = sums.type.layout
    largest = gl.max(gl.abs(inputs), 1).to(gl.int32, bitcast=True)
    # of two, as float32 bits; clamped so that its reciprocal is finite
    power = gl.maximum(largest & 0x7F800000, 22 << 23)
    factor = ((254 << 23) - power + (14 << 23)).to(gl.float32, bitcast=True)
    back = (power - (14 << 23)).to(gl.float32, bitcast=True)
    narrow = (inputs * gl.expand_dims(factor, 1)).to(gl.float16)
    products = mma_v2(
        weights.to(gl.float16), narrow, gl.zeros([num_warps, rows, 8], gl.float32, layout=layout)
    )
    wanted = gl.where(index(rows, 1, layout) % 8 == index(8, 2, layout), 1.0, 0.0)
    return gl.fma(
        products, wanted * gl.convert_layout(gl.expand_dims(back, 1), layout) * scales, sums
    )


@gluon.jit
def _linear(
    x,  # [INPUTS]
    weight,  # [outputs, INPUTS] float8; GATED: gates, then ups
    bias,  # [outputs]; GATED: likewise
    norm,  # [INPUTS]
    out,  # [outputs]; ADDS: accumulated into
    # [outputs]; GROUPS: [outputs / SHARING, GROUPS], for GROUP inputs each; GATED: gates', then
    # ups'
    scales,
    outputs,  # GATED: pairs
    eps,
    INPUTS: gl.constexpr,
    CHUNKS: gl.constexpr,
    SLICE: gl.constexpr,
    N: gl.constexpr,
    NORMED: gl.constexpr,
    GATED: gl.constexpr,
    ADDS: gl.constexpr,
    BIASED: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
    SHARING: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute N outputs. Tensors of weights are [warps, outputs and slices, SLICE], of inputs
    [warps, SLICE, slices], of products [warps, outputs and slices, slices], in tuples with one per
    chunk."""
    per_output: gl.constexpr = 2 if GATED else 1
    of_program: gl.constexpr = N * per_output  # a gate and its up are adjacent
    rows: gl.constexpr = of_program * 8
    chunk_inputs: gl.constexpr = num_warps * 8 * SLICE
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[num_warps, 1, 1], instr_shape=[1, 16, 8]
    )
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 16)
    inputs_layout: gl.constexpr = gl.DotOperandLayout(1, sums_layout, 16)
    first = gl.program_id(0) * N

    row = index(rows, 1, weights_layout)
    i = index(SLICE, 2, weights_layout)
    n = first + row // 8 // per_output + row // 8 % per_output * outputs
    k = index(SLICE, 1, inputs_layout)
    s = index(8, 2, inputs_layout)
    of_warp = index(num_warps, 0, weights_layout) * (8 * SLICE)
    of_inputs_warp = index(num_warps, 0, inputs_layout) * (8 * SLICE)
    if GROUPS > 0 or SLICE == 64:  # a slice has one scale, or a warp's loads are contiguous anyway
        at_weight = of_warp + row % 8 * SLICE + i
        at_input = of_inputs_warp + s * SLICE + k
    else:  # interleave halves of slices, so that a warp's loads are contiguous
        at_weight = (
            of_warp + i // (SLICE // 2) * (4 * SLICE) + row % 8 * (SLICE // 2) + i % (SLICE // 2)
        )
        at_input = (
            of_inputs_warp + k // (SLICE // 2) * (4 * SLICE) + s * (SLICE // 2) + k % (SLICE // 2)
        )
    if PDL:
        gdc_launch_dependents()
    weights = ()
    group_scales = ()
    for chunk in gl.static_range(CHUNKS):
        place = weight + n.to(gl.int64) * INPUTS + at_weight + chunk * chunk_inputs
        if INPUTS % chunk_inputs == 0:
            weights += (gl.load(place),)
        else:
            weights += (gl.load(place, mask=at_weight + chunk * chunk_inputs < INPUTS, other=0.0),)
    sums_row = index(rows, 1, sums_layout)
    if GROUPS > 0:
        of_output = first + sums_row // 8 // per_output + sums_row // 8 % per_output * outputs
        group = index(num_warps, 0, sums_layout) * 8 + sums_row % 8
        for chunk in gl.static_range(CHUNKS):
            own = (group + chunk * (num_warps * 8)) * SLICE // GROUP
            group_scales += (
                gl.load(scales + of_output // SHARING * GROUPS + own, mask=own < GROUPS, other=0.0),
            )
    if PDL:
        gdc_wait()

    inputs = ()
    squares = gl.zeros([num_warps, SLICE, 8], gl.float32, layout=inputs_layout)
    for chunk in gl.static_range(CHUNKS):
        at = at_input + chunk * chunk_inputs
        values = gl.load(x + at, mask=at < INPUTS, other=0.0).to(gl.float32)
        if NORMED:
            squares = gl.fma(values, values, squares)
            # the rest of the norm is one factor, applied last
            values *= gl.load(norm + at, mask=at < INPUTS, other=0.0).to(gl.float32)
        inputs += (values,)
    sums = gl.zeros([num_warps, rows, 8], gl.float32, layout=sums_layout)
    for chunk in gl.static_range(CHUNKS):
        sums = added(
            sums, weights[chunk], inputs[chunk], group_scales[chunk] if GROUPS > 0 else 1.0
        )

    # threads that sum an output, or two adjacent ones
    across: gl.constexpr = min(32, 32 * num_warps // N)
    by_output: gl.constexpr = gl.BlockedLayout(
        [per_output, num_warps * 64 // across], [32 // across, across], [num_warps, 1], [1, 0]
    )
    sums = gl.reshape(
        gl.permute(gl.reshape(sums, [num_warps, of_program, 64]), [1, 0, 2]),
        [of_program, num_warps * 64],
    )
    result = gl.sum(gl.convert_layout(sums, by_output), 1)
    if NORMED:
        result *= gl.rsqrt(gl.sum(gl.sum(gl.sum(squares, 1), 1), 0) / INPUTS + eps)
    if GATED:
        result, ups = gl.split(gl.reshape(result, [N, 2]))
    at_out = first + gl.arange(0, N, layout=result.type.layout)
    if GROUPS == 0:
        result *= gl.load(scales + at_out)
    if BIASED:
        result += gl.load(bias + at_out).to(gl.float32)
    if GATED:
        if GROUPS == 0:
            ups *= gl.load(scales + outputs + at_out)
        if BIASED:
            ups += gl.load(bias + outputs + at_out).to(gl.float32)
        result = result / (1.0 + gl.exp(-result)) * ups
    if ADDS:
        result += gl.load(out + at_out).to(gl.float32)
    gl.store(out + at_out, result.to(out.dtype.element_ty))


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
    scales: torch.Tensor,
    at_once: int | None = None,
) -> torch.Tensor:
    """Multiply x [1, inputs], float16 or bfloat16, by a weight [outputs, inputs] that `takes`
    accepts, contiguous -> [1, outputs]; accumulates in float32.

    `norm`, `gated`, `out`, `into`: see `one_row.linear`. `scales` [outputs], or [outputs / n,
    inputs / SLICE] (rounded up): multipliers of the weight. `at_once`: outputs per program, instead
    of the best ones measured.
    """
    inputs = x.shape[1]
    outputs = weight.shape[0] // (2 if gated else 1)
    adds = out is not None
    if out is None:
        out = torch.empty((1, outputs), dtype=x.dtype, device=x.device) if into is None else into
    norm_weight, eps = norm or (x, 0.0)
    groups = scales.shape[1] if scales.ndim == 2 else 0
    size = slice_of(inputs)
    chunks = ceil(inputs / (WARPS * SLICES * size))
    at_once = at_once or outputs_at_once(weight, gated)
    of_program = at_once // (2 if gated else 1)
    launch(_linear, (outputs // of_program,))(
        x,
        weight,
        x if bias is None else bias,
        norm_weight,
        out,
        scales,
        outputs,
        eps,
        INPUTS=inputs,
        CHUNKS=chunks,
        SLICE=size,
        N=of_program,
        NORMED=norm is not None,
        GATED=gated,
        ADDS=adds,
        BIASED=bias is not None,
        GROUPS=groups,
        GROUP=SLICE,
        SHARING=len(weight) // len(scales),
        num_warps=WARPS,
        maxnreg=REGISTERS if groups == 0 and 8 * at_once * chunks <= REGISTERS // 2 else None,
        **pdl_options(x.device),
    )
    return out


def slice_of(inputs: int) -> int:
    """Return the inputs of a slice: such that all warps have some."""
    return SLICE if inputs > CHUNK // 2 else SLICE // 2


def outputs_at_once(weight: torch.Tensor, gated: bool) -> int:
    """Return the number of outputs of a weight [outputs, inputs] that a program computes, counting
    gates and ups separately: a power of two; 0 if not even two fit. Measured on an H200."""
    outputs, inputs = weight.shape
    chunks = ceil(inputs / CHUNK)
    gpu = gpu_of(weight.device)
    if chunks == 1 and not gated and gpu is not None and outputs <= 16 * 2 * gpu.processors:
        return 16  # all programs fit at once
    most = min(8 if chunks == 1 else 4, MOST_HELD // chunks)
    return 0 if most < 2 else 1 << most.bit_length() - 1


def takes(weight: torch.Tensor, scales: torch.Tensor, group: int, gated: bool) -> bool:
    """True if the kernel can multiply this weight [outputs, inputs], with a scale per output, or
    per `group` of inputs, and is faster than `one_row`: not if more than an eighth of what it
    multiplies would be padding, with several chunks."""
    outputs, inputs = weight.shape
    chunks = ceil(inputs / CHUNK)
    at_once = outputs_at_once(weight, gated)
    if inputs < LEAST_INPUTS or inputs % 16 or not at_once or outputs % at_once:
        return False
    return (chunks == 1 or 8 * inputs >= 7 * chunks * CHUNK) and (
        scales.ndim == 1 or group == SLICE
    )


def check(device: torch.device) -> None:
    """Raise unless it computes correct values here: Gluon may change between versions of Triton."""
    # small integers, so that sums are exact
    x = torch.arange(CHUNK + SLICE, device=device).remainder(7).sub(3)[None].bfloat16()
    weight = torch.arange(8 * x.shape[1], device=device).remainder(5).sub(2).view(8, -1).float()
    ours = linear(x, weight.to(torch.float8_e4m3fn), scales=torch.ones(8, device=device))
    if not torch.equal(ours, (x.float() @ weight.t()).bfloat16()):
        raise DovetailError("it computes wrong numbers")
