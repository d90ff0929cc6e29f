"""Transfers on a clock: when they end, and what the fake executor's pages hold then."""

from __future__ import annotations

import math

import pytest

from dovetail.api.clock import VirtualClock
from dovetail.api.kv_transfers import Transfer, frame_checksum
from dovetail.testing.fake_pages import FakePages
from dovetail.testing.timed_transfers import TimedTransfers

SEED = 3


def test_each_direction_copies_at_its_rate_one_after_the_other() -> None:
    clock = VirtualClock(10.0)
    own = TimedTransfers(clock, "test", 8, rate=4.0)
    slab = own.allocate(1 << 10)
    for id in (1, 2):
        own.save(Transfer(id, slab.number, 0, (0,), SEED))
    own.restore(Transfer(3, slab.number, 8, (1,), SEED))
    ended = []
    for now in (11.9, 12.0, 13.9, 14.0, 20.0):
        clock.wait_until(now)
        ended.append([(each.id, each.checksum) for each in own.finished()])
    assert ended == [[], [(1, 0), (3, 0)], [], [(2, 0)], []]
    assert not any(slab.data), "without content nothing is copied"


def test_a_save_keeps_what_pages_held_and_a_restore_brings_it_elsewhere() -> None:
    pages = FakePages(slots=2)
    own = TimedTransfers(VirtualClock(), "test", pages.page_bytes, math.inf, pages)
    slab = own.allocate(1 << 10)
    written = {(3, 0): (0, 0, 17), (3, 1): (1, 2, (1 << 32) - 1), (5, 0): (0, 1, 0)}
    for place, what in written.items():
        pages[place] = what
    own.save(Transfer(1, slab.number, 16, (3, 5), SEED))
    pages[3, 0] = (0, 0, 99)
    own.restore(Transfer(2, slab.number, 16, (5, 8), SEED))
    assert pages.restoring == {5, 8}
    assert pages[5, 0] is None, "what is being restored holds nothing"
    first, second = own.finished()
    assert first.checksum == second.checksum == frame_checksum(slab.data[16:48], SEED)
    assert [pages[5, 0], pages[5, 1], pages[8, 0], pages[8, 1]] == [*written.values(), None]
    assert not pages.restoring


@pytest.mark.parametrize("bit", [0, 37, 63])
def test_damaged_bytes_are_other_tokens(bit: int) -> None:
    pages = FakePages(slots=1)
    own = TimedTransfers(VirtualClock(), "test", pages.page_bytes, math.inf, pages)
    slab = own.allocate(8)
    pages[0, 0] = (0, 0, 5)
    own.save(Transfer(1, slab.number, 0, (0,), SEED))
    (saved,) = own.finished()
    slab.data[bit // 8] ^= 1 << bit % 8
    own.restore(Transfer(2, slab.number, 0, (1,), SEED))
    (restored,) = own.finished()
    assert restored.checksum != saved.checksum
    assert pages[1, 0] != (0, 0, 5)
