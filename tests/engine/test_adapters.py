"""Slots for adapters: who gets one, who waits, what is loaded when; under any policy nobody starves
and nothing leaks."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from dovetail.api.executor import AdapterRows, Batch, Result
from dovetail.api.scheduler import Refusal, Step
from dovetail.end_reason import EndReason
from dovetail.engine.adapters import AdapterSlots
from dovetail.engine.flight import Delivery, InFlightStep
from dovetail.engine.live_request import LiveRequest, Status
from dovetail.request.sampling_params import SamplingParams
from dovetail.testing.suites.holding import reachable
from tests.engine.policies import (
    BUILT_IN,
    FCFS,
    Backwards,
    Named,
    RoundRobin,
    always,
    fcfs,
    named,
    scripted,
)
from tests.engine.world import FakeAdapter, RecordingExecutor, Shape, Spec, World
from tests.support import FULL

PROMPT = tuple(range(1, 9))


def loads(world: World) -> list[tuple[int, int, str]]:
    """Step, slot and digest of everything loaded."""
    return [
        (batch.step, load.slot, load.digest)
        for batch in world.executor.sent
        for part in batch.parts
        if isinstance(part, AdapterRows)
        for load in part.loads
    ]


def shown(world: World) -> Iterator[set[str]]:
    """The ids that each step shows as waiting."""
    return ({*call[3]} for call in world.heard.calls if call[0] == "schedule")  # type: ignore[misc]


@pytest.mark.parametrize("overlap", [True, False])
def test_an_adapter_is_loaded_once_for_all_its_requests_and_stays(overlap: bool) -> None:
    world = World(shape=Shape(adapters=2, overlap=overlap))
    for id in "abc":
        world.add(Spec(id, PROMPT, adapter="x"))
    world.add(Spec("d", PROMPT))
    world.drain(check=True)
    world.add(Spec("later", PROMPT, adapter="x"))
    world.drain(check=True)
    assert loads(world) == [(0, 1, "x")]


def test_nothing_computed_with_one_adapter_is_found_with_another() -> None:
    world = World(shape=Shape(adapters=3))
    for adapter in (None, "x", "y", None, "x"):
        world.add(Spec(f"{len(world.requests)}", PROMPT, adapter=adapter))
        world.drain(check=True)  # the fake executor fails if another's K and V are read
    assert [request.cached_tokens > 0 for request in world.requests.values()] == [
        False,
        False,
        False,
        True,
        True,
    ]


def test_the_adapter_unused_for_the_longest_time_is_overwritten() -> None:
    world = World(shape=Shape(adapters=2))
    for digest in "xyxzxy":
        world.add(Spec(f"{len(world.requests)}", PROMPT, adapter=digest))
        world.drain(check=True)
    assert [(slot, digest) for _, slot, digest in loads(world)] == [
        (1, "x"),
        (2, "y"),
        (2, "z"),
        (2, "y"),
    ]


def test_whoever_can_get_no_slot_is_held_back_and_blocks_nobody() -> None:
    held: list[list[str]] = []
    world = World(
        always(lambda step: (held.append([r.id for r in step.held_back]), fcfs(step))),
        Shape(adapters=1),
    )
    world.add(Spec("one", PROMPT, adapter="x"))
    world.step()
    world.add(Spec("other", PROMPT, adapter="y"))
    world.add(Spec("same", PROMPT, adapter="x"))
    world.add(Spec("base", PROMPT))
    world.drain(check=True)
    waiting = list(shown(world))
    assert waiting[1] == {"same", "base"}
    assert held[1] == ["other"]
    assert held[-1] == []
    assert world.finished["other"].reason == "length"


def test_a_slot_taken_in_this_step_is_refused_as_such_and_one_held_back_as_not_now() -> None:
    refusals: list[tuple[str, Refusal | None]] = []

    def grant_all(step: Step) -> None:
        for request in (*step.running, *step.waiting, *step.held_back):
            refusals.append((request.id, step.grant(request).refused))

    world = World(always(grant_all), Shape(adapters=1))
    world.add(Spec("x", PROMPT, adapter="x"))
    world.add(Spec("y", PROMPT, adapter="y"))
    world.step()
    world.step()
    assert refusals[:4] == [
        ("x", None),
        ("y", Refusal.ADAPTERS),
        ("x", None),
        ("y", Refusal.NOT_NOW),
    ]
    world.drain(check=True)


def test_a_slot_given_back_within_the_step_is_free_again_and_loads_nothing() -> None:
    def change_of_mind(step: Step) -> None:
        one, other = named(step)["x"], named(step)["y"]
        assert step.grant(one)
        assert step.grant(other).refused is Refusal.ADAPTERS
        step.preempt(one)
        assert step.grant(other)

    world = World(scripted(change_of_mind), Shape(adapters=1))
    for digest in "xy":
        world.add(Spec(digest, PROMPT, adapter=digest))
    world.drain(check=True)
    assert [digest for _, _, digest in loads(world)] == ["y", "x"]


def test_a_preempted_request_gives_its_slot_up() -> None:
    world = World(
        scripted(fcfs, lambda step: step.preempt(named(step)["x"])),
        Shape(adapters=1, overlap=False),
    )
    world.add(Spec("x", PROMPT, adapter="x"))
    world.step()
    world.add(Spec("y", PROMPT, adapter="y", delay=-1.0))
    world.drain(check=True)
    assert [digest for _, _, digest in loads(world)] == ["x", "y", "x"]


def test_a_slot_is_not_overwritten_while_a_step_in_flight_reads_it() -> None:
    class Counts(RecordingExecutor):
        def collect(self, handle: int) -> Result:
            collected.append(handle)
            return super().collect(handle)

        def submit(self, batch: Batch) -> int:
            part = batch.part(AdapterRows)
            if part is not None and part.loads:
                in_flight.append({sent.step for sent in self.sent} - {*collected})
            return super().submit(batch)

    collected: list[int] = []
    in_flight: list[set[int]] = []
    world = World(shape=Shape(adapters=1), executor=Counts)
    world.add(Spec("x", PROMPT, adapter="x", max_tokens=50))
    world.step()
    world.step()
    world.add(Spec("y", PROMPT, adapter="y"))
    world.abort("x")
    world.drain(check=True)
    assert in_flight == [set(), set()]


def test_a_bad_adapter_rejects_its_own_requests_alone() -> None:
    world = World(shape=Shape(adapters=1))
    bad = FakeAdapter("bad", looks=3, why="no such file")
    world.add(Spec("a", PROMPT), bad)
    world.add(Spec("b", PROMPT, n=2), bad)
    world.add(Spec("good", PROMPT, adapter="x"))
    while world.core.has_unfinished():
        world.step()
        world.check()
    assert {
        id: finish.stop_reason
        for id, finish in world.finished.items()
        if finish.reason is EndReason.ADAPTER
    } == dict.fromkeys(("a", "b#0", "b#1"), "no such file")
    assert world.finished["good"].reason == "length"
    assert "a" not in world.heard.arrived


def test_a_request_waits_for_its_adapter_and_others_do_not() -> None:
    world = World(shape=Shape(adapters=1))
    world.add(Spec("slow", PROMPT), FakeAdapter("x", looks=5))
    world.add(Spec("quick", PROMPT))
    world.step()
    assert world.core.is_computing
    world.drain(check=True)
    assert world.finished["slow"].reason == "length"


def test_samples_of_one_prompt_share_adapter_and_prompt() -> None:
    world = World(shape=Shape(adapters=1))
    world.add(Spec("s", PROMPT, n=4, adapter="x"))
    world.add(Spec("t", PROMPT, n=2, adapter="y"))
    world.drain(check=True)
    assert world.core.stats.prefill_tokens == 2 * len(PROMPT) + 3 + 1


def test_another_executor_has_an_empty_bank() -> None:
    slots, request = AdapterSlots(1, 1.0), _request("x")
    for _ in range(2):
        slots.admitted(request)
        assert [load.digest for load in slots.take_loads()] == ["x"]
        slots.left(request)
        slots.forget()


PATIENT = [named for named in BUILT_IN if not named.policy.capabilities.starves] + [
    Named("Backwards", Backwards),
    Named("RoundRobin", RoundRobin),
]


@pytest.mark.parametrize("policy", PATIENT, ids=repr)
def test_an_adapter_that_waits_too_long_gets_the_next_slot(policy: Named) -> None:
    """The adapters in use never run out of requests, so that no slot would ever be free."""
    world = World(
        policy.policy,
        Shape(adapters=2, max_num_seqs=4, slot_wait_s=0.2, num_pages=256),
        policy.make_options(),
    )
    for turn in range(400):
        if turn % 3 == 0:
            for digest in "xy":
                world.add(
                    Spec(
                        f"{digest}{turn}",
                        PROMPT,
                        adapter=digest,
                        max_tokens=4,
                        deadline=1e6,
                        predicted_tokens=4,
                    )
                )
        if turn == 30:
            world.add(
                Spec("rare", PROMPT, adapter="rare", max_tokens=4, deadline=1e6, predicted_tokens=4)
            )
        if "rare" in world.finished:
            break
        world.step()
    assert world.finished["rare"].reason == "length"
    world.drain(20_000)


def test_without_waiting_long_nobody_is_closed_out() -> None:
    world = World(shape=Shape(adapters=1, slot_wait_s=1e6, max_num_seqs=4))
    world.add(Spec("x0", PROMPT, adapter="x", max_tokens=8))
    world.add(Spec("rare", PROMPT, adapter="rare", max_tokens=8, delay=0.001))
    for turn in range(1, 40):
        world.add(Spec(f"x{turn}", PROMPT, adapter="x", max_tokens=8))
        world.step()
        assert "rare" not in world.finished
    world.drain()


def test_an_adapter_whose_waiters_were_aborted_has_not_waited_when_it_is_wanted_again() -> None:
    world = World(shape=Shape(adapters=1, slot_wait_s=0.1, max_num_seqs=4))
    world.add(Spec("x", PROMPT, adapter="x"))
    world.add(Spec("gone", PROMPT, adapter="rare"))
    for _ in range(2):
        world.step()
    for id in ("gone", "x"):
        world.abort(id)
    world.add(Spec("plain", PROMPT, max_tokens=40))
    world.drain()
    assert world.clock.now() > 0.2
    for id, adapter in (("x0", "x"), ("again", "rare"), ("x1", "x")):
        world.add(Spec(id, PROMPT, adapter=adapter, max_tokens=8))
    for _ in range(2):
        world.step()
    assert world.requests["x1"].status is Status.RUNNING, "the slot wasn't kept for the other"
    world.drain()


def test_an_adapter_whose_offered_slot_the_policy_leaves_holds_up_nobody() -> None:
    """A policy that prefers all others: they don't wait for the one that it never takes."""

    class Disdains(FCFS):
        def schedule(self, step: Step) -> None:
            for request in (*step.running, *(r for r in step.waiting if r.id != "rare")):
                step.grant(request)
            step.wake_at(step.now + 0.01)
            if "rare" in named(step) and len(named(step)) == 1:
                step.grant(named(step)["rare"])

    world = World(Disdains, Shape(adapters=1, slot_wait_s=0.1))
    world.add(Spec("x", PROMPT, adapter="x"))
    world.step()
    world.add(Spec("rare", PROMPT, adapter="rare"))
    for digest in "abcdef":
        world.add(Spec(digest, PROMPT, adapter=digest, delay=0.02))
    world.drain(check=True)
    assert list(world.finished)[-1] == "rare"


@pytest.mark.parametrize(
    "policy",
    [Named("FCFS", FCFS), *[named for named in BUILT_IN if named.name in ("lpm", "sjf")]],
    ids=repr,
)
def test_a_thousand_adapters_starve_nobody(policy: Named) -> None:
    """Popular and rare ones, far more than slots."""
    dice = random.Random(7)
    slots, max_num_seqs, count = (64, 96, 4_000) if FULL else (16, 24, 400)
    world = World(
        policy.policy,
        Shape(
            num_pages=2_000,
            token_budget=1_024,
            max_num_seqs=max_num_seqs,
            adapters=slots,
            events=False,
        ),
        policy.make_options(),
    )
    adapters = {rank: FakeAdapter(f"{rank}") for rank in range(1_000)}
    popular = dice.choices(range(1_000), [1 / (1 + rank) for rank in range(1_000)], k=count)
    for turn, rank in enumerate(popular):
        world.add(
            Spec(f"{turn}", (rank % 97, turn % 97, 5), max_tokens=3, predicted_tokens=3),
            adapters[rank],
        )
        if turn % 24 == 23:
            world.step()
    world.drain(200_000)
    assert {finish.reason for finish in world.finished.values()} == {"length"}
    assert world.slots is not None
    assert world.slots.used == 0
    waits = [
        request.first_token_time - request.arrival_time
        for request in world.requests.values()
        if request.first_token_time is not None
    ]
    assert max(waits) < 6.0  # seconds; all of them together compute for four


def test_thousands_of_loads_leak_nothing() -> None:
    """As an engine with 64 slots uses them, with a step in flight: the loads, replayed, give each
    request its own adapter."""
    dice, slots, bank = random.Random(5), AdapterSlots(64, 1.0), dict[int, str]()
    running: list[LiveRequest] = []
    waiting = [_request(f"{dice.paretovariate(0.4) % 1_000:.0f}") for _ in range(200)]
    step = 0
    while slots.loads < (10_000 if FULL else 1_000):
        slots.open_step(step / 100, waiting)
        for request in [r for r in waiting if slots.refuses(r) is not Refusal.NOT_NOW]:
            if len(running) < 96 and slots.refuses(request) is None:
                slots.admitted(request)
                waiting.remove(request)
                running.append(request)
                waiting.append(_request(f"{dice.paretovariate(0.4) % 1_000:.0f}"))
        bank |= {load.slot: load.digest for load in slots.take_loads()}
        slots.submitted(step)
        for request in running:
            assert request.adapter is not None
            assert bank[slots.slot_of(request)] == request.adapter.digest
        if step:
            slots.collected(_flight(step - 1), Delivery())
        for request in dice.sample(running, len(running) // 3):
            running.remove(request)
            slots.left(request)
        step += 1
    for request in running:
        slots.left(request)
    assert slots.used == 0
    assert len(reachable_digests(slots)) <= 64 + len(waiting)


def _request(digest: str) -> LiveRequest:
    return LiveRequest(digest, (1,), SamplingParams(), max_tokens=1, adapter=FakeAdapter(digest))


def _flight(step: int) -> InFlightStep:
    """Return a step in flight without requests."""
    none = np.zeros(0, np.int32)
    batch = Batch(step, none, (), none, (), none, none, none.astype(np.bool_))
    return InFlightStep(step, batch, 0.0, [], [], {}, {}, 0, 0, 0, 0, 0, 0, (), {}, unsampled=False)


def reachable_digests(slots: AdapterSlots) -> set[str]:
    """All texts that the slots still know."""
    return {value for _, value in reachable(slots) if isinstance(value, str)}
