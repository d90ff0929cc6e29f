"""The group of one rank, and sums over ranks in shared memory. Groups of several ranks are the
executors' (`dovetail_executors.runtime.groups`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    import torch

    from dovetail.api.model import ParallelGroup


class RankShares(Protocol):
    """Memory shared between GPUs, to add a sum over the ranks to a residual stream in one
    kernel."""

    def place(self, rows: int, size: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return memory [rows, size] for this rank's share of the next sum. Fill it and call `add`
        before the next call. None, on all ranks, if there is no room for such a sum."""

    def add(self, x: torch.Tensor, norm: tuple[torch.Tensor, float] | None) -> torch.Tensor | None:
        """Add to x [rows, size], in place, the sum over the ranks of what they wrote to the memory
        returned last. `norm`: (weight [size], eps) of an RMS norm; then the normalized x is
        returned, of x's shape and dtype, otherwise None."""


def shares_of(group: ParallelGroup) -> RankShares | None:
    """Return the group's shared memory for sums that are added to a residual stream: its attribute
    `shares`, if it has one. None: use `all_reduce`."""
    return cast("RankShares | None", getattr(group, "shares", None))


@dataclass(frozen=True, slots=True)
class SingleGroup:
    """Group of a single rank: all collectives return their input, `x` [any shape]."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return x


SINGLE = SingleGroup()
