"""`BlockingTier`: the order of its work, and what it logs. The suite of tiers checks the rest."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from dovetail.api.blocking_tier import BlockingTier
from dovetail.api.component import NoOptions
from dovetail.api.kv_tier import Frame, FrameKey, TierContext, Why
from dovetail.testing.suites.kv_tier_world import TierWorld


class Gated(BlockingTier):
    """A medium that stores only while `gate` is open, and fails while `error` is set."""

    threads = 3

    def __init__(self, options: NoOptions, context: TierContext) -> None:
        super().__init__(options, context)
        self.gate = threading.Event()
        self.error: OSError | None = None
        self.done_in_order: list[tuple[str, bytes]] = []

    def find_frame(self, key: FrameKey) -> Why | None:
        if self.error is not None:
            raise self.error
        return "missing"

    def store_frame(self, frame: Frame) -> Why | None:
        self.gate.wait()
        self.done_in_order.append(("store", frame.key.namespace))
        return None

    def load_frame(self, frame: Frame) -> Why | None:
        return "missing"

    def forget(self, namespace: bytes) -> None:
        self.done_in_order.append(("forget", namespace))


@pytest.fixture
def world() -> Iterator[TierWorld]:
    world = TierWorld(lambda context: Gated(NoOptions(), context), sizes=(64,))
    yield world
    world.tier.gate.set()  # type: ignore[attr-defined]
    world.close()


def tier_of(world: TierWorld) -> Gated:
    assert isinstance(world.tier, Gated)
    return world.tier


def test_finds_and_loads_wait_for_no_store(world: TierWorld) -> None:
    keys = world.keys(9)
    stores = [world.begin("store", keys) for _ in range(3)]
    for kind in ("find", "load"):
        assert world.do(kind, keys).why == "missing"
    assert not world.reported()
    tier_of(world).gate.set()
    assert all(all(done.ok) for done in world.reports(stores))


def test_a_drop_comes_after_running_stores_and_before_later_ones(world: TierWorld) -> None:
    namespace = b"d" * 32
    earlier = world.begin("store", world.keys(5, namespace))  # of which two run
    world.do("find", world.keys(1))  # which comes after them in the queue of no thread
    world.call("drop", namespace)
    later = world.begin("store", world.keys(1, namespace))
    other = world.keys(1)
    tier_of(world).gate.set()
    world.do("store", other)
    first, last = world.reports([earlier, later])
    assert all(last.ok)
    assert first.why == "missing"  # of those that hadn't begun
    mine = [act for act, of in tier_of(world).done_in_order if of == namespace]
    assert mine == ["store"] * sum(first.ok) + ["forget", "store"]


def test_an_error_is_logged_once_until_it_has_worked(
    world: TierWorld, caplog: pytest.LogCaptureFixture
) -> None:
    keys = world.keys(4)
    tier = tier_of(world)
    for _ in range(2):
        tier.error = ConnectionRefusedError("no server")
        for _ in range(3):
            assert world.do("find", keys).why == "unavailable"
        tier.error = None
        assert world.do("find", keys).why == "missing"
    said = "KV tier Gated: ConnectionRefusedError: no server; not logged again until the tier works"
    assert caplog.messages == [said] * 2


def test_a_thread_that_hangs_keeps_close_no_longer_than_its_timeout(world: TierWorld) -> None:
    world.begin("store", world.keys(1))
    world.close(0.05)  # returns
    assert not world.submit(world.job("find", world.keys(1)))
