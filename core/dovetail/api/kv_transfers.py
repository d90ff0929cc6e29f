"""Copies of K and V between device pages and host memory, made by an executor.

`Executor.transfers` returns this interface if the executor supports it. The core decides what is
copied and when; only the core knows requests, tokens and names. Ordering keeps saved pages intact:
a save is enqueued after the steps submitted before it, and only later steps write to pages that the
core frees afterwards. This module doesn't need torch.
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


def frame_multipliers(count: int) -> NDArray[np.uint64]:
    """Return the multipliers [count] of a frame's first words. They are odd, and must never change,
    since checksums outlive the process."""
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP)
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MIX_1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MIX_2)
    x ^= x >> np.uint64(31)
    return x | np.uint64(1)


def frame_checksum(data: memoryview | bytes, seed: int) -> int:
    """Return the checksum of a frame's 8-byte words `data`: the sum of
    word * (multiplier + 2 * seed), modulo 2^64.

    The factors are odd, so any change of one word changes the sum. Parts of a frame can be summed
    separately, each with the multipliers of its words. It detects faults, not forgeries.
    """
    words = np.frombuffer(data, np.uint64)
    factors = frame_multipliers(len(words)) + np.uint64(2 * seed % (1 << 64))
    return int((words * factors).sum(dtype=np.uint64))


@dataclass(frozen=True, slots=True)
class Slab:
    """Block of host memory that the device copies to and from, pinned if that is faster."""

    number: int  # from 0 on, in the order of `allocate`
    data: memoryview  # [bytes] of unsigned bytes, writable


@dataclass(frozen=True, slots=True)
class Transfer:
    """One copy. The bytes of `pages` are at `offset` in a slab: `KVTransfers.page_bytes` each, of
    all ranks, in an order that the executor chooses. A save is therefore restored as a whole: the
    same number of pages in the same order."""

    id: int  # chosen by the core; not in use by an unfinished transfer
    slab: int
    offset: int  # bytes, a multiple of 8
    # in a restore, `HOLE` for pages to skip: their bytes count for the checksum and aren't written
    pages: tuple[int, ...]
    seed: int  # of the checksum: 64 bits, drawn at random for each save


@dataclass(frozen=True, slots=True)
class Transferred:
    """A finished copy. `checksum`: `frame_checksum` of its bytes in the slab, computed on the
    device: of a save, from the pages before the copy; of a restore, from the bytes that arrived."""

    id: int
    checksum: int


class KVTransfers(ABC):
    """Saves pages to host memory, and restores them. Used by the caller of the executor's other
    methods, between `Executor.start` and `stop`.

    `name`: identifies everything that determines the meaning of a page's bytes, besides the model,
    the `KVLayout` and the tokens: the attention backend and its version, the order of layers, the
    number of ranks, the scales of K and V. Bytes saved under another name can't be restored. It is
    new in each process if scales are known only after the first step (`kv_cache_scales:
    calibrate`).
    """

    name: str
    page_bytes: int  # size of a page, over all ranks; a multiple of 8

    @abstractmethod
    def allocate(self, size: int) -> Slab:
        """Return `size` bytes of new memory. This may take a second, as for pinned memory, so it
        may be called from another thread than the other methods, one call at a time. Raises
        `DovetailError` if the memory isn't available."""

    @abstractmethod
    def save(self, transfer: Transfer) -> None:
        """Enqueue the copy of pages to host memory. It reads the pages after all steps submitted so
        far, and before steps submitted later write to them."""

    @abstractmethod
    def restore(self, transfer: Transfer) -> None:
        """Enqueue the copy of host memory to pages. It writes the pages after all steps submitted
        so far. No step reads them until `finished` has returned the transfer. The copy may be slow,
        but must not delay the steps submitted meanwhile."""

    @abstractmethod
    def finished(self) -> Sequence[Transferred]:
        """Return the transfers that have ended since the last call, in any order, without
        waiting."""

    def save_all(self, transfers: Sequence[Transfer]) -> None:
        """Enqueue several saves, at least one, as `save` in their order. Override it if that takes
        the host less time together, during which it can't plan a step."""
        for transfer in transfers:
            self.save(transfer)

    def restore_all(self, transfers: Sequence[Transfer]) -> None:
        """Enqueue several restores, at least one, as `restore` in their order: like `save_all`.
        Those enqueued together may end together."""
        for transfer in transfers:
            self.restore(transfer)

    def save_capacity(self) -> int:
        """Return how many bytes of saves can be enqueued now without delaying steps, such as the
        free staging memory of the device."""
        return 1 << 62
