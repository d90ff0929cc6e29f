"""`Dequantized`: formats without kernels of their own whose weights are dequantized while they load.
They take the memory of plain weights, and are multiplied by the kernels of those."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dovetail.errors import ModelLoadError
from dovetail.nn.format.base import ExpertLayers
from dovetail.nn.format.dense import DENSE
from dovetail.nn.format.stored import StoredFormat, StoredWeight, TensorShape, checked_scales
from dovetail.nn.format.widened import own_inputs, places
from dovetail.nn.kernels import stored_experts
from dovetail.nn.norm import Norm
from dovetail.nn.parameter import Part, Weight
from dovetail.nn.residual import Residual


class Dequantized(StoredFormat):
    """A format of which each rank reads a part's whole tensors, and keeps its share of the values,
    in the model's dtype."""

    @abstractmethod
    def whole(self, outputs: int, inputs: int) -> Mapping[str, TensorShape]:
        """Return the checkpoint's tensors of a part [outputs, inputs], as `tensors` does. Raises
        `UnsupportedError`, with the numbers, if the format can't store this size."""

    @abstractmethod
    def values(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the values [outputs, inputs] float32 of a part. Raises `ModelLoadError` for
        tensors that mean none."""

    def allocate(self, weight: Weight, device: torch.device) -> StoredWeight:
        for part in weight.parts.values():
            self.whole(*part.source_shape)
        values = torch.zeros(tuple(weight.shape), dtype=weight.dtype, device=device)
        return StoredWeight(self, weight, values, torch.empty(0, device=device))

    def dequantized(self, weight: Any) -> torch.Tensor:
        return DENSE.dequantized(weight)

    def tensors(self, part: Part) -> Mapping[str, TensorShape]:
        return self.whole(*part.source_shape)

    def store(self, weight: StoredWeight, part: Part, tensors: Mapping[str, torch.Tensor]) -> None:
        values = checked_scales(self.values(tensors), name="weights")
        if values.shape != part.source_shape:
            raise ModelLoadError(
                f"expected weights of {list(part.source_shape)}, found {list(values.shape)}"
            )
        rows = values
        if part.dim == 0:
            rows = values[part.start : part.start + (part.size - 1) * part.stride + 1 : part.stride]
        self.quantize(weight, part, 0, rows)

    def quantize(self, weight: StoredWeight, part: Part, first: int, rows: torch.Tensor) -> None:
        own = own_inputs(part, rows)
        for at in places(weight, part, first, len(own)):
            weight.data[at] = own

    # Computing, as of plain weights

    def columns(
        self,
        weight: Any,
        x: torch.Tensor | Residual,
        bias: torch.Tensor | None = None,
        norm: Norm | None = None,
        *,
        gated: bool = False,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if isinstance(x, torch.Tensor) and x.dtype != weight.dtype:
            return StoredFormat.columns(self, weight, x, bias, norm, gated=gated, into=into)
        return DENSE.columns(weight, x, bias, norm, gated=gated, into=into)

    def add_to(self, weight: Any, residual: Residual, x: torch.Tensor) -> None:
        if x.dtype != weight.dtype:
            StoredFormat.add_to(self, weight, residual, x)
        else:
            DENSE.add_to(weight, residual, x)

    def experts(
        self, layers: ExpertLayers, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return DENSE.experts(layers, x, ids, weights)

    def for_kernels(self, weights: Sequence[Any]) -> stored_experts.Stored | None:
        return DENSE.for_kernels(weights)
