"""Arrivals, deadlines and the clock: future requests are invisible, and a virtual clock moves only
when advanced."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.scheduler import Step
from dovetail.engine.live_request import LiveRequest
from dovetail.engine.step_times import LATE_SHARE
from dovetail.request.sampling_params import SamplingParams
from tests.engine.policies import always, fcfs, scripted
from tests.engine.world import Shape, Spec, World
from tests.support import examples

PROMPT = (1, 2, 3, 4, 5)


def plans_of(world: World) -> list[tuple[float, tuple[str, ...]]]:
    """(when, who was shown) of each plan."""
    return [(call[2], call[3] + call[4]) for call in world.heard.calls if call[0] == "schedule"]  # type: ignore[operator, misc]


def test_a_future_request_is_invisible_and_the_virtual_clock_goes_to_its_arrival() -> None:
    world = World()
    world.add(Spec("a", PROMPT, max_tokens=1, delay=5.0))
    world.step()
    assert world.heard.calls == []
    assert world.clock.now() == 5.0
    world.drain()
    assert plans_of(world)[0] == (5.0, ("a",))
    assert world.requests["a"].first_token_time == pytest.approx(5.015)


@examples(quick=20, full=200)
@given(st.lists(st.floats(0, 3, allow_nan=False), min_size=1, max_size=8))
def test_arrivals_are_told_in_order_and_not_before_their_time(delays: list[float]) -> None:
    world = World()
    for index, delay in enumerate(delays):
        world.add(Spec(f"r{index}", PROMPT, delay=delay))
    world.drain()  # the watch kept on the policy checks order and once-ness
    told = [call[1] for call in world.heard.calls if call[0] == "arrival"]
    assert told == sorted(
        world.requests, key=lambda id: (world.requests[id].arrival_time, world.requests[id].order)
    )


def test_a_request_aborted_before_its_arrival_is_never_reported() -> None:
    world = World(scripted(lambda step: step.wake_at(2.0)))
    world.add(Spec("early", PROMPT, max_tokens=1))
    world.add(Spec("never", PROMPT, delay=1.0))
    world.abort("never")
    world.drain()
    assert world.heard.finished == ["early"]
    assert [now for now, _ in plans_of(world)] == [0.0, 2.0]


def test_requests_aborted_before_their_time_take_no_memory() -> None:
    """A thousand that are far away come and go; those that stay arrive in order."""
    world = World(shape=Shape(events=False))
    stay = [
        world.add(Spec(f"stays{index}", PROMPT, max_tokens=1, delay=5.0 - index))[0]
        for index in range(4)
    ]
    for index in range(1_000):
        request = LiveRequest(
            f"goes{index}", PROMPT, SamplingParams(), max_tokens=1, arrival_time=1e9 - index
        )
        world.core.add(request)
        world.core.abort(request)
        assert len(world.core._arrivals) <= 2 * len(stay) + 2
    world.drain()
    assert [call[1] for call in world.heard.calls if call[0] == "arrival"] == [
        "stays3",
        "stays2",
        "stays1",
        "stays0",
    ]


def test_the_dead_go_when_the_living_have_arrived() -> None:
    world = World(shape=Shape(events=False))
    for index in range(20):
        world.add(Spec(f"soon{index}", PROMPT, max_tokens=1))
    world.add(Spec("later", PROMPT, max_tokens=1, delay=50.0))
    late = [world.add(Spec(f"late{index}", PROMPT, delay=100.0))[0].id for index in range(19)]
    for id in late:
        world.abort(id)
    assert len(world.core._arrivals) == 40, "the dead aren't half of them yet"
    world.step()
    assert len(world.core._arrivals) == 1


def test_wake_at_is_kept_and_the_earliest_counts() -> None:
    world = World(scripted(lambda step: (step.wake_at(7.0), step.wake_at(3.0), step.wake_at(9.0))))
    world.add(Spec("a", PROMPT, max_tokens=1))
    world.drain()
    assert [now for now, _ in plans_of(world)] == [0.0, 3.0]


def test_an_arrival_wakes_before_wake_at() -> None:
    world = World(scripted(lambda step: step.wake_at(7.0)))
    world.add(Spec("a", PROMPT, max_tokens=1))
    world.add(Spec("b", PROMPT, max_tokens=1, delay=2.0))
    world.drain()
    assert plans_of(world)[1] == (2.0, ("a", "b"))


def test_without_arrivals_to_come_planning_does_not_move_the_clock() -> None:
    world = World()
    for index in range(3):
        world.add(Spec(f"r{index}", PROMPT * (index + 1)))
    ended = 0.0
    while world.core.has_unfinished():
        world.step()
        assert world.clock.now() == max(ended, world.core.plan_timing.last_ended, 0.0)
        ended = world.clock.now()


def steady(world: World) -> None:
    """One long request, until the fit knows how long its steps take."""
    world.add(Spec("long", PROMPT, max_tokens=100))
    for _ in range(12):
        world.step()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.65])
def test_who_arrives_during_a_step_runs_in_the_next(share: float) -> None:
    """With overlap, the next step would be planned already, were planning not late."""
    world = World()
    steady(world)
    begun, step_s = world.core.plan_timing.last_ended, 0.011
    in_flight = world.core._flights[-1].index
    world.add(Spec("new", PROMPT, max_tokens=1, delay=begun + share * step_s - world.clock.now()))
    world.drain()
    first = next(
        batch
        for batch in world.executor.sent
        if any(new.request_id == "new" for new in batch.added)
    )
    assert first.step == in_flight + 1


def test_late_planning_waits_for_its_share_of_the_step_and_no_longer() -> None:
    world = World()
    steady(world)
    world.core.plan_timing.expects_arrivals = True
    begun = world.core.plan_timing.last_ended
    world.step()
    planned = plans_of(world)[-1][0]
    assert planned == pytest.approx(begun + LATE_SHARE * 0.011, rel=0.01)


def test_late_planning_costs_the_device_nothing() -> None:
    ends = []
    for expects in (False, True):
        world = World()
        world.core.plan_timing.expects_arrivals = expects
        for index in range(4):
            world.add(Spec(f"r{index}", PROMPT * (1 + index), max_tokens=30))
        world.drain()
        ends.append(world.clock.now())
    assert ends[1] == pytest.approx(ends[0], rel=1e-6)


def test_one_slow_step_does_not_keep_the_device_idle() -> None:
    """A compilation of 30 s must not make the engine wait for seconds before each later plan."""
    world = World()
    world.core.plan_timing.expects_arrivals = True
    steady(world)
    world.core.books.fit.update(30.0, 0, 1, 20)
    world.core.books.fit.update(30.0, 0, 1, 20)
    world.core.books.fit.estimate_s = lambda *_: 30.0  # type: ignore[method-assign]
    before = world.clock.now()
    for _ in range(10):
        world.step()
    assert world.clock.now() - before < 0.2


def test_estimates_are_zero_before_the_first_step_and_good_soon() -> None:
    seen: list[float] = []
    world = World(
        always(
            lambda step: (seen.append(step.estimate_s(decodes=1, context_tokens=20)), fcfs(step))
        )
    )
    world.add(Spec("a", PROMPT, max_tokens=30))
    world.drain()
    assert seen[0] == 0.0
    assert seen[-1] == pytest.approx(0.011, rel=0.1)


def test_deadlines_are_the_policy_s_business_and_absolute() -> None:
    def reject_late(step: Step) -> None:
        for request in step.waiting + step.running:
            if request.deadline is not None and step.now > request.deadline:
                step.reject(request, "late")
        fcfs(step)

    world = World(always(reject_late))
    world.add(Spec("late", PROMPT, deadline=0.02, max_tokens=50))
    world.add(Spec("fine", PROMPT, deadline=math.inf, max_tokens=5))
    world.drain()
    assert (world.finished["late"].reason, world.finished["late"].stop_reason) == (
        "rejected",
        "late",
    )
    assert 0 < len(world.tokens["late"]) < 50
    assert world.finished["fine"].reason == "length"


def test_min_tokens_keeps_stop_tokens_from_ending_a_request() -> None:
    world = World(shape=Shape(vocab_size=3))
    world.add(Spec("a", PROMPT, max_tokens=9, min_tokens=4, stop_ids=frozenset(range(3))))
    world.drain()
    assert len(world.tokens["a"]) == 5, "the first four may be no stop tokens, so the fifth ends it"
