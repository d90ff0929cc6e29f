"""Transfers of several ranks on one host: each copies its own bytes of every page.

The slabs are in one file of shared memory, without a name, that all ranks inherit. Rank 0 sends
what is to be copied through the ring, in the order of the steps; each other rank writes down what
it has copied, and with which checksum:

      ┌─────────────────────┬─────────────────────┬────────┬────────┐
      │ results of rank 1   │ results of rank 2 … │ slab 0 │ slab 1 │ …      the file grows with each slab
      └─────────────────────┴─────────────────────┴────────┴────────┘
      in a slab, a transfer:  │ all pages of rank 0 │ all pages of rank 1 │ …
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import numpy as np

from dovetail.api.kv_transfers import KVTransfers, Slab, Transfer, Transferred
from dovetail.errors import DovetailError, describe
from dovetail_executors.ring import Kind, Words
from dovetail_executors.runtime.transfers import MODULUS, Copying, PageCopies, PartOfTransfers

PLACES = 1 << 12  # results of a rank: transfers that may be unfinished
POLL_S = 200e-6  # between a rank's looks at copies that its device hasn't ended
_RESULT = 3  # words of a result: number, checksum, and both combined
_HEAD = 7  # words of a message before the pages: slab, and pairs: number, offset, seed


class SharedSlabs:
    """The file, and the results of all ranks but the first. `fd` is inherited by their
    processes. `grow` and `map` may be called by another thread than the others."""

    def __init__(self, fd: int, ranks: int) -> None:
        """`fd`: as `make` returns it."""
        self.fd = fd
        self._lock = threading.Lock()
        size = _head_bytes(ranks)
        memory = mmap.mmap(fd, size)
        words = (ranks - 1) * PLACES * _RESULT
        self.results = np.frombuffer(memory, np.uint64, words).reshape(ranks - 1, PLACES, _RESULT)
        self._end = size

    def close(self) -> None:
        """Release the results, and use the file no more: slabs are freed with their memory."""
        with self._lock:
            self.fd = -1
        self.results = self.results[:, :0].copy()

    @classmethod
    def make(cls, ranks: int) -> int:
        """Return the descriptor of a new file. The caller closes it."""
        fd = os.memfd_create("dovetail-slabs")
        os.ftruncate(fd, _head_bytes(ranks))
        return fd

    def grow(self, size: int) -> int:
        """Append a slab of `size` bytes, and return where it begins. Raises `DovetailError`."""
        start = self._end
        end = start + _mappable(size)
        try:
            with self._lock:
                os.ftruncate(self.fd, end)
        except (OSError, OverflowError) as error:
            raise DovetailError(f"{size} bytes of shared memory can't be had: {error}") from error
        self._end = end
        return start

    def map(self, start: int, size: int) -> mmap.mmap:
        """Return a slab's memory. Raises `DovetailError`."""
        try:
            with self._lock:
                if self.fd < 0:
                    raise DovetailError("executor tensor was stopped")
                return mmap.mmap(self.fd, size, offset=start)
        except (OSError, ValueError, OverflowError) as error:
            raise DovetailError(f"{size} bytes of shared memory can't be used: {error}") from error

    def report(self, rank: int, number: int, checksum: int) -> None:
        """Write down that `rank`, 1 or more, has ended its part of a transfer."""
        numbers = (number, checksum, number ^ checksum)
        self.results[rank - 1, number % PLACES] = np.array(numbers, np.uint64)

    def checksum(self, number: int) -> int | None:
        """Return the sum of the ranks' checksums of a transfer; None if one hasn't ended it. A
        result that is written in part, or in another order, isn't complete yet."""
        found = self.results[:, number % PLACES].copy()
        if not ((found[:, 0] == number) & ((found[:, 0] ^ found[:, 1]) == found[:, 2])).all():
            return None
        return int(found[:, 1].sum(dtype=np.uint64))


class RankedTransfers(KVTransfers):
    """The transfers of all ranks, in the process of rank 0."""

    def __init__(
        self,
        copies: PageCopies,
        name: str,
        ranks: int,
        slabs: SharedSlabs,
        send: Callable[[Kind, Sequence[Words]], None],
        share: Callable[[str, dict[str, Any]], Sequence[str]],
    ) -> None:
        """`send`: to the ring. `share(what, message)`: tell all other ranks, by their control
        connections, and return what each answers to `what`."""
        self.name = name
        self.page_bytes = ranks * copies.page_bytes
        self._own = PartOfTransfers(copies)
        self._ranks = ranks
        self._slabs = slabs
        self._send = send
        self._share = share
        self._allocated = 0
        self._sent = 0
        self._pending: dict[int, tuple[int, Copying]] = {}  # number -> id and own part

    def allocate(self, size: int) -> Slab:
        self._own.require_room(size)
        number = self._allocated
        start = self._slabs.grow(size)
        memory = self._slabs.map(start, size)
        self._own.add(number, memory)
        answers = self._share(_answer(number), {"slab": (number, start, size)})
        for rank, why in enumerate(answers, 1):
            if why:
                raise DovetailError(f"executor tensor: rank {rank}: {why}")
        self._allocated = number + 1
        return Slab(number, memoryview(memory))

    def save(self, transfer: Transfer) -> None:
        self._start(Kind.SAVE, transfer)

    def restore(self, transfer: Transfer) -> None:
        self._start(Kind.RESTORE, transfer)

    def finished(self) -> Sequence[Transferred]:
        done = []
        for number, (id, copying) in [*self._pending.items()]:
            others = self._slabs.checksum(number) if copying.done else None
            if others is not None:
                del self._pending[number]
                done.append(Transferred(id, (copying.checksums[0] + others) % MODULUS))
        return done

    def save_capacity(self) -> int:
        return self._ranks * self._own.copies.save_capacity()

    def _start(self, kind: Kind, transfer: Transfer) -> None:
        number = self._sent + 1
        if number - min(self._pending, default=number) >= PLACES:
            raise DovetailError(f"executor tensor: {PLACES} transfers haven't ended")
        self._send(kind, [to_words(number, transfer)])
        self._pending[number] = transfer.id, self._own.start([transfer], saves=kind is Kind.SAVE)
        self._sent = number


class RankTransfers:
    """The part of another rank, in its process. `serve` runs in a thread of its own."""

    def __init__(
        self, rank: int, slabs: SharedSlabs, make: Callable[[], PageCopies | None]
    ) -> None:
        """`make`: of the rank's worker; called with the first slab."""
        self._rank = rank
        self._slabs = slabs
        self._make = make
        self._part: PartOfTransfers | None = None
        # copies that hadn't ended when they were enqueued, by direction
        self._waiting: dict[Kind, SimpleQueue[tuple[int, Copying]]] = {}

    def serve(self, orders: SimpleQueue[dict[str, Any]], tell: Callable[[Any], None]) -> None:
        """Add the slabs that rank 0 allocates, and answer, until the connection is closed."""
        with suppress(EOFError, OSError):
            while True:
                number, start, size = orders.get()["slab"]
                tell({_answer(number): self._add(number, start, size)})

    def start(self, kind: Kind, words: Words) -> None:
        """Enqueue a transfer of the ring."""
        number, transfer = from_words(words)
        assert self._part is not None
        copying = self._part.start([transfer], saves=kind is Kind.SAVE)
        if copying.done and kind not in self._waiting:
            self._slabs.report(self._rank, number, copying.checksums[0])
            return
        if kind not in self._waiting:
            self._waiting[kind] = SimpleQueue()
            queue = (self._waiting[kind],)
            threading.Thread(target=self._report, args=queue, daemon=True).start()
        self._waiting[kind].put((number, copying))

    def _add(self, number: int, start: int, size: int) -> str:
        """Return why the slab can't be used; "" if it can."""
        try:
            if self._part is None:
                copies = self._make()
                assert copies is not None
                self._part = PartOfTransfers(copies, self._rank)
            self._part.add(number, self._slabs.map(start, size))
        except (DovetailError, RuntimeError) as error:
            return describe(error)
        return ""

    def _report(self, waiting: SimpleQueue[tuple[int, Copying]]) -> None:
        """Report the copies of one direction, which end in order."""
        while True:
            number, copying = waiting.get()
            while not copying.done:
                time.sleep(POLL_S)
            self._slabs.report(self._rank, number, copying.checksums[0])


def to_words(number: int, transfer: Transfer) -> Words:
    """Return the message of a transfer."""
    pairs = np.array([number, transfer.offset, transfer.seed], np.uint64).view(np.int32)
    return np.concatenate(([transfer.slab], pairs, transfer.pages)).astype(np.int32)


def from_words(words: Words) -> tuple[int, Transfer]:
    """Return the number of a transfer, and the transfer without its id."""
    number, offset, seed = words[1:_HEAD].copy().view(np.uint64).tolist()
    return number, Transfer(0, int(words[0]), offset, tuple(words[_HEAD:].tolist()), seed)


def _answer(number: int) -> str:
    return f"slab {number}"


def _head_bytes(ranks: int) -> int:
    return _mappable((ranks - 1) * PLACES * _RESULT * 8)


def _mappable(size: int) -> int:
    """Return `size`, rounded up so that a mapping of the file may begin after it."""
    return -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
