"""Copies of K and V between the device's pages and host memory, made by an executor.

`Executor.transfers` returns this interface if the executor has it. The core decides what is copied
and when; it alone knows requests, tokens and names. Order is what keeps pages unchanged: a save is
enqueued after the steps submitted before it, and a page that the core frees afterwards is written
by later steps only. This module doesn't need torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

WORD = 8  # bytes of a word of a checksum
_STEP = 0x9E3779B97F4A7C15  # constants of SplitMix64: Steele, Lea, Flood, "Fast splittable
_MIX_1 = 0xBF58476D1CE4E5B9  # pseudorandom number generators", OOPSLA 2014
_MIX_2 = 0x94D049BB133111EB


def frame_multipliers(start: int, count: int) -> NDArray[np.uint64]:
    """Return the multipliers [count] of the words from number `start` on: odd, and fixed for ever,
    since checksums outlive the process."""
    x = np.arange(start + 1, start + count + 1, dtype=np.uint64) * np.uint64(_STEP)
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MIX_1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MIX_2)
    x ^= x >> np.uint64(31)
    return x | np.uint64(1)


def frame_checksum(data: memoryview | bytes, seed: int, start: int = 0) -> int:
    """Return the checksum of the words in `data`, the first of which has number `start` in its
    frame: the sum of word times (multiplier + 2 seed), modulo 2^64.

    The factors are odd, so that a change in one word changes the sum. The checksum of a frame is
    the sum of those of its parts, modulo 2^64. It finds faults, not forgeries.
    """
    words = np.frombuffer(data, np.uint64)
    factors = frame_multipliers(start, len(words)) + np.uint64(2 * seed % (1 << 64))
    return int((words * factors).sum(dtype=np.uint64))


@dataclass(frozen=True, slots=True)
class Slab:
    """A piece of host memory that the device copies to and from, pinned if that is faster."""

    number: int  # from 0 on, in the order of `allocate`
    data: memoryview  # [bytes] of unsigned bytes, writable


@dataclass(frozen=True, slots=True)
class Transfer:
    """One copy. The bytes of `pages` lie at `offset` of a slab: `KVTransfers.page_bytes` each, of
    all ranks, in an order of the executor's own. So a save is restored as a whole: with as many
    pages, in the same order."""

    id: int  # of the core; not in use by an unfinished transfer
    slab: int
    offset: int  # bytes, a multiple of 8
    # of a restore, `HOLE` for those that aren't wanted: their bytes are checked and written nowhere
    pages: tuple[int, ...]
    seed: int  # of the checksum: 64 bits, made of the frame's name


@dataclass(frozen=True, slots=True)
class Transferred:
    """A finished copy. `checksum`: `frame_checksum` of its bytes in the slab, as computed on the
    device's side: while saving, from the pages before they were copied; while restoring, from what
    was written to the pages."""

    id: int
    checksum: int


class KVTransfers(ABC):
    """Saves pages to host memory, and restores them. Its caller is that of the executor's other
    methods, between `Executor.start` and `stop`.

    `name`: names all that decides what the bytes of a page mean, besides the model, the `KVLayout`
    and the tokens: the attention backend and its version, the order of layers, the number of ranks,
    the scales of K and V. Bytes saved by an executor of another name can't be restored. It is new
    in each process if scales are only known after the first step (`kv_cache_scales: calibrate`).
    """

    name: str
    page_bytes: int  # of a page, of all ranks together; a multiple of 8

    @abstractmethod
    def allocate(self, size: int) -> Slab:
        """Return new memory of `size` bytes. It may take a second (pinned memory does), so another
        thread than that of the other methods calls it, one at a time. Raises `DovetailError` if it
        can't be had."""

    @abstractmethod
    def save(self, transfer: Transfer) -> None:
        """Enqueue the copy of pages to host memory. It reads them after all steps submitted so far,
        and before those submitted from now on write them."""

    @abstractmethod
    def restore(self, transfer: Transfer) -> None:
        """Enqueue the copy of host memory to pages. It writes them after all steps submitted so
        far. No step reads these pages before `finished` has returned the transfer. Slower than a
        step's own work is fine: it must not delay the steps submitted meanwhile."""

    @abstractmethod
    def finished(self) -> Sequence[Transferred]:
        """Return the transfers that have ended since the last call, in any order. Doesn't wait."""

    def save_capacity(self) -> int:
        """Return how many bytes of saves can be enqueued now without delaying steps, such as the
        device's memory for staging that is free."""
        return 1 << 62
