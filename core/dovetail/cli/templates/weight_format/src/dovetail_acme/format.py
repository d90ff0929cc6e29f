"""Weights in 8-bit integers, with a scale for each output.

A plain checkpoint is quantized while it loads, with `quantization: acme` in engine.yaml.
A checkpoint with `quant_method: acme` has two tensors for each layer:
`weight` [outputs, inputs] int8, and `weight_scale` [outputs].
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from dovetail.errors import ModelLoadError, UnsupportedError
from dovetail.nn.format import DENSE, Quantization, StoredFormat, StoredWeight, TensorShape, WeightFormat
from dovetail.nn.parameter import Part, Weight

LARGEST = 127


@dataclass(frozen=True, slots=True)
class AcmeFormat(StoredFormat):
    """Layers whose formats are equal can be merged. `is_stored`: the checkpoint has quantized weights."""

    is_stored: bool

    def allocate(self, weight: Weight, device: torch.device) -> StoredWeight:
        outputs, inputs = weight.shape
        values = torch.empty((outputs, inputs), dtype=torch.int8, device=device)
        return StoredWeight(self, weight, values, torch.ones(outputs, device=device))

    def dequantized(self, weight: Any) -> torch.Tensor:
        values: torch.Tensor = weight.data.float() * weight.scales[:, None]
        return values

    def tensors(self, part: Part) -> Mapping[str, TensorShape]:
        """This rank's share of a part: some of its outputs (dim 0), or some inputs of all outputs (dim 1)."""
        if not self.is_stored:
            return {}
        outputs, inputs = part.source_shape
        values = TensorShape(((outputs, inputs),), part.dim, part.start, part.size, stride=part.stride)
        of_outputs = replace(values, shapes=((outputs,),))
        return {"weight": values, "weight_scale": of_outputs if part.dim == 0 else TensorShape(((outputs,),))}

    def store(self, weight: StoredWeight, part: Part, tensors: Mapping[str, torch.Tensor]) -> None:
        values = tensors["weight"]
        if values.dtype != torch.int8:
            raise ModelLoadError(f"weight: expected int8, found {values.dtype}")
        self._put(weight, part, 0, values, tensors["weight_scale"].float())

    def quantize(self, weight: StoredWeight, part: Part, first: int, rows: torch.Tensor) -> None:
        """Quantize whole rows of the checkpoint, so that scales don't depend on the number of ranks."""
        scales = rows.float().abs().amax(1).clamp(min=1e-12) / LARGEST
        values = (rows.float() / scales[:, None]).round().to(torch.int8)
        if part.dim == 1:
            values = values[:, part.start : part.start + part.size]
        self._put(weight, part, first, values, scales)

    def _put(self, weight: StoredWeight, part: Part, first: int, values: torch.Tensor, scales: torch.Tensor) -> None:
        """Write values [rows, inputs] and scales [rows] from row `first` of a part on, into each of its copies."""
        for copy in range(part.copies):
            at = part.at + copy * part.size
            if part.dim == 0:
                weight.data[at + first : at + first + len(values)] = values
                weight.scales[at + first : at + first + len(values)] = scales
            else:
                weight.data[first : first + len(values), at : at + part.size] = values
                weight.scales[first : first + len(values)] = scales


class AcmeQuantization(Quantization):
    """All linear layers but the head."""

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        super().__init__(config)
        for name in config or {}:
            if name not in ("quant_method", "modules_to_not_convert"):
                raise UnsupportedError(f"quantization_config: {name} isn't known to acme")
        self.left_out = tuple((config or {}).get("modules_to_not_convert") or ())

    def of_module(self, name: str) -> WeightFormat:
        if name == "lm_head" or any(part in name for part in self.left_out):
            return DENSE
        return AcmeFormat(is_stored=self.config is not None)

    def __str__(self) -> str:
        return "acme (int8, a scale per output)"
