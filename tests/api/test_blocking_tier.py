"""`BlockingTier`: the order of its work, and what it logs. The suite of tiers checks the rest."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from dovetail.api.blocking_tier import BlockingTier
from dovetail.api.component import NoOptions
from dovetail.api.kv_tier import Frame, FrameKey, TierContext, Why
from dovetail.testing.checks import CheckFailed
from dovetail.testing.suites.kv_tier_world import TierWorld


class Gated(BlockingTier):
    """A medium that stores only while `gate` is open, and fails while `error` is set."""

    threads = 3

    def __init__(self, options: NoOptions, context: TierContext) -> None:
        super().__init__(options, context)
        self.gate = threading.Event()
        self.error: OSError | None = None
        self.done_in_order: list[tuple[str, bytes]] = []
        self.stores = threading.Event()
        self.disconnected = threading.Event()

    def find_frame(self, key: FrameKey) -> Why | None:
        if self.error is not None:
            raise self.error
        return "missing"

    def store_frame(self, frame: Frame) -> Why | None:
        self.stores.set()
        self.gate.wait()
        self.done_in_order.append(("store", frame.key.namespace))
        return None

    def load_frame(self, frame: Frame) -> Why | None:
        return "missing"

    def forget(self, namespace: bytes) -> None:
        self.done_in_order.append(("forget", namespace))

    def disconnect(self) -> None:
        self.done_in_order.append(("disconnect", b""))
        self.disconnected.set()
        if self.error is not None:
            raise self.error


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


def test_close_disconnects_once(world: TierWorld) -> None:
    world.do("find", world.keys(1))
    for _ in range(2):
        world.close()
        assert tier_of(world).done_in_order == [("disconnect", b"")]


def test_nothing_is_disconnected_until_a_call_that_hangs_returns(world: TierWorld) -> None:
    tier = tier_of(world)
    [key] = world.keys(1)
    world.begin("store", [key])
    tier.stores.wait()
    world.close(0.05)  # returns
    assert not tier.disconnected.is_set()
    tier.gate.set()
    assert tier.disconnected.wait(10.0)
    assert tier.done_in_order == [("store", key.namespace), ("disconnect", b"")]


def test_an_error_of_disconnect_is_logged(
    world: TierWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world.do("find", world.keys(1))
    tier_of(world).error = ConnectionResetError("gone")
    world.close()
    assert "KV tier Gated: ConnectionResetError: gone" in caplog.text


def test_a_tier_without_jobs_starts_no_thread_and_is_not_disconnected(world: TierWorld) -> None:
    before = threading.active_count()
    world.close()
    assert threading.active_count() == before
    assert not tier_of(world).done_in_order


def test_no_name_of_a_subclass_replaces_a_private_one_of_the_base_class(world: TierWorld) -> None:
    private = {name for name in (*vars(BlockingTier), *vars(world.tier)) if name.startswith("_")}
    taken = {name for name in private if not name.startswith("_BlockingTier__")}
    assert all(name.startswith("__") or name == "_abc_impl" for name in taken)


@pytest.mark.parametrize("error", [ConnectionRefusedError("no server"), TypeError("a mistake")])
def test_a_mistake_is_logged_with_its_traceback_and_a_lost_medium_is_not(
    world: TierWorld, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    world.tier.error = error  # type: ignore[attr-defined]
    world.do("find", world.keys(1))
    world.tier.error = None  # type: ignore[attr-defined]
    [record] = caplog.records
    assert str(error) in record.getMessage()
    assert bool(record.exc_info) == isinstance(error, TypeError)


def test_the_suite_says_why_a_tier_stores_nothing() -> None:
    error = ConnectionRefusedError("no server")

    class Unreachable(Gated):
        def store_frame(self, frame: Frame) -> Why | None:
            raise error

    world = TierWorld(lambda context: Unreachable(NoOptions(), context), sizes=(64,))
    with pytest.raises(CheckFailed, match=r"frames weren't stored: .*no server") as failed:
        world.store(world.keys(2))
    assert failed.value.__cause__ is error
    world.close()
