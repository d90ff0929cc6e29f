"""Weights of each format, made from random numbers, and the bounds within which what is computed
with them may lie."""

from __future__ import annotations

import math
from typing import Any

import torch

from dovetail.api.model import BuildContext
from dovetail.nn.format import WeightFormat
from dovetail.nn.parallel import SINGLE
from dovetail.nn.parameter import Part, Weight
from tests.models.oracle import DenseAttention

HALF_ULP = 2.0**-4  # of e4m3, relative; below 2**-6 numbers lie 2**-9 apart
SMALLEST_STEP = 2.0**-9


def plain_weight(
    sizes: tuple[int, ...], inputs: int, dtype: torch.dtype, device: torch.device
) -> Weight:
    """A weight without memory, of parts "0", "1", … that lie below each other."""
    context = BuildContext(
        parallel=SINGLE, dtype=dtype, device=device, make_attention=DenseAttention
    )
    parts, at = {}, 0
    for index, size in enumerate(sizes):
        parts[str(index)] = Part((size, inputs), 0, 0, size, at)
        at += size
    return Weight((at, inputs), parts, context, later=True)


def stored(
    form: WeightFormat,
    sizes: tuple[int, ...],
    inputs: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> Any:
    """A weight of the format, quantized from random numbers that are about as large as a
    model's."""
    weight: Any = form.allocate(plain_weight(sizes, inputs, dtype, device), device)
    torch.manual_seed(seed)
    for index, size in enumerate(sizes):
        weight.load(torch.randn(size, inputs) * torch.rand(size, 1) / math.sqrt(inputs), str(index))
    return weight


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False
) -> torch.Tensor:
    """In float64."""
    y = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = gate * torch.sigmoid(gate) * up
    return y


def bound_of_narrow_inputs(x: torch.Tensor, weight: torch.Tensor, group: int = 0) -> torch.Tensor:
    """The most by which products change when inputs are rounded to e4m3, with a scale for each row
    or each group of it, that makes the largest 448."""
    own = group or x.shape[1]
    wide = x.double().abs()
    padded = torch.nn.functional.pad(wide, (0, -x.shape[1] % own)).unflatten(1, (-1, own))
    steps = (padded.amax(2) / 448.0 * SMALLEST_STEP / 2).repeat_interleave(own, 1)[:, : x.shape[1]]
    return torch.maximum(wide * HALF_ULP, steps) @ weight.double().abs().T
