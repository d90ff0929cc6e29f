"""Types that torch's modules lack: a layer that returns one tensor, and a homogeneous list of
modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

M = TypeVar("M", bound=nn.Module)


class Layer(nn.Module):
    """A module whose `forward` returns a tensor. `transform`: see `WeightRule.transform`."""

    transform: Callable[[torch.Tensor], torch.Tensor] | None = None

    if TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor: ...


class LayerList(nn.ModuleList, Generic[M]):
    """A `torch.nn.ModuleList` of modules of one type."""

    if TYPE_CHECKING:

        def __init__(self, modules: Iterable[M]) -> None: ...

        def __iter__(self) -> Iterator[M]: ...
