"""The ring of shared memory through which rank 0 sends batches to the other ranks, and the pipes that wake them.

      published ────────────────────┐            one writer, several readers, each with a place of its own; all count words since the start
      ┌──────┬───────────┬──────────▼──┬─────┐
      │ head │ …………………… │ message     │     │   message: kind, sequence number, length, then so many words
      └──────┴─▲─────────┴──────▲──────┴─────┘
       taken by rank 1     taken by rank 2

The memory has no name: processes inherit it, and when the last is gone, so is it. A message may be larger than the ring: it is written as readers
make room. A reader spins for a moment and then waits at its pipe, which tells it as well when the writer is gone.
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
FULL_POLL_S = 50e-6  # how often the writer looks whether readers have made room
HEAD = 3  # words before a message
_LINE = 8  # int64 numbers in a line of a processor's cache: counters of different ranks keep out of each other's
_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64")  # what one core writes, others see in the same order; else pipes see to it


class Kind(IntEnum):
    """The kind of a message."""

    STEP = 1  # a batch to submit: `dovetail.runtime.batch_words`
    SAMPLE = 2  # the masks of the late batch before it, to sample by


class WriterGone(Exception):
    """The writer has closed the ring, or is dead."""


class Ring:
    """The memory: `counters` [1 + readers, 8] int64 and `words` [size] int32. `counters[0, 0]` words are published; reader i has taken
    `counters[1 + i, 0]` words, begun with `[1 + i, 1]` messages and is through with `[1 + i, 2]`."""

    def __init__(self, fd: int, readers: int, size: int) -> None:
        """`fd` is a file of the size that `make` gave it."""
        self.fd, self.readers = fd, readers
        head = _head_bytes(readers)
        memory = mmap.mmap(fd, head + 4 * size)  # let go of with the arrays
        self.counters = np.frombuffer(memory, np.int64, (1 + readers) * _LINE).reshape(1 + readers, _LINE)
        self.words = np.frombuffer(memory, np.int32, size, head)

    def close(self) -> None:
        """Let go of the memory, which nobody may use any more."""
        self.counters, self.words = np.zeros((1 + self.readers, _LINE), np.int64), np.zeros(1, np.int32)

    @classmethod
    def make(cls, readers: int, size: int = RING_WORDS) -> Ring:
        """Return a new ring. Its file is to be closed by who made it."""
        fd = os.memfd_create("dovetail-ring")
        os.ftruncate(fd, _head_bytes(readers) + 4 * size)
        return cls(fd, readers, size)


class RingWriter:
    """Sends messages to all readers."""

    def __init__(self, ring: Ring, wakers: Sequence[int], check: Callable[[], None]) -> None:
        """`wakers` are the ends of the readers' pipes, which don't block. `check` is called while the writer waits for readers: it may raise."""
        self._ring, self._wakers, self._check = ring, wakers, check
        self._written = 0  # words
        self.sent = 0  # messages

    def send(self, kind: Kind, arrays: Sequence[Words]) -> None:
        """Send a message that consists of these arrays. Returns once it is in the ring."""
        self.sent += 1
        head = np.array([kind, self.sent & 0x7FFFFFFF, sum(map(len, arrays))], np.int32)
        self._write(np.concatenate((head, *arrays)))
        self._publish()

    def done(self) -> list[int]:
        """Return how many messages each reader is through with."""
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
            with suppress(BlockingIOError, BrokenPipeError):  # full: it has wakes enough; broken: the watch will tell
                os.write(waker, place)


class RingReader:
    """Takes the messages of one reader."""

    def __init__(self, ring: Ring, index: int, waker: int) -> None:
        """`waker` is the pipe's end that is read."""
        self._ring, self._waker = ring, waker
        self._own = ring.counters[1 + index]
        self._taken = self._known = 0  # words; those that are known to be published
        self._messages = 0

    def next(self) -> tuple[Kind, Words]:
        """Wait for the next message, and return it in memory of its own. Raises `WriterGone`."""
        kind, sequence, length = self._take(HEAD).tolist()
        self._messages += 1
        if sequence != self._messages & 0x7FFFFFFF:
            raise RuntimeError(f"message {self._messages} of the ring bears the number {sequence}")
        words = self._take(length)
        self._own[1] = self._messages
        return Kind(kind), words

    def done(self) -> None:
        """Tell that the last message has been dealt with."""
        self._own[2] = self._messages

    def _take(self, count: int) -> Words:
        words, size, got = np.empty(count, np.int32), len(self._ring.words), 0
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
