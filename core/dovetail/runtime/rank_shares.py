"""Memory for sums over GPUs that are added to a residual stream: each rank writes its share of a sum to memory that the others can read, and one
kernel adds all shares to the stream (`dovetail.nn.kernels.rank_sums`).

There are two places for shares, used in turn, so that a rank need not wait until the others have read its share. What a rank writes next goes to the
other place. It comes back to this one only after the sum between, for which each other rank has said that its share is there, which it says after
all its kernels before have ended, those that read included. Two sums in a row on the same place would break this; so all ranks make the same
sums in the same order, and between what is recorded at different times lies a sum or a gathering of another kind, which waits for everybody: the
embedding's, at the start of each step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

PLACES = 2
MOST_BYTES_OF_MANY = 512 << 10  # of a share, with more than two ranks: every rank reads all shares
MOST_BYTES = 256 << 20  # of a share


class RankShares:
    """A rank's places, and where the others' are. Used by one stream at a time. The executor's ranks make theirs at once (`rank_shares`)."""

    def __init__(self, buffer: torch.Tensor, numbers: int, handle: Any, dtype: torch.dtype) -> None:
        """`buffer` [bytes] uint8 is symmetric memory: places of `numbers` numbers, then flags. `handle` is what torch returned for it."""
        from dovetail.nn.kernels.rank_sums import MOST_PROGRAMS, add_shares

        self.rank, self.dtype, self.numbers, self._add_shares = handle.rank, dtype, numbers, add_shares
        size, at = handle.world_size, PLACES * numbers * dtype.itemsize
        self.flags = buffer[at:].view(torch.int32)  # 1: another rank's share is there, until this rank has seen it
        self._places = [buffer[place * numbers * dtype.itemsize :][: numbers * dtype.itemsize].view(dtype) for place in range(PLACES)]
        starts = [int(start) + handle.offset for start in handle.buffer_ptrs]
        per_place = MOST_PROGRAMS * size * 4

        def addresses(offset: int) -> torch.Tensor:
            return torch.tensor([start + offset for start in starts], dtype=torch.int64, device=buffer.device)

        self._addresses = [(addresses(place * numbers * dtype.itemsize), addresses(at + place * per_place)) for place in range(PLACES)]
        self._next = 0
        self._given = 0  # the place that was given last

    def place(self, rows: int, size: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return memory [rows, size] for this rank's share of the next sum, which `add` must add up before it is asked for again. None, on all
        ranks, if such a sum has no room here, or takes too long so."""
        if rows * size > self.numbers or dtype != self.dtype or rows == 0:
            return None
        self._given, self._next = self._next, (self._next + 1) % PLACES
        return self._places[self._given][: rows * size].view(rows, size)

    def add(self, x: torch.Tensor, norm: tuple[torch.Tensor, float] | None) -> torch.Tensor | None:
        """x [rows, size] += the sum of the shares that the ranks have written to the place given last; `norm` (weight [size], eps): return the
        stream's RMS norm, otherwise None."""
        shares, flags = self._addresses[self._given]
        return self._add_shares(x, shares, flags, self.rank, norm)


def make_rank_shares(numbers: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> RankShares:
    """Make the places together with all other ranks of `group`, which torch must know by its name, for shares of up to so many `numbers`. Raises
    `RuntimeError` where the GPUs can't read each other's memory."""
    import torch.distributed._symmetric_memory as symmetric

    from dovetail.nn.kernels.rank_sums import MOST_PROGRAMS

    size = group.size()
    most = MOST_BYTES if size == 2 else MOST_BYTES_OF_MANY
    numbers = -(-min(numbers, most // dtype.itemsize) // 128) * 128
    flags = PLACES * MOST_PROGRAMS * size * 4
    buffer = symmetric.empty(PLACES * numbers * dtype.itemsize + flags, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(buffer, group.group_name)
    buffer.zero_()
    torch.cuda.synchronize(device)
    shares = RankShares(buffer, numbers, handle, dtype)
    handle.barrier(channel=0)  # nobody signals before everyone's flags are zero
    for _ in range(PLACES):
        _try(shares, size, device)
    return shares


def _try(shares: RankShares, size: int, device: torch.device) -> None:
    """Raise `RuntimeError` unless a sum comes out right."""
    x = torch.zeros((3, 128), dtype=shares.dtype, device=device)
    place = shares.place(3, 128, shares.dtype)
    assert place is not None
    place.fill_(shares.rank + 1)
    shares.add(x, None)
    if not bool((x == size * (size + 1) // 2).all()):
        raise RuntimeError("a sum through symmetric memory came out wrong")
