"""The measured rate of a tier is that of its medium, however many loads share it."""

from __future__ import annotations

import logging
from itertools import count

import pytest

from dovetail.api.clock import VirtualClock
from dovetail.api.kv_tier import FrameKey
from dovetail.api.kv_transfers import Slab
from dovetail.engine.tiers.host_pool import HostPool
from dovetail.engine.tiers.keys import HEADER_BYTES, FrameName, header
from dovetail.engine.tiers.stats import TierStats
from dovetail.engine.tiers.tier_jobs import TierJobs
from tests.tiers.tiered import ToyTier

SIZE = 1_000  # bytes of a frame's pages
SPACE = b"namespace"


class Loads:
    """A tier with frames, each of whose jobs takes 2 s."""

    def __init__(self, limit: int = 100 * SIZE) -> None:
        self.clock = VirtualClock()
        self.stats = TierStats()
        self.tier = ToyTier(self.clock, seconds=2.0)
        self.pool = HostPool(lambda size: Slab(0, memoryview(bytearray(size))), limit, [SIZE])
        self.jobs = TierJobs("toy", self.tier, self.pool, self.clock, count(1), self.stats)
        self.jobs.namespaces = [SPACE]

    def begin(self, name: bytes, within_s: float = 10.0, *, damaged: bool = False) -> None:
        key = FrameKey(SPACE, name)
        top = b"" if damaged else header(key, SIZE, 0, 0)
        self.tier.kept[key] = top.ljust(HEADER_BYTES + SIZE, b"\0")
        frame = self.pool.take(SIZE)
        assert frame is not None
        names = [FrameName(0, name)]
        assert self.jobs.load(names, [frame], self.clock.now(), within_s, lambda ok: None)

    def wait(self, until: float) -> None:
        self.clock.wait_until(until)
        self.jobs.poll(until)


@pytest.mark.parametrize("together", [1, 2, 4])
def test_the_rate_counts_all_loads_that_run_together(together: int) -> None:
    loads = Loads()
    for number in range(together):
        loads.begin(b"%d" % number)
    assert loads.jobs.loading_bytes == together * SIZE
    loads.wait(2.0)
    assert loads.jobs.rate == pytest.approx(together * SIZE / 2.0)
    assert loads.stats.load_s["toy"] == pytest.approx(2.0)
    assert loads.jobs.loading_bytes == 0


def test_loads_that_overlap_share_only_the_time_in_which_both_run() -> None:
    loads = Loads()
    loads.begin(b"first")
    loads.wait(1.0)
    loads.begin(b"second")
    loads.wait(2.0)
    assert loads.jobs.rate == pytest.approx(SIZE / 1.5)
    loads.wait(3.0)
    assert loads.stats.load_s["toy"] == pytest.approx(3.0)


def test_a_load_that_is_late_takes_no_share() -> None:
    loads = Loads()
    loads.begin(b"late", within_s=0.5)
    loads.wait(0.5)
    loads.begin(b"second")
    loads.wait(2.0)
    loads.wait(2.5)
    assert loads.jobs.rate == pytest.approx(SIZE / 2.0)


def test_a_frame_waits_for_its_tier_even_in_the_smallest_pool() -> None:
    loads = Loads(limit=2 * (HEADER_BYTES + SIZE))
    for number in range(2):
        frame = loads.pool.take(SIZE)
        assert frame is not None
        loads.pool.publish(frame, FrameName(0, b"%d" % number))
        loads.jobs.store(frame, 0.0)
    assert loads.stats.dropped_frames == {"slow": 1}
    loads.wait(0.0)
    loads.wait(2.0)
    assert loads.stats.stored_frames == {"toy": 1}


def test_damage_is_told_seldom(caplog: pytest.LogCaptureFixture) -> None:
    loads = Loads()
    with caplog.at_level(logging.WARNING):
        for number in range(9):
            loads.begin(b"%d" % number, damaged=True)
            loads.wait(2.0 * (number + 1))
    told = [record.getMessage() for record in caplog.records]
    assert [text.split()[0] for text in told] == ["1", "2", "4", "8"]
    assert all("KV tier toy" in text for text in told)
