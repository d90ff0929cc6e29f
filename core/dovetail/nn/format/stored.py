"""Weights of linear layers that consist of several checkpoint tensors per part: low-bit values,
scales, zero points.

`runtime.weights` loads them through `StoredWeight.tensors`, which slice for this rank. Once all
tensors of a part are loaded, the format stores it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dovetail.errors import ModelLoadError, UnsupportedError
from dovetail.nn.format.base import ExpertLayers, WeightFormat, in_one_piece, plain_experts
from dovetail.nn.parameter import Part, Transform, Weight, cut

# values, or an eighth of the tensor if that is more: bounds temporary memory
QUANTIZED_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A checkpoint tensor of a part of a layer's weight, and this rank's share of it: `size`
    indices from `start` along `dim`, or the whole tensor if `dim` is None."""

    shapes: tuple[tuple[int, ...], ...]  # allowed shapes of the whole tensor
    dim: int | None = None
    start: int = 0
    size: int = 0
    optional: bool = False
    stride: int = 1  # as of `Part`, and `expert`
    expert: tuple[int, int] | None = None

    def read(self, source: Any) -> torch.Tensor:
        """Return this rank's share of `source`, a safetensors slice or a tensor. Raises
        `ModelLoadError` for another shape."""
        return cut(
            source,
            self.shapes,
            self.dim,
            self.start,
            self.size,
            stride=self.stride,
            expert=self.expert,
        )


def checked_scales(
    scales: torch.Tensor, largest: float = 1.0, name: str = "scales"
) -> torch.Tensor:
    """Return scales of a checkpoint in float32. `largest`: magnitude of the values that they
    multiply. Raises `ModelLoadError` for products that aren't finite, and for integers, which would
    be codes of another layout."""
    if not scales.dtype.is_floating_point:
        raise ModelLoadError(
            f"{name}: expected floating-point numbers, found "
            f"{str(scales.dtype).removeprefix('torch.')}"
        )
    scales = scales.float()
    if not bool(torch.isfinite(scales * largest).all()):
        raise ModelLoadError(
            f"{name}: scales must be finite, and so must weights of up to {largest:g} scales"
        )
    return scales


def require_whole_groups(part: Part, group: int) -> None:
    """Raise `UnsupportedError` if the inputs of a part aren't groups of `group` inputs, which share
    a scale."""
    whole = part.source_shape[1]
    if whole % group:
        raise UnsupportedError(f"{whole} inputs are no multiple of the {group} that share a scale")


def require_own_groups(part: Part, group: int, of: str = "group") -> None:
    """Raise `UnsupportedError` if a rank's share of a part begins or ends within a group of `group`
    inputs."""
    if part.dim == 1 and (part.start % group or part.size % group):
        raise UnsupportedError(
            f"a rank's share of {part.source_shape[1]} inputs is {part.size}, no multiple of the "
            f"{group} inputs of a {of}: use fewer ranks"
        )


class StoredFormat(WeightFormat):
    """Format that stores weights as `StoredWeight`s."""

    @abstractmethod
    def tensors(self, part: Part) -> Mapping[str, TensorShape]:
        """Return the checkpoint's tensors of a part, by the last component of their names:
        "weight", "weight_scale". Empty if the checkpoint is plain and quantized while loading."""

    @abstractmethod
    def store(self, weight: StoredWeight, part: Part, tensors: Mapping[str, torch.Tensor]) -> None:
        """Store this rank's shares of a part's tensors. Raises `ModelLoadError` for invalid
        values."""

    @abstractmethod
    def quantize(self, weight: StoredWeight, part: Part, first: int, rows: torch.Tensor) -> None:
        """Quantize plain weights: whole `rows` of the checkpoint's tensor, which start at this
        rank's row `first` of the part. Their number is arbitrary, but a multiple of `rows_at_once`
        except in the last call."""

    def allocate_experts(
        self, weights: Sequence[Weight], device: torch.device
    ) -> Sequence[nn.Parameter]:
        return in_one_piece(super().allocate_experts(weights, device), ("scales", "zeros"))

    def experts(
        self, layers: ExpertLayers, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        if x.dtype not in (
            torch.bfloat16,
            torch.float16,
        ):  # weights are widened to 16 bits, and no further
            return plain_experts(self, layers, x, ids, weights)
        return super().experts(layers, x, ids, weights)

    @property
    def rows_at_once(self) -> int:
        """Number of rows that `quantize` must process together."""
        return 1


class StoredWeight(nn.Parameter):
    """Weight [outputs, inputs] of a linear layer, consisting of `parts` like a `Weight`, stored as
    `format` does.

    The parameter's own data are the values; the rest are attributes: `scales`, `zeros`.
    """

    format: StoredFormat
    parts: Mapping[str | None, Part]
    layer_shape: tuple[int, int]  # [outputs, inputs], of this rank
    compute_dtype: torch.dtype  # of the model's activations
    scale = False  # not a multiplier, as a norm's weight is
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def __new__(
        cls,
        form: StoredFormat,
        plain: Weight,
        values: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
    ) -> StoredWeight:
        """Return a parameter with the parts of `plain`. The other arguments are uninitialized
        memory in the format's layout."""
        weight: StoredWeight = super().__new__(cls, values, requires_grad=False)
        weight.format = form
        weight.parts = plain.parts
        weight.layer_shape = (plain.shape[0], plain.shape[1])
        weight.compute_dtype = plain.dtype
        weight.scales = scales
        weight.zeros = zeros
        weight._pieces = {}
        weight._waiting = {}
        return weight

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    _pieces: dict[str, CheckpointTensor]
    _waiting: dict[str | None, dict[str, torch.Tensor]]

    @property
    def numbers(self) -> int:
        """Number of weights, independent of their bits."""
        return self.layer_shape[0] * self.layer_shape[1]

    def tensors(self, shard_id: str | None) -> Iterator[tuple[str, CheckpointTensor]]:
        """Yield (last component of its name, its destination) for each checkpoint tensor of this
        part."""
        for name, shape in self.format.tensors(self.parts[shard_id]).items():
            yield name, self._pieces.setdefault(name, CheckpointTensor(self, name, shape.optional))

    def load(
        self, source: Any, shard_id: str | None = None, transform: Transform | None = None
    ) -> None:
        """Load and quantize `source`, a plain tensor or its safetensors slice, some rows at a time,
        on the parameter's device. Raises `ModelLoadError` if its shape or dtype is wrong."""
        part = self.parts[shard_id]
        rows, inputs = part.source_shape
        first, count, stride = (
            (part.start, part.size, part.stride) if part.dim == 0 else (0, rows, 1)
        )
        at_once = max(QUANTIZED_AT_ONCE, rows * inputs // 8) // inputs
        at_once = max(1, at_once // self.format.rows_at_once) * self.format.rows_at_once
        for at in range(0, count, at_once):
            some = replace(
                part,
                dim=0,
                start=first + at * stride,
                size=min(at_once, count - at),
                at=0,
                copies=1,  # `quantize` writes the copies
                stride=stride,
            )
            self.format.quantize(self, part, at, some.read(source, transform, self.device))

    def hold(self, name: str, shard_id: str | None, tensor: torch.Tensor) -> None:
        """Keep a tensor of a part until the part's other tensors are loaded, then store the part.
        Raises `ModelLoadError` if they are invalid."""
        waiting = self._waiting.setdefault(shard_id, {})
        waiting[name] = tensor
        if all(
            name in waiting for name, piece in self.tensors(shard_id) if shard_id in piece.expected
        ):
            tensors = {
                name: value.to(self.device) for name, value in self._waiting.pop(shard_id).items()
            }
            try:
                self.format.store(self, self.parts[shard_id], tensors)
            except ModelLoadError as error:  # any of them may be wrong; this is the last one loaded
                others = ", ".join(other for other in tensors if other != name)
                raise ModelLoadError(
                    f"with {others} of the same module: {error}" if others else str(error)
                ) from error


class CheckpointTensor:
    """One of the tensors of a `StoredWeight`, for all its parts; rules load it instead of the
    weight."""

    def __init__(self, weight: StoredWeight, name: str, optional: bool) -> None:
        self.weight = weight
        self.name = name
        self.optional = optional
        self.expected: set[str | None] = set()  # parts that the checkpoint has it for

    @torch.no_grad()
    def load(self, source: Any, shard_id: str | None, transform: Transform | None) -> None:
        """Read this rank's share, and store the part if this is the last of its tensors. Raises
        `ModelLoadError` if it is invalid."""
        if transform is not None:
            raise ModelLoadError(
                "the model transforms this weight, which isn't possible for quantized values"
            )
        shape = self.weight.format.tensors(self.weight.parts[shard_id])[self.name]
        self.weight.hold(self.name, shard_id, shape.read(source))
