"""8-bit integers as compressed-tensors stores them: W8A8 and W8A16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dovetail.errors import ModelLoadError
from dovetail.nn.format.int8 import MIDDLE, Int8, Unpacked, signed
from dovetail.nn.format.packing import BYTES, bytes_of, share_of
from dovetail.nn.format.stored import TensorShape
from dovetail.nn.parameter import Part


@dataclass(frozen=True, slots=True)
class PlainInt8(Int8):
    """`int-quantized`: values as they are. `static`: the checkpoint has a scale
    for inputs, which isn't used."""

    static: bool = False

    def tensors(self, part: Part) -> Mapping[str, TensorShape]:
        outputs, inputs = part.source_shape
        scales = _of_groups(part, self.group)
        tensors = {
            "weight": share_of(part, (outputs, inputs), (0, 1), (1, 1)),
            "weight_scale": scales,
        }
        if not self.symmetric:
            tensors["weight_zero_point"] = scales
        if self.static:
            whole = TensorShape(((), (1,)), optional=True)
            tensors |= {"input_scale": whole, "input_zero_point": whole}
        return tensors

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> Unpacked:
        values = tensors["weight"]
        if values.dtype != torch.int8:
            raise ModelLoadError(f"expected int8, found {str(values.dtype).removeprefix('torch.')}")
        zeros = tensors.get("weight_zero_point")
        if zeros is not None:
            zeros = _two_dims(zeros)
        return Unpacked(values, _two_dims(tensors["weight_scale"]), zeros)


@dataclass(frozen=True, slots=True)
class PackedInt8(Int8):
    """`pack-quantized` of 8 bits: weights packed along the inputs, zero points along the
    outputs. Both are stored with an offset of 128."""

    def tensors(self, part: Part) -> Mapping[str, TensorShape]:
        outputs, inputs = part.source_shape
        groups = self._groups(inputs)
        per_scale = self.group or inputs
        tensors = {
            "weight_packed": share_of(part, (outputs, -(-inputs // BYTES)), (0, 1), (1, BYTES)),
            "weight_scale": share_of(part, (outputs, groups), (0, 1), (1, per_scale)),
            "weight_shape": TensorShape(((2,),), optional=True),
        }
        if not self.symmetric:
            shape = (-(-outputs // BYTES), groups)
            tensors["weight_zero_point"] = share_of(part, shape, (0, 1), (BYTES, per_scale))
        return tensors

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> Unpacked:
        zeros = None
        if not self.symmetric:
            zeros = bytes_of(tensors["weight_zero_point"], 0).to(torch.int16) - MIDDLE
        return Unpacked(
            signed(bytes_of(tensors["weight_packed"], 1)), tensors["weight_scale"], zeros
        )


def _two_dims(scales: torch.Tensor) -> torch.Tensor:
    """Return scales [outputs, groups]."""
    return scales if scales.ndim == 2 else scales.reshape(-1, 1)


def _of_groups(part: Part, group: int | None) -> TensorShape:
    """Return the shape of a tensor with a number for each output, or each group, or for all."""
    outputs, inputs = part.source_shape
    if group is not None:
        return share_of(part, (outputs, inputs // group), (0, 1), (1, group))
    dim, start, size = (0, part.start, part.size) if part.dim == 0 else (None, 0, 0)
    return TensorShape(((outputs, 1), (outputs,)), dim, start, size, stride=part.stride)
