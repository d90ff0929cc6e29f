# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Linear layer for one row, at the speed of reading the weights from memory: most of the work of
decoding a single request.

A program requests all weights of some outputs at once, before its input is available, while the
previous kernel still runs (`dependent_launch`); so all loads of a small layer are in flight
together. Operations around the layer that would cost a launch and a pass through memory are fused:
the norm of its input, the gate of its output, the addition to the residual stream. Twin:
`dovetail.nn.linear`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.launch import launch

WIDE = 8192  # inputs from which a program has more warps
OUTPUTS_OF_FLOAT8 = 4


@triton.jit
def _linear(
    x,  # [INPUTS]
    weight,  # [outputs, INPUTS]; GATED: gates, then ups
    bias,  # [outputs]; GATED: likewise
    norm,  # [INPUTS]
    out,  # [outputs]; ADDS: accumulated into
    scales,  # of float8 weights: [outputs]; GROUP: [outputs / SHARING, inputs / GROUP]
    outputs,  # GATED: pairs
    eps,
    INPUTS: tl.constexpr,
    PADDED: tl.constexpr,
    N: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    SHARING: tl.constexpr,  # a multiple of N
    PDL: tl.constexpr,
):
    """Compute N outputs."""
    n = tl.program_id(0) * N + tl.arange(0, N)
    i = tl.arange(0, PADDED)
    real = n < outputs
    inside = i < INPUTS
    mask = real[:, None] & inside[None, :]
    place = weight + n.to(tl.int64)[:, None] * INPUTS + i[None, :]
    let_next_begin(PDL)
    weights = tl.load(place, mask=mask, other=0.0)
    if SCALED and GROUP > 0:  # the program's outputs share scales, so scale the inputs
        groups: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
        scale_place = scales + tl.program_id(0) * N // SHARING * groups + i // GROUP
        input_scales = tl.load(scale_place, mask=inside, other=0.0)
        if GATED:
            up_input_scales = tl.load(
                scale_place + outputs // SHARING * groups, mask=inside, other=0.0
            )
    if GATED:
        up_weights = tl.load(
            weight + (n + outputs).to(tl.int64)[:, None] * INPUTS + i[None, :], mask=mask, other=0.0
        )
    wait(PDL)
    values = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(values * values, 0) / INPUTS + eps)
        values = values * scale * tl.load(norm + i, mask=inside, other=0.0).to(tl.float32)
        values = values.to(x.dtype.element_ty).to(tl.float32)  # round as the twin does
    if SCALED and GROUP > 0:
        sums = tl.sum(weights.to(tl.float32) * (values * input_scales)[None, :], 1)
    else:
        sums = tl.sum(weights.to(tl.float32) * values[None, :], 1)
    if SCALED and GROUP == 0:
        sums *= tl.load(scales + n, mask=real, other=0.0)
    if BIASED:
        sums += tl.load(bias + n, mask=real, other=0.0).to(tl.float32)
    if GATED:
        if SCALED and GROUP > 0:
            ups = tl.sum(up_weights.to(tl.float32) * (values * up_input_scales)[None, :], 1)
        else:
            ups = tl.sum(up_weights.to(tl.float32) * values[None, :], 1)
        if SCALED and GROUP == 0:
            ups *= tl.load(scales + n + outputs, mask=real, other=0.0)
        if BIASED:
            ups += tl.load(bias + outputs + n, mask=real, other=0.0).to(tl.float32)
        sums = sums / (1.0 + tl.exp(-sums)) * ups
    if ADDS:
        sums += tl.load(out + n, mask=real, other=0.0).to(tl.float32)
    tl.store(out + n, sums.to(out.dtype.element_ty), mask=real)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    group: int = 0,
) -> torch.Tensor:
    """Multiply x [1, inputs] by weight [outputs, inputs], contiguous -> [1, outputs]; computes in
    float32.

    `norm`: (weight [inputs], eps) of an RMS norm to apply to x first. `gated`: silu of the first
    half of the outputs, times the second half. `out` [1, outputs]: add the result to it. `into` [1,
    outputs]: write the result to it. `scales` of float8 weights: as in `streamed.Stored`, with
    `group`, if `takes_scales` allows it.
    """
    inputs = x.shape[1]
    outputs = weight.shape[0] // (2 if gated else 1)
    adds = out is not None
    if out is None:
        out = torch.empty((1, outputs), dtype=x.dtype, device=x.device) if into is None else into
    norm_weight, eps = norm or (weight, 0.0)
    padded = triton.next_power_of_2(inputs)
    at_once = _outputs_at_once(padded, weight)
    launch(_linear, (triton.cdiv(outputs, at_once),))(
        x,
        weight,
        weight if bias is None else bias,
        norm_weight,
        out,
        norm_weight if scales is None else scales,
        outputs,
        eps,
        INPUTS=inputs,
        PADDED=padded,
        N=at_once,
        NORMED=norm is not None,
        GATED=gated,
        ADDS=adds,
        BIASED=bias is not None,
        SCALED=scales is not None,
        GROUP=group,
        SHARING=1 if scales is None else len(weight) // len(scales),
        num_warps=8 if padded >= WIDE and scales is None else 4,
        **pdl_options(x.device),
    )
    return out


def takes_scales(weight: torch.Tensor, scales: torch.Tensor, group: int, gated: bool) -> bool:
    """True if the outputs of each program share scales, or scales aren't per group of inputs."""
    if not group:
        return True
    sharing = len(weight) // len(scales)
    return sharing % _outputs_at_once(triton.next_power_of_2(weight.shape[1]), weight) == 0 and (
        not gated or len(weight) // 2 % sharing == 0
    )


def _outputs_at_once(padded: int, weight: torch.Tensor) -> int:
    """Return the outputs per program; like the warps, measured with `bench/products.py`."""
    return max(2, min(8, 2 * WIDE // padded)) if weight.element_size() > 1 else OUTPUTS_OF_FLOAT8
