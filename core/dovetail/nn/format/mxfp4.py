"""MXFP4, also `quant_method: mxfp4`: experts of gpt-oss. Weights of 4 bits (e2m1: 0, 0.5, 1, 1.5,
2, 3, 4, 6 and their negatives); 32 inputs of an output share a scale, which is a power of two (e8m0:
2 ** (code - 127)), as in the OCP's Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F

from dovetail.api.file_keys import FileKeys, Used
from dovetail.errors import ModelLoadError, UnsupportedError
from dovetail.nn.format.base import Quantization, WeightFormat, stacked
from dovetail.nn.format.dense import DENSE
from dovetail.nn.format.packing import share_of
from dovetail.nn.format.reading import DEQUANTIZE, WHERE, names
from dovetail.nn.format.stored import (
    StoredWeight,
    TensorShape,
    require_own_groups,
    require_whole_groups,
)
from dovetail.nn.format.widened import WidenedFormat, places
from dovetail.nn.kernels import stored_experts
from dovetail.nn.kernels.stored_experts import BITS, RAISED, VALUES
from dovetail.nn.parameter import Part, Weight

KEYS = FileKeys(
    "mxfp4",
    {
        "quant_method": Used("the format"),
        "modules_to_not_convert": Used("modules that aren't quantized"),
        "dequantize": DEQUANTIZE,
    },
)
GROUP = 32  # inputs per scale
BLOCK = 128  # number of inputs that are packed together: four of a number, GROUP apart
MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
LARGEST_SCALE = 255 - 1 - RAISED  # its code
LARGEST_IN_FLOAT16 = 127 + 13  # code of a scale by which 6 can be multiplied


@dataclass(frozen=True, slots=True)
class Mxfp4Format(WidenedFormat):
    """Weights int16 [outputs, inputs / 4]: number e of a block has the codes of its inputs e, e +
    32, e + 64 and e + 96, at `BITS`. Scales int32 [blocks, outputs]: the codes of a block's groups,
    raised by `RAISED`, the first in the lowest bits."""

    def __str__(self) -> str:
        return "mxfp4"

    def allocate(self, weight: Weight, device: torch.device) -> StoredWeight:
        outputs, inputs = weight.shape
        for part in weight.parts.values():
            require_whole_groups(part, GROUP)
            require_own_groups(part, GROUP, "scale")
        values = torch.zeros(
            (outputs, -(-inputs // BLOCK) * BLOCK // 4), dtype=torch.int16, device=device
        )
        return StoredWeight(
            self,
            weight,
            values,
            torch.zeros((-(-inputs // BLOCK), outputs), dtype=torch.int32, device=device),
        )

    def dequantized(self, weight: StoredWeight) -> torch.Tensor:
        blocks = weight.data.view(len(weight), -1, 1, GROUP)
        bits = torch.tensor(BITS, dtype=torch.int16, device=weight.device)[:, :, None]
        codes = torch.stack([(blocks >> bits[:, bit] & 1).int() << bit for bit in range(4)]).sum(0)
        codes = codes.flatten(1)[:, : weight.layer_shape[1]]
        values = torch.tensor((*VALUES, *(-value for value in VALUES)), device=weight.device)[codes]
        scales = (
            weight.scales.t()
            .clone(memory_format=torch.contiguous_format)
            .view(torch.uint8)[:, : weight.layer_shape[1] // GROUP]
        )
        return torch.ldexp(values, (scales.int() - (127 + RAISED)).repeat_interleave(GROUP, 1))

    def tensors(self, part: Part) -> Mapping[str, TensorShape]:
        outputs, inputs = part.source_shape
        before = () if part.expert is None else (part.expert[1],)
        first, size = (
            (part.start, part.size) if part.dim == 0 else (part.start // GROUP, part.size // GROUP)
        )
        groups = (*before, outputs, inputs // GROUP)
        return {
            name: TensorShape(
                (shape,), part.dim, first, size, stride=part.stride, expert=part.expert
            )
            for name, shape in (("blocks", (*groups, GROUP // 2)), ("scales", groups))
        }

    def store(self, weight: StoredWeight, part: Part, tensors: Mapping[str, torch.Tensor]) -> None:
        blocks = tensors["blocks"]
        scales = tensors["scales"]
        self._check(weight, tensors)
        self._place(weight, part, 0, torch.stack((blocks & 15, blocks >> 4), -1).flatten(1), scales)

    def _check(self, weight: StoredWeight, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.dtype != torch.uint8:
                raise ModelLoadError(
                    f"{name}: expected uint8, found {str(tensor.dtype).removeprefix('torch.')}"
                )
        scales = next(tensor for name, tensor in tensors.items() if "scale" in name)
        if bool((scales == 255).any()):
            raise ModelLoadError("scales must be numbers, but one is 255 (NaN)")
        if bool((scales > LARGEST_SCALE).any()):
            raise ModelLoadError(f"a scale exceeds 2 ** {LARGEST_SCALE - 127}")
        if weight.compute_dtype == torch.float16 and bool((scales > LARGEST_IN_FLOAT16).any()):
            raise ModelLoadError("a scale exceeds the range of float16: use bfloat16")

    def quantize(self, weight: StoredWeight, part: Part, first: int, rows: torch.Tensor) -> None:
        own = (
            rows[:, part.start : part.start + part.size].float() if part.dim == 1 else rows.float()
        )
        groups = own.reshape(len(own), -1, GROUP)
        # 6 is the largest: 2 ** 2 * 1.5
        scales = (groups.abs().amax(2).clamp(min=2.0**-120).log2().floor() - 2).clamp(
            -127, LARGEST_SCALE - 127
        )
        codes = torch.bucketize(
            torch.ldexp(groups.abs(), -scales[:, :, None].int()),
            torch.tensor(MIDDLES, device=rows.device),
        )
        codes += 8 * (groups < 0)
        self._place(
            weight, part, first, codes.to(torch.uint8).flatten(1), (scales + 127).to(torch.uint8)
        )

    def _place(
        self,
        weight: StoredWeight,
        part: Part,
        first: int,
        codes: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:
        blocks = F.pad(codes, (0, -codes.shape[1] % BLOCK)).view(len(codes), -1, 4, GROUP)
        bits = torch.tensor(BITS, dtype=torch.int16, device=codes.device)[:, :, None]
        spread = [(blocks >> bit & 1).to(torch.int16) << bits[:, bit] for bit in range(4)]
        values = torch.stack(spread).sum((0, 3), dtype=torch.int16).flatten(1)
        raised = F.pad(scales + RAISED, (0, -scales.shape[1] % (BLOCK // GROUP)))
        for rows in places(weight, part, first, len(codes)):
            weight.data[rows] = values
            weight.scales[:, rows] = raised.view(torch.int32).t()

    def for_kernels(self, weights: Sequence[StoredWeight]) -> stored_experts.Stored | None:
        scales = stacked([weight.scales for weight in weights])
        return stored_experts.Stored(
            stacked(weights), weights[0].layer_shape[1], scales, None, GROUP, stored_experts.FP4
        )


@dataclass(frozen=True, slots=True)
class PackedMxfp4(Mxfp4Format):
    """`mxfp4-pack-quantized` of compressed-tensors: two dimensions, for one layer. `packed`: last
    component of the name of the weights."""

    packed: str = "weight_packed"

    def tensors(self, part: Part) -> Mapping[str, TensorShape]:
        outputs, inputs = part.source_shape
        return {
            self.packed: share_of(part, (outputs, inputs // 2), (0, 1), (1, 2)),
            "weight_scale": share_of(part, (outputs, inputs // GROUP), (0, 1), (1, GROUP)),
        }

    def store(self, weight: StoredWeight, part: Part, tensors: Mapping[str, torch.Tensor]) -> None:
        self._check(weight, tensors)
        packed = tensors[self.packed]
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
        self._place(weight, part, 0, codes, tensors["weight_scale"])


class Mxfp4(Quantization):
    """Quantizes experts, except those that the config excludes, and no other layers."""

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        super().__init__(config)
        if config is None:
            raise UnsupportedError(
                "mxfp4: plain checkpoints can't be quantized to it while loading"
            )
        KEYS.check(config, WHERE)
        self._left_out = names(config, "modules_to_not_convert")

    def of_module(self, name: str) -> WeightFormat:
        left_out = any(fnmatchcase(f".{name}.", f"*.{pattern}.*") for pattern in self._left_out)
        return Mxfp4Format() if name.endswith(".experts") and not left_out else DENSE

    def __str__(self) -> str:
        return "mxfp4"
