"""Ring buffer in shared memory by which rank 0 sends batches to the other ranks, with pipes that
wake them.

      published ────────────────────┐            one writer; several readers, each with its own position; all count words since the start
      ┌──────┬───────────┬──────────▼──┬─────┐
      │ head │ …………………… │ message     │     │   message: kind, sequence number, length, then so many words
      └──────┴─▲─────────┴──────▲──────┴─────┘
       taken by rank 1     taken by rank 2

The memory is anonymous: processes inherit it, and it is freed with the last one. A message may be
larger than the ring: it is written as readers make room. A reader spins briefly and then blocks on
its pipe, which also reports the end of the writer.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int32]

RING_WORDS = 1 << 20
SPIN_S = 50e-6
FULL_POLL_S = 50e-6  # between the writer's checks for room
HEAD = 3  # words before a message
_LINE = 8  # int64 numbers per cache line: counters of different ranks don't share one
# stores become visible in order; otherwise pipes provide the ordering
_IN_ORDER = platform.machine().lower() in (
    "x86_64",
    "amd64",
)


class Kind(IntEnum):
    """The kind of a message."""

    STEP = 1  # a batch to submit: `dovetail_executors.runtime.batch_words`
    SAMPLE = 2  # the masks of the late batch before it, to sample by
    SAVE = 3  # pages to copy to host memory: `dovetail_executors.rank_transfers`
    RESTORE = 4  # pages to copy from there
    FINISH_START = 5  # nothing: see `Executor.finish_start`


class WriterGone(Exception):
    """The writer has closed the ring or is dead."""


class Ring:
    """The memory: `counters` [1 + readers, 8] int64 and `words` [size] int32. `counters[0, 0]`
    words are published; reader i has taken `counters[1 + i, 0]` words, begun with `[1 + i, 1]`
    messages and is through with `[1 + i, 2]`."""

    def __init__(self, fd: int, readers: int, size: int) -> None:
        """`fd` is a file of the size that `make` gave it."""
        self.fd = fd
        self.readers = readers
        head = _head_bytes(readers)
        memory = mmap.mmap(fd, head + 4 * size)  # freed with the arrays
        self.counters = np.frombuffer(memory, np.int64, (1 + readers) * _LINE).reshape(
            1 + readers, _LINE
        )
        self.words = np.frombuffer(memory, np.int32, size, head)

    def close(self) -> None:
        """Release the memory."""
        self.counters, self.words = (
            np.zeros((1 + self.readers, _LINE), np.int64),
            np.zeros(1, np.int32),
        )

    @classmethod
    def make(cls, readers: int, size: int = RING_WORDS) -> Ring:
        """Return a new ring. The caller closes its file."""
        fd = os.memfd_create("dovetail-ring")
        os.ftruncate(fd, _head_bytes(readers) + 4 * size)
        return cls(fd, readers, size)


class RingWriter:
    """Sends messages to all readers."""

    def __init__(self, ring: Ring, wakers: Sequence[int], check: Callable[[], None]) -> None:
        """`wakers`: non-blocking write ends of the readers' pipes. `check` is called while waiting
        for readers; it may raise."""
        self._ring = ring
        self._wakers = wakers
        self._check = check
        self._written = 0  # words
        self.sent = 0  # messages

    def send(self, kind: Kind, arrays: Sequence[Words]) -> None:
        """Send a message of these arrays. Returns once it is in the ring."""
        self.sent += 1
        head = np.array([kind, self.sent & 0x7FFFFFFF, sum(map(len, arrays))], np.int32)
        self._write(np.concatenate((head, *arrays)))
        self._publish()

    def done(self) -> list[int]:
        """Return the number of messages that each reader has finished."""
        return [int(done) for done in self._ring.counters[1:, 2]]

    def _write(self, array: Words) -> None:
        size = len(self._ring.words)
        while len(array):
            room = self._room(size)
            at = self._written % size
            count = min(len(array), room, size - at)
            self._ring.words[at : at + count] = array[:count]
            self._written += count
            array = array[count:]

    def _room(self, size: int) -> int:
        """Return how many words can be written, 1 or more."""
        taken = self._ring.counters[1:, 0]
        while (room := size - self._written + int(taken.min())) == 0:
            self._publish()
            self._check()
            time.sleep(FULL_POLL_S)
        return room

    def _publish(self) -> None:
        self._ring.counters[0, 0] = self._written
        place = self._written.to_bytes(8, "little")
        for waker in self._wakers:
            with suppress(
                BlockingIOError, BrokenPipeError
            ):  # full: it will wake anyway; broken: the watch reports it
                os.write(waker, place)


class RingReader:
    """Receives the messages of one reader."""

    def __init__(self, ring: Ring, index: int, waker: int) -> None:
        """`waker`: read end of its pipe."""
        self._ring = ring
        self._waker = waker
        self._own = ring.counters[1 + index]
        self._taken = self._known = 0  # words; those that are known to be published
        self._messages = 0

    def next(self) -> tuple[Kind, Words]:
        """Wait for the next message and return a copy. Raises `WriterGone`."""
        kind, sequence, length = self._take(HEAD).tolist()
        self._messages += 1
        if sequence != self._messages & 0x7FFFFFFF:
            raise RuntimeError(f"message {self._messages} of the ring has the number {sequence}")
        words = self._take(length)
        self._own[1] = self._messages
        return Kind(kind), words

    def done(self) -> None:
        """Mark the last message as finished."""
        self._own[2] = self._messages

    def _take(self, count: int) -> Words:
        words = np.empty(count, np.int32)
        size = len(self._ring.words)
        got = 0
        while got < count:
            if self._known == self._taken:
                self._wait()
            at = self._taken % size
            part = min(count - got, self._known - self._taken, size - at)
            words[got : got + part] = self._ring.words[at : at + part]
            got += part
            self._taken += part
            self._own[0] = self._taken
        return words

    def _wait(self) -> None:
        """Wait until more is published than was taken."""
        published = self._ring.counters[0]
        until = time.perf_counter() + SPIN_S
        while _IN_ORDER:
            self._known = int(published[0])
            if self._known > self._taken:
                return
            if time.perf_counter() > until:
                break
        while self._known <= self._taken:
            told = os.read(self._waker, 1 << 16)  # numbers of 8 bytes, which are written whole
            if not told:
                raise WriterGone
            self._known = int(published[0]) if _IN_ORDER else int.from_bytes(told[-8:], "little")


def _head_bytes(readers: int) -> int:
    return (1 + readers) * _LINE * 8
