"""The host pool: what is found, what makes room, and what doesn't."""

from __future__ import annotations

import random

import pytest

from dovetail.api.kv_transfers import Slab
from dovetail.engine.tiers.host_pool import HostFrame, HostPool
from dovetail.engine.tiers.keys import HEADER_BYTES, FrameName
from dovetail.errors import ConfigError, DovetailError

SIZES = (192, 448)
LIMIT = 8192


class Memory:
    """Allocates slabs, of `most` bytes in all."""

    def __init__(self, most: int = 1 << 20) -> None:
        self.slabs: list[Slab] = []
        self.left = most

    def allocate(self, size: int) -> Slab:
        self.left -= size
        if self.left < 0:
            raise DovetailError("no more")
        self.slabs.append(Slab(len(self.slabs), memoryview(bytearray(size))))
        return self.slabs[-1]


def name(number: int, size: int = SIZES[0]) -> FrameName:
    return FrameName(SIZES.index(size), number.to_bytes(32, "big"))


def filled(pool: HostPool, number: int, size: int = SIZES[0]) -> HostFrame | None:
    """Publish a frame that nobody uses, full of its number."""
    frame = pool.take(size)
    if frame is not None:
        frame.data[:] = bytes([number % 256]) * len(frame.data)
        assert pool.publish(frame, name(number, size))
        pool.release(frame)
    return frame


def test_frames_of_a_full_pool_make_room_from_the_least_recently_used() -> None:
    pool = HostPool(Memory().allocate, LIMIT, SIZES[:1])
    count = 0
    while len([*filter(None, [pool.find(name(number)) for number in range(count)])]) == count:
        filled(pool, count)
        count += 1
    assert pool.find(name(0)) is None
    assert pool.find(name(1)) is not None  # used now
    filled(pool, count)
    assert pool.find(name(1)) is not None
    assert pool.find(name(2)) is None
    pool.check_integrity()


def test_a_frame_in_use_stays_whatever_else_is_taken() -> None:
    pool = HostPool(Memory().allocate, LIMIT, SIZES)
    for size in SIZES:
        filled(pool, 1, size)
        kept = pool.find(name(1, size))
        assert kept is not None
        pool.hold(kept)
        for number in range(2, 200):
            filled(pool, number, size)
        assert bytes(kept.data) == b"\x01" * len(kept.data)
        assert pool.find(name(1, size)) is kept
        pool.release(kept)
    pool.check_integrity()


def test_what_may_not_evict_gets_nothing_from_a_full_pool() -> None:
    pool = HostPool(Memory().allocate, LIMIT, SIZES)
    while (frame := pool.take(SIZES[0], evicts=False)) is not None:
        pool.publish(frame, name(frame.slab * LIMIT + frame.offset))
        pool.release(frame)
    frames = pool.frames
    assert pool.take(SIZES[0], evicts=False) is None
    assert pool.frames == frames > 0
    assert pool.take(SIZES[0]) is not None


def test_a_size_without_memory_takes_that_of_another() -> None:
    pool = HostPool(Memory().allocate, LIMIT, SIZES)
    while pool.take(SIZES[1], evicts=False) is not None:
        pass
    assert pool.take(SIZES[0]) is None  # all is in use
    pool = HostPool(Memory().allocate, LIMIT, SIZES)
    for number in range(200):
        filled(pool, number, SIZES[1])
    assert filled(pool, 1, SIZES[0]) is not None
    pool.check_integrity()


def test_a_dropped_frame_is_not_found_and_its_memory_is_used_again_once_it_is_released() -> None:
    pool = HostPool(Memory().allocate, LIMIT, SIZES)
    filled(pool, 1)
    frame = pool.find(name(1))
    assert frame is not None
    pool.hold(frame)
    pool.drop(name(1))
    assert pool.find(name(1)) is None
    others = {filled(pool, number) for number in range(2, 200)}
    assert frame not in others
    pool.release(frame)
    assert frame in {filled(pool, number) for number in range(200, 400)}
    pool.check_integrity()


def test_a_second_frame_of_a_name_is_not_published() -> None:
    pool = HostPool(Memory().allocate, LIMIT, SIZES)
    filled(pool, 1)
    frame = pool.take(SIZES[0])
    assert frame is not None
    assert not pool.publish(frame, name(1))
    pool.release(frame)
    assert pool.frames == 1
    pool.check_integrity()


def test_frames_of_a_pool_lie_apart() -> None:
    memory = Memory()
    pool = HostPool(memory.allocate, LIMIT, SIZES)
    taken = [frame for size in SIZES for _ in range(99) if (frame := pool.take(size)) is not None]
    places: set[tuple[int, int]] = set()
    for frame in taken:
        assert frame.offset % 8 == 0
        assert frame.pages_at == frame.offset + HEADER_BYTES
        mine = {(frame.slab, byte) for byte in range(frame.offset, frame.offset + len(frame.data))}
        assert not mine & places
        places |= mine
        frame.data[0] = 77
        assert memory.slabs[frame.slab].data[frame.offset] == 77
    assert len(places) <= sum(len(slab.data) for slab in memory.slabs) <= LIMIT


def test_too_little_memory_is_refused_with_what_is_needed() -> None:
    with pytest.raises(ConfigError, match="give it at least 1024"):
        HostPool(Memory().allocate, 900, SIZES)


def test_memory_that_cannot_be_had_makes_a_smaller_pool(caplog: pytest.LogCaptureFixture) -> None:
    pool = HostPool(Memory(LIMIT // 2).allocate, LIMIT, SIZES[:1])
    assert filled(pool, 1) is not None
    assert "no more can be had" in caplog.text
    pool.check_integrity()


@pytest.mark.parametrize("seed", range(6))
def test_any_use_leaves_each_frame_in_one_state(seed: int) -> None:
    chance = random.Random(seed)
    pool = HostPool(Memory().allocate, LIMIT, SIZES)
    held: list[HostFrame] = []
    for _ in range(400):
        act = chance.randrange(6)
        size = chance.choice(SIZES)
        frame = None
        if act == 0:
            frame = pool.take(size, evicts=chance.random() < 0.7)
        elif act == 1 and held:
            one = held[-1]
            if one.name is None:
                pool.publish(one, name(chance.randrange(30), SIZES[len(one.data) > 256]))
        elif act == 2:
            frame = pool.find(name(chance.randrange(30), size))
            if frame is not None:
                pool.hold(frame)
        elif act == 3 and held:
            pool.release(held.pop(chance.randrange(len(held))))
        elif act == 4:
            pool.drop(name(chance.randrange(30), size))
        elif chance.random() < 0.1:
            pool.clear()
        if frame is not None:
            held.append(frame)
        assert all(one.users for one in held)
        pool.check_integrity()
    for one in held:
        pool.release(one)
    pool.clear()
    pool.check_integrity()
    assert (pool.frames, pool.bytes) == (0, 0)
