"""NVFP4: weights of 4 bits (e2m1); 16 inputs of an output share a scale in e4m3, and all weights of
a tensor a scale in float32 (NVIDIA, "Introducing NVFP4", 2025). Activations keep their 16 bits,
also where a checkpoint was made for 4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dovetail.errors import ModelLoadError
from dovetail.nn.format.mxfp4 import MIDDLES
from dovetail.nn.format.packing import share_of
from dovetail.nn.format.stored import (
    StoredWeight,
    TensorShape,
    checked_scales,
    require_whole_groups,
)
from dovetail.nn.format.widened import WidenedFormat, own_inputs, places
from dovetail.nn.kernels.stored_experts import VALUES
from dovetail.nn.parameter import Part, Weight

GROUP = 16  # inputs per scale
LARGEST = 448.0  # of e4m3


@dataclass(frozen=True, slots=True)
class Nvfp4(WidenedFormat):
    """`values`, `whole`: last components of the names of the weights and of the scale of a tensor.
    `divides`: values are divided by the latter, as compressed-tensors stores it. Values are stored
    as in the checkpoint, even inputs in the low half of a byte; the scale of a tensor is a `zeros`
    per output, so that the parts of a layer may differ."""

    values: str
    whole: str
    divides: bool

    def __str__(self) -> str:
        return "nvfp4"

    def allocate(self, weight: Weight, device: torch.device) -> StoredWeight:
        outputs, inputs = weight.shape
        for part in weight.parts.values():
            require_whole_groups(part, GROUP)
        values = torch.zeros((outputs, inputs // 2), dtype=torch.uint8, device=device)
        scales = torch.zeros((outputs, inputs // GROUP), dtype=torch.float8_e4m3fn, device=device)
        return StoredWeight(self, weight, values, scales, torch.ones(outputs, device=device))

    def dequantized(self, weight: StoredWeight) -> torch.Tensor:
        outputs, inputs = weight.layer_shape
        codes = torch.stack((weight.data & 15, weight.data >> 4), -1).view(outputs, -1, GROUP)
        table = torch.tensor((*VALUES, *(-value for value in VALUES)), device=weight.device)
        assert weight.zeros is not None
        scales = weight.scales.float() * weight.zeros[:, None]
        return (table[codes.long()] * scales[:, :, None]).view(outputs, inputs)

    def tensors(self, part: Part) -> Mapping[str, TensorShape]:
        outputs, inputs = part.source_shape
        one = TensorShape(((), (1,)))
        return {
            self.values: share_of(part, (outputs, inputs // 2), (0, 1), (1, 2)),
            "weight_scale": share_of(part, (outputs, inputs // GROUP), (0, 1), (1, GROUP)),
            self.whole: one,
            "input_scale": TensorShape(one.shapes, optional=True),
            "input_global_scale": TensorShape(one.shapes, optional=True),
        }

    def store(self, weight: StoredWeight, part: Part, tensors: Mapping[str, torch.Tensor]) -> None:
        values = tensors[self.values]
        scales = tensors["weight_scale"]
        for name, tensor, dtype in (
            (self.values, values, torch.uint8),
            ("weight_scale", scales, torch.float8_e4m3fn),
        ):
            if tensor.dtype != dtype:
                expected, found = (str(one).removeprefix("torch.") for one in (dtype, tensor.dtype))
                raise ModelLoadError(f"{name}: expected {expected}, found {found}")
        whole = checked_scales(tensors[self.whole], name=self.whole).reshape(())
        whole = 1 / whole if self.divides else whole
        checked_scales(scales.float() * whole, VALUES[-1])
        self._place(weight, part, 0, values, scales, whole)

    def quantize(self, weight: StoredWeight, part: Part, first: int, rows: torch.Tensor) -> None:
        """A scale for each output takes the place of the tensor's."""
        own = own_inputs(part, rows)
        groups = own.reshape(len(own), -1, GROUP)
        most = rows.float().abs().amax(1).clamp(min=1e-30) / (VALUES[-1] * LARGEST)
        scales = groups.abs().amax(2) / VALUES[-1] / most[:, None]
        scales = scales.to(torch.float8_e4m3fn)
        steps = (scales.float() * most[:, None]).masked_fill_(scales.float() == 0, 1.0)
        codes = torch.bucketize(
            groups.abs() / steps[:, :, None], torch.tensor(MIDDLES, device=rows.device)
        )
        codes = (codes + 8 * (groups < 0)).to(torch.uint8).flatten(1)
        self._place(weight, part, first, codes[:, ::2] | (codes[:, 1::2] << 4), scales, most)

    def _place(
        self,
        weight: StoredWeight,
        part: Part,
        first: int,
        values: torch.Tensor,
        scales: torch.Tensor,
        whole: torch.Tensor,
    ) -> None:
        assert weight.zeros is not None
        for rows in places(weight, part, first, len(values)):
            weight.data[rows] = values
            weight.scales[rows] = scales
            weight.zeros[rows] = whole
