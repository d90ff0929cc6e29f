"""Parameters that know their part of a checkpoint's tensors, so that each rank reads only its own
part, directly into place.

A fused parameter (q, k and v; gate and up) has one `Part` for each of its tensors. Layers create
them, `dovetail.nn.weights` loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dovetail.api.model import BuildContext, ParallelGroup, WeightRule
from dovetail.errors import ModelLoadError, UnsupportedError
from dovetail.nn.layer import Layer

Transform = Callable[[torch.Tensor], torch.Tensor]  # see `WeightRule.transform`


@dataclass(frozen=True, slots=True)
class Part:
    """`size` indices from `start` on along `dim` of a checkpoint's tensor, which go to [at, at +
    size) along `dim` of the parameter, repeated after that for further copies."""

    # of the whole tensor in the checkpoint; of one expert, if that has several
    source_shape: tuple[int, ...]
    dim: int
    start: int
    size: int
    at: int = 0
    copies: int = 1
    stride: int = 1  # from one index to the next: 2 where gates and ups alternate
    # (index, number of them), if the checkpoint's tensor has all experts along a dimension before
    # the others
    expert: tuple[int, int] | None = None
    transposed: bool = False  # the checkpoint has [inputs, outputs]

    def read(
        self, source: Any, transform: Transform | None = None, device: torch.device | None = None
    ) -> torch.Tensor:
        """Read this part of `source`, a safetensors slice (only this part is read) or a tensor,
        repeated for its copies. `transform` gets the values in float32, on `device` if given.
        Raises `ModelLoadError` if `source` has another shape, or a dtype that requires a scale."""
        where: dict[str, Any] = {"dim": self.dim, "start": self.start, "size": self.size}
        shapes = tuple(dict.fromkeys((self.whole_shape, self._unturned_shape)))
        turned = self.transposed and _shape_of(source) == self.whole_shape  # also a square one
        where |= {"stride": self.stride, "expert": self.expert, "transposed": turned}
        values = cut(source, shapes, **where)
        if not values.is_floating_point() or values.element_size() < 2:
            raise ModelLoadError(
                f"expected float16, bfloat16, float32 or float64, found "
                f"{str(values.dtype).removeprefix('torch.')}"
            )
        if device is not None:
            values = values.to(device)
        if transform is not None:
            values = transform(values.float())
        return values if self.copies == 1 else torch.cat([values] * self.copies, dim=self.dim)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the checkpoint."""
        if not self.transposed:
            return self._unturned_shape
        return (*self._unturned_shape[:-2], *self.source_shape[::-1])

    @property
    def _unturned_shape(self) -> tuple[int, ...]:
        """Shape of the tensor with [outputs, inputs], as transformers saves some that were
        published transposed."""
        return self.source_shape if self.expert is None else (self.expert[1], *self.source_shape)

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """Return numbers [*source_shape] as a checkpoint would have them, those of other experts
        the same."""
        return (values.t() if self.transposed else values).expand(self.whole_shape)

    def place(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a view of this part of the parameter ([out, in], or [out] of a bias), with all its
        copies."""
        return parameter.narrow(self.dim, self.at, self.size * self.copies)


def cut(
    source: Any,
    shapes: tuple[tuple[int, ...], ...],
    dim: int | None,
    start: int = 0,
    size: int = 0,
    *,
    stride: int = 1,
    expert: tuple[int, int] | None = None,
    transposed: bool = False,
) -> torch.Tensor:
    """Return some indices along `dim` (None: all) of `source`, a safetensors slice, of which only
    these are read, or a tensor. The arguments are as of `Part`. Raises `ModelLoadError` if its
    shape is none of `shapes`."""
    shape = _shape_of(source)
    if shape not in shapes:
        raise ModelLoadError(
            f"expected shape {' or '.join(str(list(one)) for one in shapes)}, found {list(shape)}"
        )
    index: tuple[int | slice, ...] = () if expert is None else (expert[0],)
    if dim is not None:
        index += (slice(None),) * (1 - dim if transposed else dim) + (
            slice(start, start + max(0, (size - 1) * stride + 1)),
        )
    values: torch.Tensor = source[index or ...]
    values = values.t() if transposed else values
    return (
        values
        if stride == 1 or dim is None
        else values[(slice(None),) * dim + (slice(None, None, stride),)]
    )


def _shape_of(source: Any) -> tuple[int, ...]:
    return tuple(source.shape if isinstance(source, torch.Tensor) else source.get_shape())


class Weight(nn.Parameter):
    """Parameter without gradient, made of `parts`: shard id -> part; the shard id None is for a
    single tensor.

    `scale`: a multiplier (a norm's weight), so that 1 is the identity. Anything not covered by a
    part (padding of a vocabulary) is 0. `later`: it stays on the meta device until its layer takes
    a format. `plain`: it never has a format; `stored_as` is that in which the checkpoint stores it,
    if it does, from which it is dequantized while it loads.
    """

    parts: Mapping[str | None, Part]
    scale: bool
    plain: bool
    stored_as: Any = None

    def __new__(
        cls,
        shape: tuple[int, ...],
        parts: Mapping[str | None, Part],
        context: BuildContext,
        *,
        scale: bool = False,
        later: bool = False,
        plain: bool = False,
    ) -> Weight:
        covered = sum(
            part.size * part.copies * (shape[1 - part.dim] if len(shape) == 2 else 1)
            for part in parts.values()
        )
        make = torch.empty if covered == torch.Size(shape).numel() else torch.zeros
        device = torch.device("meta") if later else context.device
        weight: Weight = super().__new__(
            cls, make(shape, dtype=context.dtype, device=device), requires_grad=False
        )
        weight.parts = dict(parts)
        weight.scale = scale
        weight.plain = plain
        return weight

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def on(self, device: torch.device) -> Weight:
        """Return a parameter with the same parts on `device`, uninitialized."""
        weight: Weight = nn.Parameter.__new__(
            Weight, torch.empty_like(self.data, device=device), requires_grad=False
        )
        weight.parts = self.parts
        weight.scale = self.scale
        weight.plain = self.plain
        return weight

    @torch.no_grad()
    def load(
        self,
        source: Any,
        shard_id: str | None = None,
        transform: Transform | None = None,
        copy: Callable[[torch.Tensor, torch.Tensor], object] = torch.Tensor.copy_,
    ) -> None:
        """Copy this rank's part of `source` (a whole tensor of the checkpoint, or its safetensors
        slice) into place, with `transform` (see `WeightRule.transform`) applied and converted to
        the parameter's dtype and device. `copy(place, values)` copies values [...] to a place of
        the same shape, now or later. Raises `ModelLoadError` if its shape or dtype is wrong."""
        part = self.parts[shard_id]
        copy(part.place(self.data), part.read(source, transform))


def whole(shape: tuple[int, ...], context: BuildContext, *, scale: bool = False) -> Weight:
    """Return a parameter that every rank holds whole."""
    return Weight(shape, {None: Part(shape, 0, 0, shape[0])}, context, scale=scale)


def weight_rules(
    prefix: str, layers: Mapping[str, Layer | tuple[Layer, *tuple[str, ...]]]
) -> Iterator[WeightRule]:
    """Yield the rules for all parameters of layers, by the names of modules in a checkpoint, which
    follow `prefix`. A module that is a part of a merged layer, or several, has their shard ids
    beside the layer."""
    for name, layer in layers.items():
        merged, *shard_ids = layer if isinstance(layer, tuple) else (layer, None)
        for kind, weight in merged.named_parameters():  # "weight", "bias", or what a format adds
            for shard_id in shard_ids:
                yield WeightRule(
                    f"{prefix}{name}.{kind}", weight, shard_id, transform=merged.transform
                )


def share(total: int, group: ParallelGroup, what: str) -> int:
    """Return each rank's share of `total`. Raises `UnsupportedError` that names `what` if it can't
    be split evenly."""
    if total % group.size:
        raise UnsupportedError(f"{what} ({total}) can't be split evenly over {group.size} ranks")
    return total // group.size


def kv_share(kv_heads: int, group: ParallelGroup) -> tuple[int, int]:
    """Return (first, count) of this rank's K and V heads. With more ranks than heads, several ranks
    hold the same head."""
    if group.size <= kv_heads:
        count = share(kv_heads, group, "num_key_value_heads")
        return group.rank * count, count
    if group.size % kv_heads:
        raise UnsupportedError(
            f"num_key_value_heads ({kv_heads}) can't be repeated evenly over {group.size} ranks"
        )
    return group.rank * kv_heads // group.size, 1
