"""Weights of linear layers that are made of several tensors of a checkpoint for each part: numbers of few bits, their scales, their zero points.

`runtime.weights` loads them through `StoredWeight.tensors`, which slice for this rank. When all tensors of a part are there, the format stores it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dovetail.errors import ModelLoadError
from dovetail.nn.format.base import WeightFormat
from dovetail.nn.parameter import Part, Transform, Weight

QUANTIZED_AT_ONCE = 1 << 20  # numbers, or an eighth of the tensor if that is more: what it takes on the way stays below the tensor itself


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A tensor that a checkpoint has for each part of a layer's weight, and this rank's share of it: `size` indices from `start` on along `dim`, or
    the whole if that is None."""

    shapes: tuple[tuple[int, ...], ...]  # those that it may have, whole
    dim: int | None = None
    start: int = 0
    size: int = 0
    optional: bool = False

    def read(self, source: Any) -> torch.Tensor:
        """This rank's share of `source`, a safetensors slice or a tensor. Raises `ModelLoadError` for another shape."""
        shape = tuple(source.shape if isinstance(source, torch.Tensor) else source.get_shape())
        if shape not in self.shapes:
            raise ModelLoadError(f"expected shape {' or '.join(str(list(shape)) for shape in self.shapes)}, found {list(shape)}")
        if self.dim is None:
            return source if isinstance(source, torch.Tensor) else source[...]
        values: torch.Tensor = source[(slice(None),) * self.dim + (slice(self.start, self.start + self.size),)]
        return values


class StoredFormat(WeightFormat):
    """A format whose weights are `StoredWeight`s."""

    @abstractmethod
    def tensors(self, part: Part) -> Mapping[str, TensorShape]:
        """Return what a checkpoint has for a part, by the last word of the tensor's name: "weight", "weight_scale". Empty if it has plain weights,
        which are quantized as they are loaded."""

    @abstractmethod
    def store(self, weight: StoredWeight, part: Part, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put this rank's shares of a part's tensors to their place. Raises `ModelLoadError` where they hold what can't be used."""

    @abstractmethod
    def quantize(self, weight: StoredWeight, part: Part, first: int, rows: torch.Tensor) -> None:
        """Round plain numbers to the format: `rows` are rows of the checkpoint's tensor, whole, which are this rank's from its row `first` of the
        part on. Any number of rows comes at once, but for the last a multiple of `rows_at_once`."""

    @property
    def rows_at_once(self) -> int:
        """Rows that `quantize` can't do apart."""
        return 1


class StoredWeight(nn.Parameter):
    """The weight of a linear layer [outputs, inputs], made of `parts` like a `Weight`, as `format` stores it.

    The parameter's own data are the numbers; what else belongs to it are attributes: `scales`, `zeros`.
    """

    format: StoredFormat
    parts: Mapping[str | None, Part]
    layer_shape: tuple[int, int]  # [outputs, inputs], of this rank
    compute_dtype: torch.dtype  # of the model's activations
    scale = False  # it multiplies nothing, as a norm's weight does
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def __new__(
        cls, form: StoredFormat, plain: Weight, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None
    ) -> StoredWeight:
        """Return a parameter of the same parts as `plain`. The other arguments are uninitialised memory, laid out as the format likes."""
        weight: StoredWeight = super().__new__(cls, values, requires_grad=False)
        weight.format, weight.parts, weight.layer_shape, weight.compute_dtype = form, plain.parts, (plain.shape[0], plain.shape[1]), plain.dtype
        weight.scales, weight.zeros = scales, zeros
        weight._pieces = {}
        weight._waiting = {}
        return weight

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    _pieces: dict[str, CheckpointTensor]
    _waiting: dict[str | None, dict[str, torch.Tensor]]

    @property
    def numbers(self) -> int:
        """Weights, however many of them a byte holds."""
        return self.layer_shape[0] * self.layer_shape[1]

    def tensors(self, shard_id: str | None) -> Iterator[tuple[str, CheckpointTensor]]:
        """Yield (last word of its name, where it goes) for each tensor that a checkpoint has for this part."""
        for name, shape in self.format.tensors(self.parts[shard_id]).items():
            yield name, self._pieces.setdefault(name, CheckpointTensor(self, name, shape.optional))

    def load(self, source: Any, shard_id: str | None = None, transform: Transform | None = None) -> None:
        """Quantize `source`, a tensor of plain numbers (or its safetensors slice), on the way: some rows at a time, on the parameter's device. Raises
        `ModelLoadError` when its shape or dtype is wrong."""
        part = self.parts[shard_id]
        rows, inputs = part.source_shape
        first, count = (part.start, part.size) if part.dim == 0 else (0, rows)
        at_once = max(QUANTIZED_AT_ONCE, rows * inputs // 8) // inputs
        at_once = max(1, at_once // self.format.rows_at_once) * self.format.rows_at_once
        for at in range(0, count, at_once):
            some = Part(part.source_shape, 0, first + at, min(at_once, count - at))
            self.format.quantize(self, part, at, some.read(source, transform, self.device))

    def hold(self, name: str, shard_id: str | None, tensor: torch.Tensor) -> None:
        """Keep a tensor of a part until the others are there that the checkpoint has, then have all stored. Raises `ModelLoadError` where they
        can't be."""
        waiting = self._waiting.setdefault(shard_id, {})
        waiting[name] = tensor
        if all(name in waiting for name, piece in self.tensors(shard_id) if shard_id in piece.expected):
            tensors = {name: value.to(self.device) for name, value in self._waiting.pop(shard_id).items()}
            try:
                self.format.store(self, self.parts[shard_id], tensors)
            except ModelLoadError as error:  # whichever of them is wrong, this one came last
                others = ", ".join(other for other in tensors if other != name)
                raise ModelLoadError(f"with {others} of the same module: {error}" if others else str(error)) from error


class CheckpointTensor:
    """One of the tensors of a `StoredWeight`, for all its parts: what a rule loads instead of the weight."""

    def __init__(self, weight: StoredWeight, name: str, optional: bool) -> None:
        self.weight, self.name, self.optional = weight, name, optional
        self.expected: set[str | None] = set()  # parts for which the checkpoint has it

    @torch.no_grad()
    def load(self, source: Any, shard_id: str | None, transform: Transform | None) -> None:
        """Read this rank's share, and store the part if it is the last of its tensors. Raises `ModelLoadError` where it can't be used."""
        if transform is not None:
            raise ModelLoadError("the model transforms this weight, which can't be done to quantized numbers")
        shape = self.weight.format.tensors(self.weight.parts[shard_id])[self.name]
        self.weight.hold(self.name, shard_id, shape.read(source))
