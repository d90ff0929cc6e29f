"""The group of one rank. Groups of several are the executors'
(`dovetail_executors.runtime.groups`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class SingleGroup:
    """Group of a single rank: all collectives return their input, `x` [any shape]."""

    rank: int = 0
    size: int = 1
    shares: None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return x


SINGLE = SingleGroup()
