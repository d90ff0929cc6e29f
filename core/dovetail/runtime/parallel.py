"""Groups of ranks that share a model's weights. Today: the group of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class SingleGroup:
    """Group of a single rank: all collectives are no-ops."""

    rank: int = 0
    size: int = 1
    shares: None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return x


SINGLE = SingleGroup()
