"""Copies of pages on a clock, without a device: for simulations and for tests of the loop."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dovetail.api.clock import Clock
from dovetail.api.kv_cache import HOLE
from dovetail.api.kv_transfers import KVTransfers, Slab, Transfer, Transferred, frame_checksum


class PageContent(Protocol):
    """Holds the bytes of a simulated device's pages, which `TimedTransfers` saves and restores."""

    def read(self, pages: Sequence[int]) -> bytes:
        """Return the bytes of `pages`, one after the other."""

    def begin(self, pages: Sequence[int]) -> None:
        """Forget what `pages` hold: nobody reads or writes them until they are replaced."""

    def replace(self, pages: Sequence[int], data: bytes) -> None:
        """Set the bytes of `pages`, except those of `HOLE`."""


@dataclass(frozen=True, slots=True)
class _Copy:
    transfer: Transfer
    ends: float
    saved: bytes | None  # None: a restore


class TimedTransfers(KVTransfers):
    """Transfers that take time on `clock`: `rate` bytes per second in each direction, one after the
    other. A save reads the pages when it is enqueued. Host memory is written and read by the call
    of `finished` that returns the transfer.

    Without `content` nothing is copied, and every checksum is 0."""

    def __init__(
        self,
        clock: Clock,
        name: str,
        page_bytes: int,
        rate: float,
        content: PageContent | None = None,
    ) -> None:
        self.name = name
        self.page_bytes = page_bytes
        self._clock = clock
        self._rate = rate
        self._content = content
        self._slabs: list[memoryview] = []
        self._copies: list[_Copy] = []
        self._free = {"save": 0.0, "restore": 0.0}  # when the direction has nothing left to do

    def allocate(self, size: int) -> Slab:
        memory = memoryview(mmap.mmap(-1, size))  # which takes no memory until it is written
        self._slabs.append(memory)
        return Slab(len(self._slabs) - 1, memory)

    def save(self, transfer: Transfer) -> None:
        saved = b"" if self._content is None else self._content.read(transfer.pages)
        self._copies.append(_Copy(transfer, self._ends("save", transfer), saved))

    def restore(self, transfer: Transfer) -> None:
        if self._content is not None:
            self._content.begin([page for page in transfer.pages if page != HOLE])
        self._copies.append(_Copy(transfer, self._ends("restore", transfer), None))

    def finished(self) -> Sequence[Transferred]:
        now = self._clock.now()
        done = [copy for copy in self._copies if copy.ends <= now]
        self._copies = [copy for copy in self._copies if copy.ends > now]
        return [Transferred(copy.transfer.id, self._end(copy)) for copy in done]

    def _ends(self, direction: str, transfer: Transfer) -> float:
        begins = max(self._clock.now(), self._free[direction])
        self._free[direction] = begins + len(transfer.pages) * self.page_bytes / self._rate
        return self._free[direction]

    def _end(self, copy: _Copy) -> int:
        """Copy the bytes, and return their checksum."""
        if self._content is None:
            return 0
        transfer = copy.transfer
        end = transfer.offset + len(transfer.pages) * self.page_bytes
        data = self._slabs[transfer.slab][transfer.offset : end]
        if copy.saved is not None:
            data[:] = copy.saved
        else:
            self._content.replace(transfer.pages, bytes(data))
        return frame_checksum(data, transfer.seed)
