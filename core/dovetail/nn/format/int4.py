"""4-bit weights: integers from 0 to 15, minus a zero point, times a scale; a group of consecutive
inputs of an output shares these two.

Checkpoints pack such weights in several ways. Here there is one layout, described at
`kernels.streamed.Stored`; weights are repacked while loading. Activations keep their 16 bits
(W4A16). For few rows, weights are widened while they are multiplied; for many, before, since the
product then takes longer than the widening.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from dovetail.errors import UnsupportedError
from dovetail.nn.activation import silu_mul
from dovetail.nn.format.base import kept, stacked
from dovetail.nn.format.stored import StoredFormat, StoredWeight, checked_scales, require_own_groups
from dovetail.nn.kernels import stored_experts
from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.nn.norm import Norm
from dovetail.nn.parameter import Part, Weight
from dovetail.nn.residual import Residual, with_fusable_norm

if TYPE_CHECKING:
    from dovetail.nn.kernels.streamed import Stored

LARGEST = 15
MIDDLE = 8  # zero point of symmetric weights
BLOCK = 128  # number of inputs that are packed together
WIDENED_FROM = 129  # rows from which weights are widened before the product
GROUPS = "32, 64 or a multiple of 128"


class Unpacked(NamedTuple):
    """This rank's unpacked weights of a checkpoint: `values` [outputs, inputs] uint8, `scales`
    [outputs, groups] of a floating dtype and `zeros` [outputs, groups] uint8, or None for 8
    everywhere."""

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Int4(StoredFormat):
    """`group`: inputs per scale; None: all of them. Each subclass reads one packing."""

    group: int | None
    symmetric: bool

    @abstractmethod
    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> Unpacked:
        """Unpack this rank's shares of a part's tensors. Raises `ModelLoadError` if they are
        invalid."""

    def __str__(self) -> str:
        return f"int4 ({'one scale per output' if self.group is None else f'groups of {self.group}'}, {'' if self.symmetric else 'a'}symmetric)"

    def allocate(self, weight: Weight, device: torch.device) -> StoredWeight:
        outputs, inputs = weight.shape
        for part in weight.parts.values():
            self.check_part(part)
        groups = self._groups(inputs)
        values = torch.zeros(
            (outputs, -(-inputs // BLOCK) * BLOCK // 2), dtype=torch.uint8, device=device
        )
        scales = torch.ones((groups, outputs), dtype=torch.float16, device=device)
        zeros = (
            None
            if self.symmetric
            else torch.full((groups, outputs), MIDDLE, dtype=torch.uint8, device=device)
        )
        return StoredWeight(self, weight, values, scales, zeros)

    def check_part(self, part: Part) -> None:
        """Raise `UnsupportedError` if a part can't be stored: unsupported group size, or groups
        split between ranks."""
        inputs = part.source_shape[1]
        if self.group is None:
            if part.dim == 1 and part.size < inputs:
                return  # every rank has the scales of whole outputs
        elif (
            self.group % 32
            or self.group == 96
            or (self.group > 64 and self.group % BLOCK)
            or inputs % self.group
        ):
            raise UnsupportedError(
                f"groups of {self.group} inputs, of {inputs}, are not implemented (only {GROUPS}, "
                f"dividing the inputs)"
            )
        else:
            require_own_groups(part, self.group)

    def dequantized(self, weight: StoredWeight) -> torch.Tensor:
        inputs = weight.layer_shape[1]
        blocks = weight.data.view(len(weight), -1, BLOCK // 2)
        values = torch.cat((blocks & LARGEST, blocks >> 4), 2).flatten(1)[:, :inputs].float()
        spread = inputs if self.group is None else self.group
        zeros = (
            MIDDLE
            if weight.zeros is None
            else weight.zeros.float().t().repeat_interleave(spread, 1)
        )
        return (values - zeros) * weight.scales.float().t().repeat_interleave(spread, 1)

    # Loading

    def store(self, weight: StoredWeight, part: Part, tensors: Mapping[str, torch.Tensor]) -> None:
        self.place(weight, part, 0, self.unpack(tensors))

    def place(self, weight: StoredWeight, part: Part, first: int, unpacked: Unpacked) -> None:
        """Pack rows of a part into place, starting at its row `first`."""
        values, scales, zeros = unpacked
        scales = checked_scales(scales, LARGEST)
        at = (part.at if part.dim == 0 else 0) + first
        rows = slice(at, at + len(values))
        blocks = F.pad(values, (0, -values.shape[1] % BLOCK)).view(len(values), -1, 2, BLOCK // 2)
        weight.data[rows] = (blocks[:, :, 0] | (blocks[:, :, 1] << 4)).flatten(1)
        if not torch.equal(scales.to(weight.scales.dtype).float(), scales.float()):
            weight.scales = weight.scales.float()  # exact
        weight.scales[:, rows] = scales.t()
        if weight.zeros is not None and zeros is not None:
            weight.zeros[:, rows] = zeros.t()

    def quantize(self, weight: StoredWeight, part: Part, first: int, rows: torch.Tensor) -> None:
        own = (
            rows[:, part.start : part.start + part.size].float() if part.dim == 1 else rows.float()
        )
        groups = own.reshape(len(own), self._groups(own.shape[1]), -1)
        if self.symmetric:
            scales = groups.abs().amax(2) / (LARGEST - MIDDLE)
            zeros = None
        else:
            least = groups.amin(2).clamp(max=0)
            most = groups.amax(2).clamp(min=0)
            scales = (most - least) / LARGEST
        scales = scales.half()
        scales.masked_fill_(scales == 0, 1.0)
        if not self.symmetric:
            zeros = (-least / scales.float()).round().clamp(0, LARGEST).to(torch.uint8)
        shift = MIDDLE if zeros is None else zeros[:, :, None].float()
        values = (
            (groups / scales[:, :, None].float() + shift).round().clamp(0, LARGEST).to(torch.uint8)
        )
        self.place(weight, part, first, Unpacked(values.flatten(1), scales, zeros))

    def _groups(self, inputs: int) -> int:
        return 1 if self.group is None else inputs // self.group

    # Computing

    def for_kernels(self, weights: Sequence[StoredWeight]) -> stored_experts.Stored | None:
        first = weights[0]
        inputs = first.layer_shape[1]
        group = self.group or -(-inputs // BLOCK) * BLOCK
        if not stored_experts.takes(stored_experts.INT4, inputs, group):
            return None
        zeros = (
            None
            if self.symmetric
            else stacked([weight.zeros for weight in weights if weight.zeros is not None])
        )
        scales = stacked([weight.scales for weight in weights])
        return stored_experts.Stored(
            stacked(weights), inputs, scales, zeros, group, stored_experts.INT4
        )

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
        stream, norm = with_fusable_norm(x, norm)
        if weight.compute_dtype not in (torch.bfloat16, torch.float16) or not use_kernels(
            weight.data
        ):
            return StoredFormat.columns(self, weight, stream, bias, norm, gated=gated, into=into)
        from dovetail.nn.kernels import one_row_int4, streamed, widened

        if len(stream) == 1:
            with suppress(KernelUnavailable):
                around = None if norm is None else (norm.weight, norm.eps)
                return one_row_int4.linear(
                    stream.summed(), self._stored(weight), bias, norm=around, gated=gated, into=into
                )
        x = stream.read(norm)
        with suppress(KernelUnavailable):
            if len(x) < WIDENED_FROM:
                return kept(streamed.linear(x, self._stored(weight), bias, gated=gated), into)
            y = F.linear(x, widened.widened(self._stored(weight), x.dtype), bias)
            return kept(silu_mul(y) if gated else y, into)
        return StoredFormat.columns(self, weight, x, bias, gated=gated, into=into)

    def add_to(self, weight: StoredWeight, residual: Residual, x: torch.Tensor) -> None:
        if (
            len(x) < WIDENED_FROM
            and weight.compute_dtype in (torch.bfloat16, torch.float16)
            and use_kernels(weight.data)
        ):
            from dovetail.nn.kernels import one_row_int4, streamed

            with suppress(KernelUnavailable):
                if len(x) == 1:
                    one_row_int4.linear(x, self._stored(weight), out=residual.summed())
                    return
                residual.add_parts(streamed.linear(x, self._stored(weight), in_parts=True))
                return
        residual.summed().add_(self.columns(weight, x))

    def _stored(self, weight: StoredWeight) -> Stored:
        from dovetail.nn.kernels import streamed

        inputs = weight.layer_shape[1]
        padded = -(-inputs // BLOCK) * BLOCK
        return streamed.Stored(
            weight.data, weight.scales, weight.zeros, inputs, self.group or padded
        )
