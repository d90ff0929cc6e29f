"""The KV tier `simulated_disk`: times on the clock, and the limit of its size."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.api.clock import VirtualClock, WallClock
from dovetail.api.kv_tier import Frame, FrameKey, Job, TierContext
from dovetail.errors import ConfigError
from dovetail_lab.simulated_disk import SimulatedDisk, SimulatedDiskOptions


def key(number: int) -> FrameKey:
    return FrameKey(bytes(32), number.to_bytes(32, "big"))


def frame(number: int, byte: int = 0) -> Frame:
    return Frame(key(number), memoryview(bytearray([byte]) * 1000))


def disk(clock: VirtualClock, size: int = 2500) -> SimulatedDisk:
    options: Any = {"size": size, "read_gbps": 1e-6, "write_gbps": 2e-6, "latency_s": 0.25}
    return SimulatedDisk(SimulatedDiskOptions(**options), TierContext(clock, lambda: None))


def stored(tier: SimulatedDisk, clock: VirtualClock, *frames: Frame) -> None:
    tier.submit(Job(0, "store", tuple(each.key for each in frames), frames))
    clock.wait_until(clock.now() + 100)
    [done] = tier.done()
    assert all(done.ok)


def test_jobs_of_a_direction_take_their_time_one_after_the_other() -> None:
    clock = VirtualClock()
    tier = disk(clock)
    stored(tier, clock, frame(1, 7), frame(2, 8))
    start = clock.now()
    target = frame(2)
    for number in (1, 2):
        tier.submit(Job(number, "load", (key(2),), (target,)))
    clock.wait_until(start + 1.2)
    assert not tier.done()
    clock.wait_until(start + 1.3)
    assert [done.job for done in tier.done()] == [1]
    assert target.data[0] == 8
    clock.wait_until(start + 2.3)
    assert [done.job for done in tier.done()] == [2]


def test_the_least_recently_used_frames_make_room() -> None:
    clock = VirtualClock()
    tier = disk(clock)
    stored(tier, clock, frame(1), frame(2))
    tier.submit(Job(1, "load", (key(1),), (frame(1),)))
    clock.wait_until(clock.now() + 100)
    tier.done()
    stored(tier, clock, frame(3))
    tier.submit(Job(2, "find", (key(1), key(2), key(3))))
    clock.wait_until(clock.now() + 1)
    [done] = tier.done()
    assert done.ok == (True, False, True)


def test_it_is_refused_where_time_is_real() -> None:
    context = TierContext(WallClock(), lambda: None)
    with pytest.raises(ConfigError, match="the tier `disk`"):
        SimulatedDisk(SimulatedDiskOptions(size=1), context)  # type: ignore[arg-type]
