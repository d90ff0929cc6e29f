# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment, var-annotated"
# ruff: noqa: N803 (constants are upper case)
"""Feed-forwards of a mixture of experts in float8 for few tokens, on matrix units: `one_row_float8`
with weights that depend on the token.

The last layer of a token's k experts is one product with k times the inputs, each slice of which
has the weights of one expert; it can be added to the stream. Twin:
`dovetail.nn.format.base.plain_experts`.
"""

from __future__ import annotations

from math import ceil

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.errors import DovetailError
from dovetail.nn.kernels.dependent_launch import pdl_options
from dovetail.nn.kernels.launch import launch
from dovetail.nn.kernels.one_row_float8 import WARPS, added, index
from dovetail.nn.kernels.stored_experts import FLOAT8, Stored

SLICE = 64  # inputs that a matrix unit multiplies at once, for one expert and with one scale
CHUNK = WARPS * 8 * SLICE  # inputs that a program multiplies per iteration
MOST_CHUNKS = 4  # more don't fit into registers
# outputs of a program, pairs if gated
GATE_UP = 4
DOWN = 4


@gluon.jit
def _of_pair(numbers, pair, chunk: gl.constexpr, chunk_inputs: gl.constexpr, INPUTS: gl.constexpr):
    """Return numbers[pair] for a tensor of pairs that have inputs in a chunk. (A load for each
    would be repeated by threads.)"""
    least: gl.constexpr = chunk * chunk_inputs // INPUTS
    most: gl.constexpr = min(len(numbers) - 1, (chunk * chunk_inputs + chunk_inputs - 1) // INPUTS)
    result = 0 * pair + numbers[least]
    for other in gl.static_range(least + 1, most + 1):
        result = gl.where(pair == other, numbers[other], result)
    return result


@gluon.jit
def _multiply(
    x,  # GATED: [tokens, INPUTS]; not, [tokens, TOP * INPUTS]
    values,  # [experts, outputs, INPUTS] float8; GATED: gates, then ups
    scales,  # [experts, outputs]; GROUP: [experts, outputs / SHARING, INPUTS / GROUP]
    ids,  # [tokens, TOP]
    shares,  # [tokens, TOP]
    out,  # GATED: [tokens * TOP, OUTPUTS]; not, [tokens, OUTPUTS]; ADDS: accumulated into
    INPUTS: gl.constexpr,
    OUTPUTS: gl.constexpr,  # GATED: pairs
    TOP: gl.constexpr,
    SLICE: gl.constexpr,
    CHUNKS: gl.constexpr,
    N: gl.constexpr,
    GATED: gl.constexpr,
    ADDS: gl.constexpr,
    GROUP: gl.constexpr,
    SHARING: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute N outputs of one pair (GATED), or of one token. Shapes are those of
    `one_row_float8`."""
    per_output: gl.constexpr = 2 if GATED else 1
    of_program: gl.constexpr = N * per_output
    stored: gl.constexpr = OUTPUTS * per_output
    rows: gl.constexpr = of_program * 8
    all_inputs: gl.constexpr = INPUTS if GATED else TOP * INPUTS
    chunk_inputs: gl.constexpr = num_warps * 8 * SLICE
    groups: gl.constexpr = 1 if GROUP == 0 else (INPUTS + GROUP - 1) // GROUP
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[num_warps, 1, 1], instr_shape=[1, 16, 8]
    )
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 16)
    inputs_layout: gl.constexpr = gl.DotOperandLayout(1, sums_layout, 16)
    first = gl.program_id(0) * N
    which = gl.program_id(1)
    token = which // TOP if GATED else which

    row = index(rows, 1, weights_layout)
    i = index(SLICE, 2, weights_layout)
    n = first + row // 8 // per_output + row // 8 % per_output * OUTPUTS
    of_weight = (index(num_warps, 0, weights_layout) * 8 + row % 8) * SLICE
    of_input = (
        index(num_warps, 0, inputs_layout) * 8 + index(8, 2, inputs_layout)
    ) * SLICE + index(SLICE, 1, inputs_layout)
    sums_row = index(rows, 1, sums_layout)
    of_output = first + sums_row // 8 // per_output + sums_row // 8 % per_output * OUTPUTS
    of_sum = (index(num_warps, 0, sums_layout) * 8 + sums_row % 8) * SLICE
    if PDL:
        if GATED:  # before the next kernel, which then finds ids and shares, may begin
            gdc_wait()
        gdc_launch_dependents()
    # of the pairs that the program multiplies
    experts = ()
    all_shares = ()
    for pair in gl.static_range(1 if GATED else TOP):
        at_pair = which if GATED else token * TOP + pair
        experts += (gl.load(ids + at_pair),)
        all_shares += (1.0 if GATED else gl.load(shares + at_pair),)
    tiles = ()
    tile_scales = ()
    for chunk in gl.static_range(CHUNKS):
        at = of_weight + chunk * chunk_inputs
        row_of = (
            _of_pair(experts, at // INPUTS, chunk, chunk_inputs, INPUTS).to(gl.int64) * stored + n
        )
        place = values + (row_of - at // INPUTS) * INPUTS + (at + i)
        if all_inputs % chunk_inputs == 0:
            tiles += (gl.load(place),)
        else:
            tiles += (gl.load(place, mask=at + i < all_inputs, other=0.0),)
    for chunk in gl.static_range(CHUNKS):
        at = of_sum + chunk * chunk_inputs
        pair = at // INPUTS
        expert = _of_pair(experts, pair, chunk, chunk_inputs, INPUTS).to(gl.int64)
        place = expert * (stored // SHARING * groups) + of_output // SHARING * groups
        if GROUP > 0:
            place += at % INPUTS // GROUP
        scale = gl.load(scales + place, mask=at < all_inputs, other=0.0)
        tile_scales += (scale * _of_pair(all_shares, pair, chunk, chunk_inputs, INPUTS),)

    if PDL and not GATED:
        gdc_wait()
    inputs = ()
    for chunk in gl.static_range(CHUNKS):
        at = of_input + chunk * chunk_inputs
        inputs += (
            gl.load(x + token * all_inputs + at, mask=at < all_inputs, other=0.0).to(gl.float32),
        )
    sums = gl.zeros([num_warps, rows, 8], gl.float32, layout=sums_layout)
    for chunk in gl.static_range(CHUNKS):
        sums = added(sums, tiles[chunk], inputs[chunk], tile_scales[chunk])

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
    if GATED:
        result, ups = gl.split(gl.reshape(result, [N, 2]))
        result = result / (1.0 + gl.exp(-result)) * ups
    at_out = out + which.to(gl.int64) * OUTPUTS + first + gl.arange(0, N, layout=result.type.layout)
    if ADDS:
        result += gl.load(at_out).to(gl.float32)
    gl.store(at_out, result.to(out.dtype.element_ty))


def experts(
    x: torch.Tensor,
    gate_up: Stored,
    down: Stored,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sum [tokens, hidden] float32 of silu-gated experts without biases, which
    `takes` accepts, for x [tokens, hidden], contiguous, float16 or bfloat16; ids [tokens, k] int32,
    weights [tokens, k] float32. `out` [tokens, hidden]: add the result to it, and return it."""
    tokens, top = ids.shape
    inner = torch.empty((tokens * top, down.inputs), dtype=x.dtype, device=x.device)
    multiply(x, gate_up, ids, weights, inner, gated=True, at_once=GATE_UP)
    adds = out is not None
    out = (
        torch.empty((tokens, down.outputs), dtype=torch.float32, device=x.device)
        if out is None
        else out
    )
    multiply(inner, down, ids, weights, out, adds=adds, at_once=DOWN)
    return out


def multiply(
    x, layer: Stored, ids, weights, out, *, gated: bool = False, adds: bool = False, at_once: int
) -> None:
    """Compute one of the layers. The last one must follow on the first, whose ids and weights it
    reads before that has ended. `at_once`: outputs of a program, pairs if gated."""
    top = ids.shape[1]
    outputs = out.shape[1]
    launch(_multiply, (outputs // at_once, len(out)))(
        x,
        layer.values,
        layer.scales,
        ids,
        weights,
        out,
        INPUTS=layer.inputs,
        OUTPUTS=outputs,
        TOP=top,
        SLICE=SLICE,
        CHUNKS=ceil(layer.inputs * (1 if gated else top) / CHUNK),
        N=at_once,
        GATED=gated,
        ADDS=adds,
        GROUP=layer.group,
        SHARING=layer.constants()["SHARING"],
        num_warps=WARPS,
        **pdl_options(x.device),
    )


def takes(gate_up: Stored, down: Stored, per_token: int) -> bool:
    """True if the kernels can multiply these weights."""
    chunks = max(gate_up.inputs, down.inputs * per_token) / CHUNK
    fits = (
        down.inputs % GATE_UP == 0
        and down.outputs % DOWN == 0
        and gate_up.outputs == 2 * down.inputs
        and chunks <= MOST_CHUNKS
    )
    return fits and all(
        layer.kind == FLOAT8 and layer.inputs % SLICE == 0 and layer.group % SLICE == 0
        for layer in (gate_up, down)
    )


def check(device: torch.device) -> None:
    """Raise unless they compute correct values here: Gluon may change between versions of
    Triton."""
    numbers = torch.arange(3 * 8 * 192, device=device).remainder(5).sub(2).view(3, 8, 192)
    ids = torch.tensor([[2, 0], [1, 2]], dtype=torch.int32, device=device)
    weights = torch.tensor([[1.0, 2.0], [4.0, 0.5]], device=device)
    layer = Stored(
        numbers.to(torch.float8_e4m3fn), 192, torch.ones(3, 8, device=device), kind=FLOAT8
    )
    # small integers, so that sums are exact
    x = torch.arange(2 * 2 * 192, device=device).remainder(7).sub(3).view(4, 192).bfloat16()
    out = torch.zeros(2, 8, device=device)
    multiply(x, layer, ids, weights, out, at_once=DOWN)
    products = torch.einsum("pk,pnk->pn", x.float(), numbers[ids.flatten().long()].float()).view(
        2, 2, 8
    )
    if not torch.equal(out, (products * weights[:, :, None]).sum(1)):
        raise DovetailError("they compute wrong numbers")
