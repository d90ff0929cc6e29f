"""The two interfaces of weight formats: `WeightFormat`, of one linear layer, and `Quantization`, of a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dovetail.errors import UnsupportedError
from dovetail.nn.activation import silu_mul
from dovetail.nn.norm import RMSNorm
from dovetail.nn.parameter import Weight
from dovetail.nn.residual import Residual


class WeightFormat(ABC):
    """The way in which the weight of a linear layer is stored and multiplied. Formats are values: layers whose formats are equal can be computed as
    one.

    Each format has a plain twin, which is here: dequantize to float32 and multiply. It serves every device, and is the oracle of the format's
    kernels; these are chosen in `columns` and `add_to`, which call it where there is none.
    """

    @abstractmethod
    def allocate(self, weight: Weight, device: torch.device) -> nn.Parameter:
        """Return the memory on `device`, uninitialised, for a layer's `weight` [outputs, inputs], which is on the meta device and says of what
        parts it consists. Raises `UnsupportedError`, with the numbers, where a part's size isn't one that the format can store."""

    @abstractmethod
    def dequantized(self, weight: Any) -> torch.Tensor:
        """Return the numbers [outputs, inputs] float32 that a weight made by `allocate` stands for."""

    def columns(
        self,
        weight: Any,
        x: torch.Tensor | Residual,
        bias: torch.Tensor | None = None,
        norm: RMSNorm | None = None,
        *,
        gated: bool = False,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [tokens, inputs] or a residual stream, normed first if there is a norm -> [tokens, outputs] in x's dtype. `gated`: silu of the first half
        of the outputs, times the second half. `into` [tokens, outputs], not with `gated`: memory for the result, instead of new."""
        if isinstance(x, Residual):
            x = x.x if norm is None else x.normed(norm)
        elif norm is not None:
            x = norm(x)
        y = F.linear(x.float(), self.dequantized(weight), None if bias is None else bias.float()).to(x.dtype)
        return kept(silu_mul(y) if gated else y, into)

    def add_to(self, weight: Any, residual: Residual, x: torch.Tensor) -> None:
        """The stream gets x [tokens, inputs] times the weight."""
        residual.x.add_(self.columns(weight, x))


def kept(result: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    """The result, in the memory that was asked for."""
    return result if into is None else into.copy_(result)


class Quantization(ABC):
    """The content of a checkpoint's `quantization_config`: which of its linear layers are stored how.

    Named by `QuantizationSpec.name`, the `quant_method` that it reads; see the hook `dovetail_quantizations`.
    """

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        """`config` is the checkpoint's `quantization_config`, or None for a plain checkpoint that is to be quantized while it loads. Raises
        `UnsupportedError` naming each field that isn't implemented, and `ModelLoadError` where a value can't be used."""
        self.config = config

    @abstractmethod
    def of_module(self, name: str) -> WeightFormat:
        """Return the format of the checkpoint's linear module `name`, like "model.layers.0.mlp.down_proj". `dovetail.nn.format.DENSE` if it is
        plain."""

    def __str__(self) -> str:
        """In words, for people: "fp8, blocks of 128 x 128"."""
        return type(self).__name__

    def format_of(self, modules: Sequence[str]) -> WeightFormat:
        """Return the format of a layer that computes these modules as one. Raises `UnsupportedError` if they are stored differently."""
        formats = {name: self.of_module(name) for name in modules}
        if len(set(formats.values())) > 1:
            told = ", ".join(f"{name}: {form}" for name, form in formats.items())
            raise UnsupportedError(f"quantization_config: modules that are computed as one must be stored alike ({told})")
        return next(iter(formats.values()))
