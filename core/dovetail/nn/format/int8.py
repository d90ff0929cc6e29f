"""8-bit integers: minus a zero point, times a scale, per output or per group of consecutive inputs
of an output. Activations keep their 16 bits, also where a checkpoint was made for 8 (W8A8), which
is more exact."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from dovetail.errors import ModelLoadError, UnsupportedError
from dovetail.nn.format.base import kept
from dovetail.nn.format.float8 import WIDENED_FROM
from dovetail.nn.format.stored import StoredWeight, checked_scales, require_own_groups
from dovetail.nn.format.widened import WidenedFormat, own_inputs, places
from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.nn.norm import Norm
from dovetail.nn.parameter import Part, Weight
from dovetail.nn.residual import Residual, normed_input

if TYPE_CHECKING:
    from dovetail.nn.kernels.streamed import Stored

LARGEST = 127
STREAMED_GROUPS = (32, 64)  # inputs per scale, besides multiples of 128, that the kernel takes
MIDDLE = 128  # zero point of symmetric weights that are stored without a sign


class Unpacked(NamedTuple):
    """This rank's weights of a checkpoint: `values` [outputs, inputs] int8; `scales` and `zeros`
    [outputs, groups], or one of each for all outputs. `zeros` None: 0."""

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Int8(WidenedFormat):
    """`group`: inputs per scale; None: all of them. Each subclass reads one packing."""

    group: int | None = None
    symmetric: bool = True

    @abstractmethod
    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> Unpacked:
        """Unpack this rank's shares of a part's tensors. Raises `ModelLoadError` if they are
        invalid."""

    def __str__(self) -> str:
        kind = "a scale per output" if self.group is None else f"groups of {self.group}"
        return f"int8 ({kind}{'' if self.symmetric else ', asymmetric'})"

    def allocate(self, weight: Weight, device: torch.device) -> StoredWeight:
        outputs, inputs = weight.shape
        for part in weight.parts.values():
            self._check_part(part)
        values = torch.zeros((outputs, inputs), dtype=torch.int8, device=device)
        groups = (outputs, self._groups(inputs))
        zeros = None if self.symmetric else torch.zeros(groups, dtype=torch.int16, device=device)
        return StoredWeight(self, weight, values, torch.ones(groups, device=device), zeros)

    def _check_part(self, part: Part) -> None:
        inputs = part.source_shape[1]
        if self.group is None:
            return
        if inputs % self.group:
            raise UnsupportedError(f"groups of {self.group} inputs don't divide {inputs}")
        require_own_groups(part, self.group)

    def dequantized(self, weight: StoredWeight) -> torch.Tensor:
        outputs, inputs = weight.layer_shape
        grouped = weight.data.float().view(outputs, weight.scales.shape[1], -1)
        if weight.zeros is not None:
            grouped -= weight.zeros.float()[:, :, None]
        return (grouped * weight.scales[:, :, None]).view(outputs, inputs)

    def store(self, weight: StoredWeight, part: Part, tensors: Mapping[str, torch.Tensor]) -> None:
        self._place(weight, part, 0, self.unpack(tensors))

    def quantize(self, weight: StoredWeight, part: Part, first: int, rows: torch.Tensor) -> None:
        own = own_inputs(part, rows)
        groups = own.reshape(len(own), self._groups(own.shape[1]), -1)
        scales = groups.abs().amax(2) / LARGEST
        scales.masked_fill_(scales == 0, 1.0)
        values = (groups / scales[:, :, None]).round().to(torch.int8).flatten(1)
        self._place(weight, part, first, Unpacked(values, scales))

    def _place(self, weight: StoredWeight, part: Part, first: int, unpacked: Unpacked) -> None:
        values, scales, zeros = unpacked
        scales = checked_scales(scales, 2 * MIDDLE)
        if zeros is not None:
            _check_zeros(zeros)
        for rows in places(weight, part, first, len(values)):
            weight.data[rows] = values
            weight.scales[rows] = scales
            if weight.zeros is not None:
                weight.zeros[rows] = 0 if zeros is None else zeros.to(torch.int16)

    # Computing

    def columns(
        self,
        weight: StoredWeight,
        x: torch.Tensor | Residual,
        bias: torch.Tensor | None = None,
        norm: Norm | None = None,
        *,
        gated: bool = False,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = normed_input(x, norm).contiguous()
        if self._streams(weight, len(x)):
            from dovetail.nn.kernels import streamed

            with suppress(KernelUnavailable):
                return kept(streamed.linear(x, self._stored(weight), bias, gated=gated), into)
        return WidenedFormat.columns(self, weight, x, bias, gated=gated, into=into)

    def add_to(self, weight: StoredWeight, residual: Residual, x: torch.Tensor) -> None:
        if self._streams(weight, len(x)):
            from dovetail.nn.kernels import streamed

            with suppress(KernelUnavailable):
                parts = streamed.linear(x.contiguous(), self._stored(weight), in_parts=True)
                residual.add_parts(parts)
                return
        WidenedFormat.add_to(self, weight, residual, x)

    def _streams(self, weight: StoredWeight, rows: int) -> bool:
        """True if a kernel widens the weights while it multiplies, which is exact."""
        return (
            self.symmetric
            and rows < WIDENED_FROM
            and (self.group is None or self.group in STREAMED_GROUPS or self.group % 128 == 0)
            and weight.compute_dtype in (torch.bfloat16, torch.float16)
            and use_kernels(weight.data)
        )

    def _stored(self, weight: StoredWeight) -> Stored:
        from dovetail.nn.kernels.streamed import Stored

        scales = weight.scales if self.group is not None else weight.scales[:, 0]
        return Stored(weight.data, scales, None, weight.layer_shape[1], self.group or 0)

    def _groups(self, inputs: int) -> int:
        return 1 if self.group is None else inputs // self.group


def _check_zeros(zeros: torch.Tensor) -> None:
    """Raise `ModelLoadError` for zero points that aren't numbers of 8 bits. Those that are stored
    minus 1 may be `MIDDLE`."""
    if zeros.is_floating_point() or zeros.is_complex() or zeros.dtype == torch.bool:
        raise ModelLoadError(
            f"zero points: expected integers, found {str(zeros.dtype).removeprefix('torch.')}"
        )
    if bool((zeros.long().abs() > MIDDLE).any()):
        raise ModelLoadError("zero points must be numbers of 8 bits")


def signed(values: torch.Tensor) -> torch.Tensor:
    """Return bytes minus `MIDDLE`, int8."""
    return (values ^ MIDDLE).contiguous().view(torch.int8)
