"""GPU memory that all ranks of a host can read, for collectives in a single kernel
(`dovetail.nn.kernels.rank_sums`): faster than NCCL's protocol for small sums. It is torch's
symmetric memory with our own kernels, since torch's wait forever for a dead rank.

    ┌─────────┬─────────┬──────────┬───────┐
    │ share 0 │ share 1 │ exchange │ flags │    on each rank; each part has its own flags
    └─────────┴─────────┴──────────┴───────┘

Sums that are added to a residual stream alternate between two buffers for shares, so that a rank
doesn't wait until the others have read its share: it writes the next share to the other buffer. It
returns to the first buffer only after the sum in between. For that sum every other rank has
signalled that its share is written, after all its earlier kernels have ended, including those that
read the first buffer. Two successive sums in the same buffer would break this. Therefore all ranks
compute the same sums in the same order.

Any other collective synchronizes all ranks, so the next sum may use either buffer. It uses the
first, whatever came before: each forward starts with such a collective, mostly that of the
embedding, so its sums use the same buffers when it is launched, recorded, and replayed.

All other collectives are exchanges: each rank writes its part, and finally waits until all have
read it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail_executors.runtime.recording import synchronize

PLACES = 2
MOST_BYTES = 256 << 20  # of a share
MOST_EXCHANGED = 64 << 20  # bytes of a part
# of a share or part with more than two ranks, since every rank reads all of them
MOST_BYTES_OF_MANY = 512 << 10
ALIGNED_BYTES = 512  # alignment of the parts of the memory
EXCHANGED = (torch.float32, torch.bfloat16, torch.float16)
_EXCHANGE = re.compile(r"CUDASymmetricMemory/(\d+)/\d+$")


class ExchangeKeys(Store):
    """The store of a group in which torch's ranks exchange where their memory is.

    Torch numbers these exchanges by process, in the keys: "CUDASymmetricMemory/7/0" for rank 0. An
    engine's process has a number for each exchange of all its engines, while the processes of other
    ranks are new. Here a group's exchanges are 0, 1, …."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}  # of the process -> of the group

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._store.set(self._renumbered(key), value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self._store.get(self._renumbered(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        keys = [self._renumbered(key) for key in keys]
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def _renumbered(self, key: str) -> str:
        found = _EXCHANGE.search(key)
        if found is None:
            return key
        # a rank sets a key of its own before it waits for those of others
        number = self._numbers.setdefault(found[1], len(self._numbers))
        start, end = found.span(1)
        return f"{key[:start]}{number}{key[end:]}"


class RankShares:
    """A rank's memory, and where the others' is. Used by one stream at a time; `release` may be
    called by any thread. It can be used once it knows where the others' is (`connect`); until then
    kernels that use it can be compiled."""

    def __init__(
        self,
        buffer: torch.Tensor,
        rank: int,
        size: int,
        share_bytes: int,
        dtype: torch.dtype,
        released: torch.Tensor,
    ) -> None:
        """`buffer` [bytes] uint8, zeros, is the memory: shares of `share_bytes`, which hold numbers
        of `dtype`, flags, and all else is the exchange. `released` [1] int32 is pinned memory of
        the host, 0."""
        from dovetail.nn.kernels.rank_sums import MOST_PROGRAMS, Exchange

        self.rank = rank
        self.size = size
        self.dtype = dtype
        self.numbers = share_bytes // dtype.itemsize
        # where those of each part begin
        flags = [len(buffer) - left * MOST_PROGRAMS * size * 4 for left in range(PLACES + 2, 0, -1)]
        self._buffer = buffer
        self._released = released
        self._places = [
            buffer[place * share_bytes :][:share_bytes].view(dtype) for place in range(PLACES)
        ]
        self._parts = buffer[PLACES * share_bytes : flags[0]]
        self._offsets = torch.tensor(
            [0, share_bytes, PLACES * share_bytes, *flags], dtype=torch.int64
        )
        # addresses by rank
        self._tables = torch.zeros(
            (len(self._offsets), size), dtype=torch.int64, device=buffer.device
        )
        *places, parts, first, second, arrived, read = self._tables.unbind()
        self._addresses = list(zip(places, (first, second), strict=True))
        self._exchange = Exchange(parts, arrived, read, released, rank)
        self._next = 0
        self._given = 0  # the place returned last
        self._added = True  # what was written there has been added up

    @property
    def most_exchanged(self) -> int:
        """Maximum size of a part in bytes."""
        return len(self._parts)

    def connect(self, starts: Sequence[int]) -> None:
        """Use the ranks' buffers at these addresses from now on."""
        self.restart()  # compiling may have ended earlier on another rank
        self._tables.copy_(self._offsets[:, None] + torch.tensor(starts, dtype=torch.int64))

    def release(self) -> None:
        """Let kernels that wait for another rank return, now and in the future, with undefined
        results. Doesn't block."""
        self._released.fill_(1)

    def restart(self) -> None:
        """Give the first place next, on ranks that have met and have no share to add, whatever
        failed before."""
        self._next, self._added = 0, True

    def begin_again(self) -> None:
        """Give the first place next, since the ranks have met in another collective; not while a
        share is still to be added."""
        if self._added:
            self._next = 0

    def place(self, rows: int, size: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return memory [rows, size] for this rank's share of the next sum, which `add` must add up
        before it is asked for again. None, on all ranks, if such a sum has no room here, or takes
        too long so."""
        if rows * size > self.numbers or dtype != self.dtype or rows == 0:
            return None
        self._given = self._next
        self._next = (self._next + 1) % PLACES
        self._added = False
        return self._places[self._given][: rows * size].view(rows, size)

    def add(self, x: torch.Tensor, norm: tuple[torch.Tensor, float] | None) -> torch.Tensor | None:
        """x [rows, size] += the sum of the shares that the ranks have written to the place given
        last; `norm` (weight [size], eps): return the stream's RMS norm, otherwise None."""
        from dovetail.nn.kernels.rank_sums import add_shares

        shares, flags = self._addresses[self._given]
        self._added = True
        return add_shares(x, shares, flags, self._released, self.rank, norm)

    def all_reduce(self, x: torch.Tensor) -> bool:
        """Sum x over the ranks, in place. Returns False, having done nothing, if x can't be
        exchanged, or is better summed in another way: then all ranks return False."""
        from dovetail.nn.kernels.rank_sums import sum_parts

        if (
            not self._exchanges(x)
            or not x.is_contiguous()
            or (self.size > 2 and x.nbytes > MOST_BYTES_OF_MANY)
        ):
            return False
        self._part(x).copy_(x)
        with suppress(KernelUnavailable):
            sum_parts(x, self._exchange)
            self.begin_again()
            return True
        return False

    def all_gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the ranks' x, concatenated along the last dimension in the order of ranks. None as
        `all_reduce` returns False."""
        from dovetail.nn.kernels.rank_sums import gather_parts

        if not self._exchanges(x):
            return None
        self._part(x).copy_(x)
        out = x.new_empty((*x.shape[:-1], self.size * x.shape[-1]))
        columns = x.shape[-1]
        with suppress(KernelUnavailable):
            gather_parts(out, columns, self._exchange)
            self.begin_again()
            return out
        return None

    def _exchanges(self, x: torch.Tensor) -> bool:
        return x.dtype in EXCHANGED and 0 < x.nbytes <= len(self._parts) and x.dim() > 0

    def _part(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the next exchange, in x's shape and dtype."""
        return self._parts[: x.nbytes].view(x.dtype).view(x.shape)


def buffer_bytes(size: int, share_bytes: int, part_bytes: int) -> int:
    """Return the size of a buffer for shares and parts of these sizes, which are multiples of
    `ALIGNED_BYTES`."""
    from dovetail.nn.kernels.rank_sums import MOST_PROGRAMS

    return PLACES * share_bytes + part_bytes + (PLACES + 2) * MOST_PROGRAMS * size * 4


def make_rank_shares(
    share_numbers: int,
    part_numbers: int,
    dtype: torch.dtype,
    device: torch.device,
    rank: int,
    size: int,
) -> RankShares:
    """Make this rank's memory, for shares and parts of up to so many numbers; it isn't connected.
    Raises `ImportError` or `RuntimeError` where there can't be any."""
    import torch.distributed._symmetric_memory as symmetric

    share_bytes = _aligned(
        min(share_numbers * dtype.itemsize, MOST_BYTES if size == 2 else MOST_BYTES_OF_MANY)
    )
    part_bytes = _aligned(min(max(share_numbers, part_numbers) * dtype.itemsize, MOST_EXCHANGED))
    buffer = symmetric.empty(
        buffer_bytes(size, share_bytes, part_bytes), dtype=torch.uint8, device=device
    )
    buffer.zero_()
    synchronize(device)
    return RankShares(
        buffer, rank, size, share_bytes, dtype, torch.zeros(1, dtype=torch.int32, pin_memory=True)
    )


def connect(shares: RankShares, group: dist.ProcessGroup) -> None:
    """Let the ranks of `group`, which torch must know by its name, find each other's memory, all at
    once. Raises `RuntimeError` where the GPUs can't read it."""
    import torch.distributed._symmetric_memory as symmetric

    handle: Any = symmetric.rendezvous(shares._buffer, group.group_name)
    shares.connect([int(start) + handle.offset for start in handle.buffer_ptrs])


def check(shares: RankShares, device: torch.device) -> None:
    """Raise `RuntimeError` unless sums and a gather over all ranks give correct results."""
    total = shares.size * (shares.size + 1) // 2
    right = []
    for _ in range(PLACES):
        x = torch.zeros((3, 128), dtype=shares.dtype, device=device)
        place = shares.place(3, 128, shares.dtype)
        assert place is not None
        place.fill_(shares.rank + 1)
        shares.add(x, None)
        right.append(bool((x == total).all()))
    mine = torch.full((3, 128), float(shares.rank + 1), dtype=shares.dtype, device=device)
    gathered = shares.all_gather(mine)
    right.append(
        gathered is not None
        and gathered.view(3, shares.size, 128).mean((0, 2)).tolist() == [*range(1, shares.size + 1)]
    )
    right.append(shares.all_reduce(mine) and bool((mine == total).all()))
    if not all(right):
        raise RuntimeError("a sum through memory shared by the GPUs was wrong")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
