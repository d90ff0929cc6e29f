"""The base of all layers: a torch module that returns one tensor, as far as type checkers know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    import torch


class Layer(nn.Module):
    """A module whose `forward` returns a tensor."""

    if TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor: ...
