"""The ring that carries batches to the ranks: every reader gets every message, complete and in
order, for any sizes; and no process waits for dead ones.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np
import pytest

from dovetail_executors.ring import Kind, Ring, RingReader, RingWriter, Words, WriterGone
from tests.support import FULL

LIMIT_S = 60


@dataclass
class Ends:
    """A ring with its ends."""

    writer: RingWriter
    readers: list[RingReader]
    pipes: list[int] = field(default_factory=list)

    def hang_up(self) -> None:
        while self.pipes:
            os.close(self.pipes.pop())


@contextmanager
def ring(readers: int, size: int, check: Callable[[], None] = lambda: None) -> Iterator[Ends]:
    memory, pipes = Ring.make(readers, size), [os.pipe() for _ in range(readers)]
    for _, write in pipes:
        os.set_blocking(write, False)
    ends = Ends(
        RingWriter(memory, [write for _, write in pipes], check),
        [
            RingReader(Ring(memory.fd, readers, size), index, read)
            for index, (read, _) in enumerate(pipes)
        ],
        [write for _, write in pipes],
    )
    try:
        yield ends
    finally:
        ends.hang_up()
        for fd in (memory.fd, *(read for read, _ in pipes)):
            os.close(fd)


def messages(count: int, longest: int) -> list[list[Words]]:
    """Each in one or more arrays."""
    chance = random.Random(3)
    lens = [
        [chance.randrange(longest) for _ in range(chance.randrange(1, 4))] for _ in range(count)
    ]
    return [
        [np.array([chance.randrange(2**31) for _ in range(length)], np.int32) for length in each]
        for each in lens
    ]


def all_of(reader: RingReader) -> list[list[int]]:
    taken = []
    with suppress(WriterGone):
        while True:
            _, words = reader.next()
            taken.append(words.tolist())
            reader.done()
    return taken


@pytest.mark.parametrize("longest", [5, 300], ids=["many fit", "larger than the ring"])
def test_every_reader_gets_every_message_whole_and_in_order(longest: int) -> None:
    sent = messages(2000 if FULL else 300, longest)
    with ring(readers=3, size=64) as ends, ThreadPoolExecutor(3) as pool:
        taken = [pool.submit(all_of, reader) for reader in ends.readers]
        for each in sent:
            ends.writer.send(Kind.STEP, each)
        ends.hang_up()
        expected = [np.concatenate(each).tolist() for each in sent]
        assert all(future.result(LIMIT_S) == expected for future in taken)
        assert ends.writer.done() == [len(sent)] * 3


def test_a_reader_waits_without_computing_and_is_woken_when_the_writer_ends() -> None:
    with ring(readers=1, size=64) as ends, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ends.readers[0].next)
        ends.hang_up()
        with pytest.raises(WriterGone):
            waiting.result(LIMIT_S)


def test_what_was_sent_before_the_end_is_still_read() -> None:
    with ring(readers=1, size=64) as ends:
        ends.writer.send(Kind.STEP, [np.arange(3, dtype=np.int32)])
        ends.hang_up()
        assert all_of(ends.readers[0]) == [[0, 1, 2]]


def test_a_writer_does_not_wait_forever_for_a_dead_reader() -> None:
    def check() -> None:
        raise TimeoutError("rank 1 is dead")

    with (
        ring(readers=2, size=64, check=check) as ends,
        pytest.raises(TimeoutError, match="rank 1 is dead"),
    ):
        ends.writer.send(Kind.STEP, [np.zeros(100, np.int32)])


def test_it_is_told_which_readers_are_behind() -> None:
    with ring(readers=2, size=64) as ends:
        for _ in range(2):
            ends.writer.send(Kind.STEP, [np.zeros(1, np.int32)])
        ends.readers[1].next()
        ends.readers[1].done()
        assert ends.writer.done() == [0, 1]
