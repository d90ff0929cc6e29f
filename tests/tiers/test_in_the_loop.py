"""Prefixes restored in the loop: what is found, what is refused, and what goes wrong.

The fake executor fails if a step reads a page that doesn't hold its request's tokens, or one that
is still being restored; a world checks all tokens against its oracle.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from dovetail.api.clock import VirtualClock
from dovetail.api.executor import Result
from dovetail.api.kv_tier import Done, FrameKey, Job, KVTier, TierCapabilities
from dovetail.api.scheduler import Refusal
from dovetail.engine.tiers import feature, restores, tier_jobs
from dovetail.engine.tiers.host_time import HostTime
from dovetail.engine.tiers.prospect import Pace
from dovetail.errors import DovetailError
from tests.engine.policies import FCFS
from tests.engine.world import RecordingExecutor, Shape, Spec, World
from tests.tiers.tiered import FRAME, InOrder, Tiered, ToyTier
from tests.work import counted_lines

PROMPT = tuple(range(1, 42))  # five frames and a token
OTHER = tuple(range(50, 91))
THIRD = tuple(range(20, 61))
SHAPE = Shape(num_pages=32, strict=True)


@pytest.fixture(autouse=True)
def restores_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use short frames, and restore even what is computed sooner."""
    monkeypatch.setattr("dovetail.engine.tiers.keys.FRAME_TOKENS", FRAME)
    monkeypatch.setattr(Pace, "loading_s", lambda *_: 0.0)
    monkeypatch.setattr(tier_jobs, "STORE_S", 0.5)


def answer(tiered: Tiered, *specs: Spec) -> list[tuple[int, int]]:
    """Run requests to their end; return the tokens that each found and, of these, were restored."""
    for spec in specs:
        tiered.world.add(spec)
    tiered.world.drain()
    tiered.settle()
    tiered.check()
    requests = [tiered.world.requests[spec.id] for spec in specs]
    return [(request.cached_tokens, request.restored_tokens) for request in requests]


def with_prefix(tiered: Tiered, prompt: tuple[int, ...] = PROMPT) -> Tiered:
    """Return `tiered`, whose host pool and tiers, but not the device, have the prompt's K and V."""
    answer(tiered, Spec("first", prompt, max_tokens=2))
    tiered.forget_device()
    return tiered


def test_a_prefix_that_the_device_has_forgotten_is_restored() -> None:
    tiered = with_prefix(Tiered.of(SHAPE))
    assert answer(tiered, Spec("again", PROMPT)) == [(40, 40)]
    assert tiered.feature.stats.restored_tokens == 40


def test_a_prefix_that_the_device_has_is_not_restored() -> None:
    tiered = Tiered.of(SHAPE)
    answer(tiered, Spec("first", PROMPT))
    assert answer(tiered, Spec("again", PROMPT)) == [(40, 0)]
    assert tiered.feature.stats.restored_frames == 0


def test_what_is_generated_is_restored_in_the_next_turn() -> None:
    tiered = Tiered.of(SHAPE)
    answer(tiered, Spec("first", PROMPT, max_tokens=17))
    tiered.forget_device()
    said = tuple(tiered.world.tokens["first"])
    assert answer(tiered, Spec("next", (*PROMPT, *said, 3, 4))) == [(56, 56)]


def test_a_prefix_goes_on_where_the_device_has_its_beginning() -> None:
    tiered = with_prefix(Tiered.of(SHAPE))
    answer(tiered, Spec("short", PROMPT[:13], max_tokens=1))  # 12 tokens: in the second frame
    assert answer(tiered, Spec("again", PROMPT)) == [(40, 28)]


def test_others_with_the_same_beginning_wait_for_one_restoration() -> None:
    tiered = with_prefix(Tiered.of(SHAPE))
    found = answer(tiered, Spec("one", (*PROMPT, 7)), Spec("two", (*PROMPT, 8)))
    assert found == [(40, 40), (40, 0)]
    assert tiered.feature.stats.restored_frames == 5


@pytest.mark.parametrize(
    "keys", [("salt",), ("adapter:other",)], ids=["another salt", "another adapter"]
)
def test_nothing_is_restored_for_another_salt_or_adapter(keys: tuple[str, ...]) -> None:
    tiered = with_prefix(Tiered.of(SHAPE))
    assert answer(tiered, Spec("again", PROMPT, cache_keys=keys)) == [(0, 0)]


def test_nothing_is_saved_or_restored_of_a_prompt_that_is_computed_whole() -> None:
    tiered = Tiered.of(SHAPE)
    answer(tiered, Spec("whole", PROMPT, indivisible=True))
    assert tiered.feature.stats.saved_frames == 0


def test_log_probabilities_of_a_prompt_need_all_of_it() -> None:
    tiered = with_prefix(Tiered.of(SHAPE))
    assert answer(tiered, Spec("again", PROMPT, prompt_logprobs=1)) == [(0, 0)]


def test_a_request_aborted_while_it_is_restored_leaves_no_page_held() -> None:
    tiered = with_prefix(Tiered.of(SHAPE, tiers=lambda clock: [ToyTier(clock)]))
    tiered.pool.clear()
    world = tiered.world
    world.add(Spec("again", PROMPT))
    seen = 0
    while world.core.has_unfinished():
        world.step()
        seen += world.kv.counts.held > 0
        if seen == 2:
            world.abort("again")
    tiered.settle()
    assert seen >= 2
    tiered.check()
    assert answer(tiered, Spec("third", PROMPT))[0][0] == 40


def test_damaged_memory_costs_time_and_no_token() -> None:
    tiered = with_prefix(Tiered.of(SHAPE))
    chance = random.Random(0)
    for number in range(20):
        name = chance.choice(tiered.pool.names)
        frame = tiered.pool.find(name)
        assert frame is not None
        byte = chance.randrange(64, len(frame.data))
        frame.data[byte] ^= 1 << chance.randrange(8)
        damaged = tiered.feature.stats.damaged_frames.get("host", 0)
        cached, restored = answer(tiered, Spec(f"again {number}", PROMPT, max_tokens=2))[0]
        assert tiered.feature.stats.damaged_frames.get("host", 0) == damaged + 1
        assert restored == cached < 40
        tiered.forget_device()


def test_what_a_failed_row_computed_is_not_kept() -> None:
    class Failing(RecordingExecutor):
        """Fails the only row of each step."""

        def collect(self, handle: Any) -> Result:
            return replace(super().collect(handle), failed={0: "a test"})

    world = World(FCFS, SHAPE, executor=Failing)
    tiered = Tiered.of(world=world)
    prompt = tuple(range(1, 90))
    world.add(Spec("bad", prompt))
    while world.core.has_unfinished():
        world.step()
    tiered.settle()
    assert world.finished["bad"].reason == "error"
    assert tiered.feature.stats.saved_frames == 0
    assert tiered.pool.frames == 0
    tiered.pool.check_integrity()
    world.kv.check_integrity()


def test_a_reset_forgets_what_was_kept_and_what_is_being_saved() -> None:
    tiered = Tiered.of(SHAPE, tiers=lambda clock: [ToyTier(clock)])
    world = tiered.world
    answer(tiered, Spec("first", PROMPT))
    world.add(Spec("running", OTHER))
    while not world.core.is_computing:
        world.step()
    world.core.reset_cache()
    world.drain()
    tiered.settle()
    assert answer(tiered, Spec("again", PROMPT)) == [(0, 0)]
    tiered.forget_device()
    assert answer(tiered, Spec("other", OTHER)) == [(0, 0)]


# Tiers


def tier_of(tiered: Tiered) -> ToyTier:
    return tiered.tiers[0]  # type: ignore[return-value]


def with_tier(kind: type[ToyTier] = ToyTier, **fields: Any) -> Tiered:
    """Return an engine of which only a tier has the prompt's K and V."""

    def make(clock: Any) -> Sequence[KVTier]:
        return [kind(clock, **fields)]

    tiered = with_prefix(Tiered.of(SHAPE, tiers=make))
    tiered.pool.clear()
    return tiered


def test_what_the_host_pool_has_lost_comes_from_a_tier() -> None:
    tiered = with_tier()
    assert answer(tiered, Spec("again", PROMPT)) == [(40, 40)]
    assert tiered.feature.stats.loaded_frames == {"tier 0": 5}
    tiered.forget_device()
    assert answer(tiered, Spec("third", PROMPT)) == [(40, 40)]  # now the host pool has it
    assert tier_of(tiered).counts["load"] == 1


def test_tiers_are_asked_in_their_order_each_for_what_the_others_lack() -> None:
    tiered = with_prefix(Tiered.of(SHAPE, tiers=lambda clock: [ToyTier(clock), ToyTier(clock)]))
    tiered.pool.clear()
    one, two = (tier for tier in tiered.tiers if isinstance(tier, ToyTier))
    assert len(one.kept) == len(two.kept) == 5
    keys = [*one.kept]
    for tier, lost in ((one, (1, 4)), (two, (0, 4))):
        for number in lost:
            del tier.kept[keys[number]]
    assert answer(tiered, Spec("again", PROMPT)) == [(32, 32)]
    assert tiered.feature.stats.loaded_frames == {"tier 0": 3, "tier 1": 1}


def test_a_burst_waits_for_a_tier_that_takes_one_job_at_a_time() -> None:
    class OneByOne(ToyTier):
        capabilities = TierCapabilities(persistent=True, max_jobs=1)

    tiered = Tiered.of(
        replace(SHAPE, num_pages=200), tiers=lambda clock: [OneByOne(clock, seconds=0.001)]
    )
    prompts = [(number, *PROMPT) for number in range(12)]
    for number, prompt in enumerate(prompts):
        answer(tiered, Spec(f"first {number}", prompt))
    tiered.forget_device()
    tiered.pool.clear()
    found = answer(tiered, *(Spec(f"again {number}", each) for number, each in enumerate(prompts)))
    assert found == [(40, 40)] * 12


class Hanging(ToyTier):
    """Stores, and never ends another job once it hangs."""

    hangs = False

    def done(self) -> Sequence[Done]:
        return [] if self.hangs else super().done()


class HangingLoads(Hanging):
    def done(self) -> Sequence[Done]:
        loads = [(at, job) for at, job in self.jobs if job.kind == "load" and self.hangs]
        self.jobs = [one for one in self.jobs if one not in loads]
        ended = ToyTier.done(self)
        self.jobs += loads
        return ended


class Lying(ToyTier):
    """Says that it has all frames, and loads nothing."""

    def load(self, key: FrameKey, data: memoryview) -> bool:
        return True


class Exchanging(ToyTier):
    """Returns another frame, with its right header."""

    def load(self, key: FrameKey, data: memoryview) -> bool:
        data[:] = next(bytes_ for other, bytes_ in self.kept.items() if other != key)
        return True


class Mixing(ToyTier):
    """Returns the right header with another frame's pages."""

    def load(self, key: FrameKey, data: memoryview) -> bool:
        other = next(bytes_ for one, bytes_ in self.kept.items() if one != key)
        data[:] = self.kept[key][:64] + other[64:]
        return True


class Flipping(ToyTier):
    """Flips a bit of each frame."""

    def load(self, key: FrameKey, data: memoryview) -> bool:
        data[:] = self.kept[key]
        data[int.from_bytes(key.chain[:4], "big") % len(data)] ^= 4
        return True


class Raising(ToyTier):
    def do(self, job: Job) -> list[bool]:
        if job.kind == "store":
            return super().do(job)
        raise RuntimeError("a test")


class Short(ToyTier):
    """Reports fewer results than the job has keys."""

    def do(self, job: Job) -> list[bool]:
        return super().do(job) if job.kind == "store" else []


class Nonsense(ToyTier):
    """Reports what is no report."""

    def done(self) -> Sequence[Done]:
        super().done()
        return [Done([], None)]  # type: ignore[arg-type]


class Busy(ToyTier):
    def submit(self, job: Job) -> bool:
        return job.kind == "store" and super().submit(job)


class Moody(ToyTier):
    """Fails at random, and reports jobs that nobody gave it."""

    def __init__(self, clock: Any) -> None:
        super().__init__(clock)
        self.chance = random.Random(1)

    def done(self) -> Sequence[Done]:
        return [Done(999_999, (True,)), *super().done()]

    def load(self, key: FrameKey, data: memoryview) -> bool:
        return self.chance.random() < 0.5 and super().load(key, data)


WRONG = [
    *(Lying, Exchanging, Mixing, Flipping, Raising, Short, Nonsense, Busy, Moody),
    *(Hanging, HangingLoads),
]


@pytest.mark.parametrize("kind", WRONG)
def test_a_tier_that_goes_wrong_costs_no_token_and_no_page(kind: type[ToyTier]) -> None:
    tiered = with_tier(kind)
    tier = tier_of(tiered)
    if isinstance(tier, Hanging):
        tier.hangs = True
    for number in range(4):
        begun = tiered.world.clock.now()
        answer(tiered, Spec(f"again {number}", PROMPT), Spec(f"other {number}", OTHER))
        first = tiered.world.requests[f"again {number}"].first_token_time
        assert first is not None
        # computing takes less than 0.2 s; for finding, and for loading, a request waits as stated
        assert first - begun < 0.2 + feature.FIND_S + 1.0
        tiered.forget_device()
        tiered.pool.clear()
    if kind not in (Moody, Busy):
        assert tiered.feature.stats.restored_tokens == 0


def test_a_tier_that_fails_three_times_is_off_for_a_while() -> None:
    tiered = with_tier(Raising)
    tier = tier_of(tiered)
    for number in range(9):
        answer(tiered, Spec(f"again {number}", (*PROMPT, number)))
        tiered.forget_device()
        tiered.pool.clear()
    assert tiered.feature.stats.off == {"tier 0": 1}
    asked = tier.counts["find"]
    answer(tiered, Spec("then", PROMPT))
    assert tier.counts["find"] == asked
    tiered.world.clock.wait_until(tiered.world.clock.now() + tier_jobs.OFF_S)
    tiered.forget_device()
    tiered.pool.clear()
    answer(tiered, Spec("later", PROMPT))
    assert tier.counts["find"] > asked


@pytest.mark.slow("waits for a tier that hangs")
def test_frames_of_a_tier_that_hangs_are_lent_until_it_reports_them() -> None:
    tiered = with_tier(HangingLoads)
    tier = tier_of(tiered)
    tier.hangs = True  # type: ignore[attr-defined]
    answer(tiered, Spec("again", PROMPT))
    lent = [frame.data for _, job in tier.jobs for frame in job.frames]
    assert lent
    for number in range(30):  # much is saved, but never there
        answer(tiered, Spec(f"other {number}", tuple(range(number, number + 41))))
        tiered.forget_device()
    for data in lent:
        data[:] = b"\xff" * len(data)
    for number in range(30):
        answer(tiered, Spec(f"checked {number}", tuple(range(number, number + 41))))
        tiered.forget_device()
    assert not tiered.feature.stats.damaged_frames
    tier.hangs = False  # type: ignore[attr-defined]
    tiered.settle()
    answer(tiered, Spec("last", PROMPT))
    tiered.pool.check_integrity()


def test_a_damaged_frame_is_stored_again_once_it_is_computed() -> None:
    tiered = with_tier()
    tier = tier_of(tiered)
    key = next(iter(tier.kept))
    sound = tier.kept[key]
    tier.kept[key] = sound[:-1] + bytes([sound[-1] ^ 1])
    answer(tiered, Spec("again", PROMPT))
    assert tiered.feature.stats.damaged_frames == {"tier 0": 1}
    assert tier.kept[key][64:] == sound[64:]


def test_the_end_of_an_engine_ends_its_tiers() -> None:
    tiered = with_tier()
    tiered.world.core.stop()
    assert tier_of(tiered).closed


def test_an_executor_whose_memory_tiers_use_is_not_replaced() -> None:
    tiered = with_prefix(Tiered.of(SHAPE))
    core = tiered.world.core
    executor = core.executor
    scheduler = core.scheduler
    with pytest.raises(DovetailError, match="kv_host_memory or kv_tiers can't swap its executor"):
        core.swap(
            executor=InOrder(executor.options, executor.context),
            scheduler=FCFS(scheduler.options, scheduler.context),
        )
    assert core.executor is executor
    assert core.scheduler is scheduler
    assert answer(tiered, Spec("again", PROMPT)) == [(40, 40)]


def test_a_reset_forgets_what_is_being_restored() -> None:
    tiered = with_prefix(Tiered.of(SHAPE))
    world = tiered.world
    world.add(Spec("again", PROMPT))
    while not world.kv.counts.held:  # by the restoration
        world.step()
    world.core.reset_cache()
    world.abort("again")  # it would compute and save them
    while world.core.has_unfinished():
        world.step()
    tiered.settle()
    tiered.check()
    assert not tiered.pool.frames


def test_a_row_that_fails_late_takes_back_what_was_kept_of_its_prompt() -> None:
    class FailsLast(RecordingExecutor):
        """Fails each row that would yield a token, while `failing`."""

        failing = True

        def collect(self, handle: Any) -> Result:
            result = super().collect(handle)
            batch = next(batch for batch in self.sent if batch.step == result.step)
            rows = batch.yields_token.nonzero()[0].tolist() if self.failing else []
            return replace(result, failed=dict.fromkeys(rows, "NaN"))

    world = World(FCFS, replace(SHAPE, token_budget=8), executor=FailsLast)
    tiered = Tiered.of(world=world, tiers=lambda clock: [ToyTier(clock, 0.0)])
    prompt = tuple(range(1, 90))
    world.add(Spec("bad", prompt))
    while world.core.has_unfinished():
        world.step()
    tiered.settle()
    tier = tier_of(tiered)
    assert tier.kept  # they were stored before
    assert not tiered.pool.frames
    world.executor.failing = False
    tier.kept = dict.fromkeys(tier.kept, b"")
    world.add(Spec("again", prompt, max_tokens=2))
    while world.core.has_unfinished():
        world.step()
    tiered.settle()
    assert world.requests["again"].cached_tokens == 0
    assert all(tier.kept.values())  # computed again, they replace these
    tiered.pool.check_integrity()


def test_an_engine_ends_while_its_weights_are_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature, "READING_S", 0.0)
    read = threading.Event()
    tiered = Tiered.of(SHAPE)
    tier = ToyTier(tiered.world.clock)

    def namespaces() -> Sequence[bytes]:
        read.wait()
        return ()

    tiered.feature.use([("slow", tier)], namespaces)
    try:
        tiered.world.core.stop()
        assert tier.closed
    finally:
        read.set()
        tiered.feature.wait_until_open()


def test_a_tier_that_raises_while_it_ends_leaves_the_others_to_end() -> None:
    class Raising(ToyTier):
        def close(self, timeout_s: float) -> None:
            raise OSError("a test")

    tiered = Tiered.of(SHAPE, tiers=lambda clock: [Raising(clock), ToyTier(clock)])
    tiered.world.core.stop()
    assert isinstance(tiered.tiers[1], ToyTier)
    assert tiered.tiers[1].closed


def test_few_requests_are_looked_at_in_a_step_however_many_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiered = with_prefix(Tiered.of(SHAPE))
    looks = 0
    seen = []
    plain = feature.prospect

    def counted(*arguments: Any) -> Any:
        nonlocal looks
        looks += 1
        return plain(*arguments)

    monkeypatch.setattr(feature, "prospect", counted)
    for number in range(60):
        tiered.world.add(Spec(str(number), (*PROMPT, number), max_tokens=2))
    while tiered.world.core.has_unfinished():
        before = looks
        tiered.world.step()
        seen.append(looks - before)
    assert 0 < max(seen) <= feature.FIRST_LOOKS + feature.LATER_LOOKS
    tiered.settle()
    tiered.check()


def lines_of_a_step(monkeypatch: pytest.MonkeyPatch, waiting: int) -> int:
    """Return the number of lines executed to open a step while the loads of two prefixes hang, and
    `waiting` requests wait for each prefix and as many for the end of either."""
    monkeypatch.setattr(Pace, "patience_s", lambda *_: 1e6)
    tiered = with_tier(HangingLoads)
    answer(tiered, Spec("other", OTHER), Spec("third", THIRD))
    tiered.forget_device()
    tiered.pool.clear()
    tier_of(tiered).hangs = True  # type: ignore[attr-defined]
    for number in range(waiting):
        for prompt in (PROMPT, OTHER, THIRD):
            tiered.world.add(Spec(f"{number} {prompt[0]}", (*prompt, 1 + number % 90)))
    for _ in range(waiting):
        tiered.world.step()
    now = tiered.world.clock.now()
    tiered.feature.open_step(now, tiered.world.core.books.waiting)
    with counted_lines() as work:
        assert tiered.feature.open_step(now, tiered.world.core.books.waiting)
    refusals = [tiered.feature.refuses(request) for request in tiered.world.core.books.waiting]
    assert refusals.count(Refusal.NOT_NOW) == 2 * waiting
    assert len(refusals) == 3 * waiting
    return work.lines


def test_a_step_costs_nothing_for_requests_that_cannot_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert lines_of_a_step(monkeypatch, 20) == lines_of_a_step(monkeypatch, 40)


def test_a_request_that_waits_for_pages_is_restored_once_the_policy_can_admit_it() -> None:
    tiered = with_prefix(Tiered.of(replace(SHAPE, num_pages=24)))
    world = tiered.world
    world.add(Spec("running", OTHER, max_tokens=40))
    while not world.kv.counts.held > 14:
        world.step()
    world.add(Spec("again", PROMPT, max_tokens=2))
    world.drain()
    tiered.settle()
    tiered.check()
    assert world.requests["again"].restored_tokens >= 32


def test_few_prefixes_are_restored_before_their_requests_are_admitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feature, "AWAITED", 3)
    tiered = Tiered.of(replace(SHAPE, num_pages=200, max_num_seqs=1))
    prompts = [(number, *PROMPT) for number in range(8)]
    answer(tiered, *(Spec(f"first {number}", prompt) for number, prompt in enumerate(prompts)))
    tiered.forget_device()
    saved = tiered.feature.stats.restored_frames
    tiered.world.add(Spec("running", OTHER, max_tokens=60))
    for number, prompt in enumerate(prompts):
        tiered.world.add(Spec(f"again {number}", prompt))
    for _ in range(40):
        tiered.world.step()
    assert "running" not in tiered.world.finished
    assert tiered.feature.stats.restored_frames - saved <= 5 * (3 + feature.RESTORATIONS)
    tiered.world.drain()
    tiered.settle()
    tiered.check()


def test_few_frames_are_copied_at_a_time_however_small_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restores, "MOST_COPIES", 2)
    tiered = with_prefix(Tiered.of(SHAPE))
    kind = type(tiered.world.executor.transfers())
    copying = [0]
    restore, finished = kind.restore, kind.finished

    def counted(self: Any, transfer: Any) -> None:
        copying.append(copying[-1] + 1)
        restore(self, transfer)

    def ended(self: Any) -> Any:
        done = finished(self)
        copying.append(copying[-1] - len(done))
        return done

    with monkeypatch.context() as patch:
        patch.setattr(kind, "restore", counted)
        patch.setattr(kind, "finished", ended)
        tiered.world.add(Spec("again", PROMPT, max_tokens=1))
        tiered.world.drain()
    assert max(copying) == 2
    assert tiered.world.requests["again"].restored_tokens == 40


def most_enqueued_per_step(tiered: Tiered, spec: Spec, method: str) -> int:
    """Run a request beside another one; return the most frames enqueued by `method` in a step."""
    kind = type(tiered.world.executor.transfers())
    counts = [0]
    enqueue = getattr(kind, method)

    def counted(self: Any, transfers: Any) -> None:
        counts[-1] += len(transfers)
        enqueue(self, transfers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, method, counted)
        tiered.world.add(Spec("running", (70, 71, 72), max_tokens=30))
        for _ in range(4):
            tiered.world.step()
        tiered.world.add(spec)
        while tiered.world.core.has_unfinished():
            counts.append(0)
            tiered.world.step()
    return max(counts)


@pytest.mark.parametrize("method", ["save_all", "restore_all"])
def test_few_frames_are_enqueued_in_a_step_where_that_takes_the_host_long(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    again = Spec("again", PROMPT, max_tokens=12)

    def tiered() -> Tiered:
        return with_prefix(Tiered.of(SHAPE)) if method == "restore_all" else Tiered.of(SHAPE)

    monkeypatch.setattr(HostTime, "frames", lambda *_: 100.0)
    assert most_enqueued_per_step(tiered(), again, method) == 5
    slow = tiered()
    monkeypatch.setattr(HostTime, "frames", lambda *_: 2.0)
    assert most_enqueued_per_step(slow, again, method) == 2
    if method == "restore_all":
        assert slow.world.requests["again"].restored_tokens == 40


def test_the_frames_of_a_step_follow_the_measured_host_time() -> None:
    clock = VirtualClock()
    host = HostTime(clock)
    for _ in range(100):
        host.begin()
        clock.wait_until(clock.now() + 0.002)
        host.end(4)  # 0.5 ms each
    assert host.frames(0.1) == pytest.approx(5.0, rel=0.01)
    assert host.frames(0.001) == 1.0, "a short step enqueues one"
