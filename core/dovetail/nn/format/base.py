"""Interfaces of weight formats: `WeightFormat` for one linear layer, `Quantization` for a
checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from dovetail.errors import UnsupportedError
from dovetail.nn.activation import Activation, activate, silu_mul
from dovetail.nn.fixed_shapes import shapes_are_fixed
from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.nn.norm import Norm
from dovetail.nn.parameter import Weight
from dovetail.nn.residual import Residual, normed_input

if TYPE_CHECKING:
    from dovetail.nn.kernels.stored_experts import Stored


@dataclass(slots=True)
class ExpertLayers:
    """Layers of a mixture of experts, in some format: for each expert gate and up merged [2 *
    inner, hidden], and down [hidden, inner]."""

    gate_up: Sequence[Any]  # from the format's `allocate_experts`
    down: Sequence[Any]
    gate_up_bias: torch.Tensor | None  # [experts, 2 * inner]
    down_bias: torch.Tensor | None  # [experts, hidden]
    activation: Activation
    for_kernels: Any = None  # the format's arguments for its kernels, created on first use


class WeightFormat(ABC):
    """How the weight of a linear layer is stored and multiplied. Formats are values: layers with
    equal formats can be merged.

    Each format has a plain twin, implemented here: dequantize to float32 and multiply. It runs on
    every device and is the oracle of the format's kernels. `columns` and `add_to` choose among
    these, and fall back to the twin.
    """

    @abstractmethod
    def allocate(self, weight: Weight, device: torch.device) -> nn.Parameter:
        """Return uninitialized memory on `device` for a layer's `weight` [outputs, inputs], which
        is on the meta device and lists its parts. Raises `UnsupportedError`, with the numbers, if
        the format can't store a part of that size."""

    @abstractmethod
    def dequantized(self, weight: Any) -> torch.Tensor:
        """Return the values [outputs, inputs] float32 of a weight that `allocate` returned."""

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
        """Multiply x [tokens, inputs], or a residual stream, normed first if `norm` is given ->
        [tokens, outputs] in x's dtype. `gated`: silu of the first half of the outputs, times the
        second half. `into` [tokens, outputs], not with `gated`: memory for the result."""
        x = normed_input(x, norm)
        y = F.linear(
            x.float(), self.dequantized(weight), None if bias is None else bias.float()
        ).to(x.dtype)
        return kept(silu_mul(y) if gated else y, into)

    def add_to(self, weight: Any, residual: Residual, x: torch.Tensor) -> None:
        """Add x [tokens, inputs] times the weight to the stream."""
        residual.summed().add_(self.columns(weight, x))

    def allocate_experts(
        self, weights: Sequence[Weight], device: torch.device
    ) -> Sequence[nn.Parameter]:
        """`allocate` for the same layer of each expert of a mixture."""
        return [self.allocate(weight, device) for weight in weights]

    def experts(
        self, layers: ExpertLayers, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """-> [parts, tokens, hidden], float32 or like x, whose sum over the parts is the experts'
        output for x [tokens, hidden]: token t has the k experts ids[t], int32, each weighted by
        weights [tokens, k] float32."""
        if use_kernels(x, ids, weights):
            from dovetail.nn.kernels import experts

            gate_up, down = self.stored_experts(layers)
            if gate_up is not None and down is not None:
                with suppress(KernelUnavailable):
                    return experts.experts(
                        x,
                        gate_up,
                        down,
                        layers.gate_up_bias,
                        layers.down_bias,
                        layers.activation,
                        ids,
                        weights,
                    )
        return plain_experts(self, layers, x, ids, weights)

    def add_experts_to(
        self,
        layers: ExpertLayers,
        residual: Residual,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Add `experts` of x [tokens, hidden] to the stream; ids and weights [tokens, k]."""
        residual.add_parts(self.experts(layers, x, ids, weights))

    def stored_experts(self, layers: ExpertLayers) -> tuple[Stored | None, Stored | None]:
        """Return gate and up, and down, as `for_kernels` makes them on first use."""
        if layers.for_kernels is None:
            layers.for_kernels = self.for_kernels(layers.gate_up), self.for_kernels(layers.down)
        made: tuple[Stored | None, Stored | None] = layers.for_kernels
        return made

    def for_kernels(self, weights: Sequence[Any]) -> Stored | None:
        """Return weights of experts, from `allocate_experts`, in the form that `kernels.experts`
        takes; None if it can't, so that the twin computes."""
        return None


def plain_experts(
    form: WeightFormat,
    layers: ExpertLayers,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Twin of all kernels for experts: one expert after the other, on a CPU for the tokens that
    chose it; on other devices, and with `fixed_shapes`, for all tokens."""
    tokens, per_token = ids.shape
    parts = torch.zeros((per_token, tokens, x.shape[1]), dtype=torch.float32, device=x.device)
    of_chosen = x.device.type == "cpu" and not shapes_are_fixed()
    for index, (gate_up, down) in enumerate(zip(layers.gate_up, layers.down, strict=True)):
        chosen = (ids == index).t()  # [k, tokens]
        slots, rows = chosen.nonzero(as_tuple=True) if of_chosen else (None, None)
        if rows is not None and not len(rows):
            continue
        y = F.linear(
            (x if rows is None else x[rows]).float(),
            form.dequantized(gate_up),
            _of(layers.gate_up_bias, index),
        )
        y = activate(y, layers.activation).to(x.dtype).float()
        y = F.linear(y, form.dequantized(down), _of(layers.down_bias, index))
        if slots is None:
            parts = torch.where(chosen[:, :, None], y, parts)
        else:
            parts[slots, rows] = y
    return parts.mul_(weights.t()[:, :, None])


def in_one_piece(
    weights: Sequence[nn.Parameter], beside: Sequence[str] = ()
) -> Sequence[nn.Parameter]:
    """Move newly allocated weights, and the tensors in their attributes `beside`, so that they are
    contiguous: see `stacked`."""
    for weight, values in zip(
        weights, torch.stack([weight.data for weight in weights]), strict=True
    ):
        weight.data = values
    for name in beside:
        if getattr(weights[0], name) is not None:
            for weight, values in zip(
                weights, torch.stack([getattr(weight, name) for weight in weights]), strict=True
            ):
                setattr(weight, name, values)
    return weights


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors that `in_one_piece` made contiguous as one, [number of tensors, ...]: a view,
    or a float32 copy if one has been replaced since."""
    first = tensors[0].detach()
    size = first.numel() * first.element_size()
    if any(
        each.dtype != first.dtype or each.data_ptr() != first.data_ptr() + index * size
        for index, each in enumerate(tensors)
    ):
        return torch.stack([each.detach().float() for each in tensors])
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


def _of(biases: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if biases is None else biases[expert].float()


def kept(result: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    """Copy the result to `into` if given, and return it."""
    return result if into is None else into.copy_(result)


class Quantization(ABC):
    """Parsed `quantization_config` of a checkpoint: maps its linear layers to formats.

    Registered under `QuantizationSpec.name`, the `quant_method` that it reads; see the hook
    `dovetail_quantizations`.
    """

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        """`config`: the checkpoint's `quantization_config`, or None to quantize a plain checkpoint
        while loading. Raises `UnsupportedError` that names each field that isn't implemented, and
        `ModelLoadError` for an invalid value."""
        self.config = config

    @abstractmethod
    def of_module(self, name: str) -> WeightFormat:
        """Return the format of the checkpoint's linear module `name`, such as
        "model.layers.0.mlp.down_proj"; `dovetail.nn.format.DENSE` if it is plain."""

    def __str__(self) -> str:
        """Description for humans: "fp8, blocks of 128 x 128"."""
        return type(self).__name__

    def format_of(self, modules: Sequence[str]) -> WeightFormat:
        """Return the format of a layer that merges these modules. Raises `UnsupportedError` if
        their formats differ."""
        formats = {name: self.of_module(name) for name in modules}
        if len(set(formats.values())) > 1:
            told = ", ".join(f"{name}: {form}" for name, form in formats.items())
            raise UnsupportedError(
                f"quantization_config: merged modules must have the same format ({told})"
            )
        return next(iter(formats.values()))
