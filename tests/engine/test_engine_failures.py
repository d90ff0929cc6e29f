"""When a part fails: every request is answered, the error names the part, and nothing hangs."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest

from dovetail.api.component import NoOptions
from dovetail.api.executor import Batch, ExecutorContext, Result
from dovetail.api.observer import EngineStarted, EngineStopped, Observer, RequestFinished
from dovetail.api.scheduler import Scheduler, SchedulerContext, Step
from dovetail.end_reason import EndReason
from dovetail.engine.finish import Finish
from dovetail.engine.live_request import LiveRequest
from dovetail.engine.stats import MAX_ERRORS, STORM_STEPS, ObserverHub
from dovetail.errors import (
    ConfigError,
    DovetailError,
    EngineDeadError,
    PolicyError,
    RequestError,
    SchedulerStalled,
)
from dovetail.request import Request
from dovetail.testing import FakeExecutorOptions
from tests.engine.policies import FCFS, always, fcfs, scripted
from tests.engine.world import RecordingExecutor, RecordingObserver, Shape, Spec, World

PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)


def populated(
    policy: type[Scheduler] = FCFS,
    shape: Shape | None = None,
    executor: type[RecordingExecutor] = RecordingExecutor,
) -> World:
    world = World(policy, shape, executor=executor)
    for index in range(4):
        world.add(Spec(f"r{index}", PROMPT[index:], max_tokens=2 + index))
    world.add(Spec("several", PROMPT, n=3, max_tokens=3))
    world.add(Spec("later", PROMPT, delay=1e6))
    return world


def step_until_dead(world: World) -> None:
    for _ in range(200):
        if world.core.dead is not None:
            return
        world.step()
    raise AssertionError("the engine lives")


def check_all_answered(world: World) -> None:
    assert {*world.finished} | world.aborted == {*world.requests}
    assert world.finished["later"] == Finish(EndReason.ENGINE_DEAD, str(world.core.dead))
    assert not world.core.has_unfinished()
    with pytest.raises(EngineDeadError, match="takes no more work") as caught:
        world.core.step()
    assert caught.value.__cause__ is world.core.dead
    with pytest.raises(EngineDeadError):
        world.add(Spec("more", PROMPT))
    world.core.stop()


# Policies that raise


def raising(method: str) -> type[Scheduler]:
    """FCFS that raises the third time that `method` is called."""
    calls = []

    def raise_at_last(self: Scheduler, argument: object) -> None:
        calls.append(argument)
        if len(calls) == 3:
            raise KeyError("oops")
        getattr(FCFS, method)(self, argument)

    class Preempting(FCFS):
        def schedule(self, step: Step) -> None:
            super().schedule(step)
            if method == "on_preempted" and step.running:
                step.preempt(step.running[-1])

    return type("Clumsy", (Preempting,), {method: raise_at_last})


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "method", ["schedule", "on_arrived", "on_step", "on_preempted", "on_finished"]
)
def test_a_policy_that_raises_is_named_and_everybody_is_answered(
    method: str, overlap: bool
) -> None:
    world = populated(raising(method), Shape(overlap=overlap, num_pages=40))
    step_until_dead(world)
    assert isinstance(world.core.dead, PolicyError)
    assert str(world.core.dead) == f"scheduler Clumsy raised in {method}(): KeyError: 'oops'"
    assert isinstance(world.core.dead.__cause__, KeyError)
    check_all_answered(world)


def test_a_request_that_ended_by_itself_just_before_the_failure_keeps_its_end() -> None:
    class Clumsy(FCFS):
        def on_finished(self, request: Request) -> None:
            raise KeyError(request.id)

    world = World(Clumsy)
    world.add(Spec("first", PROMPT, max_tokens=1))
    world.add(Spec("second", PROMPT, max_tokens=1))
    step_until_dead(world)
    assert world.finished["first"] == Finish(EndReason.LENGTH)
    assert world.tokens["first"] == world.expected("first")[0]
    assert world.finished["second"].reason.is_error


def test_a_policy_that_raises_on_abort_ends_the_engine_and_the_next_step_raises() -> None:
    class Clumsy(FCFS):
        def on_finished(self, request: Request) -> None:
            raise KeyError(request.id)

    world = populated(Clumsy)
    world.step()
    world.abort("r0")
    assert isinstance(world.core.dead, PolicyError)
    assert world.core.has_unfinished(), "their ends are to be delivered"
    world.step()
    check_all_answered(world)


# Policies that do nothing useful


class GrantsNothing(Scheduler):
    """Would wait forever."""

    def schedule(self, step: Step) -> None:
        pass


class Undecided(Scheduler):
    """Grants, and preempts what it has granted, forever."""

    def schedule(self, step: Step) -> None:
        step.grant_each(step.waiting)
        for request in step.running:
            step.preempt(request)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (GrantsNothing, "grants nothing, sets no wake_at"),
        (Undecided, "preempts and rejects, but never grants"),
    ],
)
def test_in_place_of_a_policy_that_would_wait_forever_the_engine_plans_by_arrival(
    policy: type[Scheduler], words: str, overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(policy, Shape(overlap=overlap, num_pages=12, max_model_len=40))
    for index in range(3):
        world.add(Spec(f"r{index}", PROMPT, max_tokens=9 + index))
    with caplog.at_level(logging.WARNING, "dovetail"):
        world.drain(check=True)
    assert [*world.finished] == ["r0", "r1", "r2"]
    assert world.core.stats.stalls > 0
    (warning,) = caplog.records
    assert f"scheduler {policy.__name__} {words}" in warning.getMessage(), "told once"


def test_what_the_engine_could_never_run_is_rejected_with_the_reason_and_others_are_served() -> (
    None
):
    """Nothing that a front end lets through: one that doesn't check lengths."""
    world = World(GrantsNothing, Shape(num_pages=3, max_model_len=40, token_budget=16))
    world.add(Spec("too long", (*PROMPT, *range(20)), max_tokens=2))
    world.add(Spec("served", PROMPT, max_tokens=2))
    world.drain()
    assert world.finished["served"] == Finish(EndReason.LENGTH)
    assert world.finished["too long"].reason == "rejected"
    assert "not enough free pages" in str(world.finished["too long"].stop_reason)


@pytest.mark.parametrize("policy", [GrantsNothing, Undecided])
def test_a_strict_engine_raises_instead(policy: type[Scheduler]) -> None:
    world = World(policy, Shape(strict=True))
    world.add(Spec("a", PROMPT))
    step_until_dead(world)
    assert isinstance(world.core.dead, SchedulerStalled)
    assert world.finished["a"].reason.is_error


def test_what_is_in_flight_is_delivered_before_a_stall_is_seen() -> None:
    world = World(scripted(fcfs, *[lambda step: None] * 5), Shape(strict=True))
    world.add(Spec("a", PROMPT))
    step_until_dead(world)
    assert isinstance(world.core.dead, SchedulerStalled)
    assert world.tokens["a"] == world.expected("a")[0][:1]


def test_a_policy_may_take_several_plans_to_make_room() -> None:
    def preempt_one(step: Step) -> None:
        step.preempt(step.running[-1])

    world = World(scripted(fcfs, *[preempt_one] * 3), Shape(overlap=False))
    for index in range(3):
        world.add(Spec(f"r{index}", PROMPT))
    world.drain()


def test_waiting_for_a_future_arrival_is_no_stall() -> None:
    def plan(step: Step) -> None:
        if len(step.waiting) >= 2 or step.running:
            fcfs(step)

    world = World(always(plan))
    world.add(Spec("a", PROMPT))
    world.add(Spec("b", PROMPT, delay=100.0))
    world.drain()
    assert world.clock.now() > 100.0


def test_blocks_kept_for_siblings_do_not_stall_the_engine() -> None:
    """After a sample's end, its blocks are kept for one plan. If that plan could grant nothing for
    lack of blocks, there is another one."""

    def others_first(step: Step) -> None:
        for request in sorted(step.waiting, key=lambda request: request.parent is not None):
            if not step.grant(request):
                break
        step.grant_each(step.running)

    world = World(always(others_first), Shape(num_pages=3, max_model_len=12, overlap=False))
    world.add(Spec("family", PROMPT, n=2, max_tokens=1))
    world.step()
    world.add(Spec("other", (9,) * 9, max_tokens=1))
    world.drain(check=True)


@pytest.mark.slow("tries large sizes")
def test_a_storm_of_recomputing_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def thrash(step: Step) -> None:
        for request in step.running:
            step.preempt(request)
        for request in step.waiting:
            step.grant(request)

    world = World(
        always(thrash), Shape(reuse=False, overlap=False, num_pages=200, max_model_len=800)
    )
    with caplog.at_level(logging.WARNING, "dovetail"):
        for index in range(3):
            world.add(Spec(f"r{index}", PROMPT, max_tokens=1_000))
        for _ in range(3 * STORM_STEPS):
            world.step()
            for request in list(world.core._requests.values()):
                del request.output[:]  # the request never ends: keeps this test quick
                world.tokens[request.id].clear()
    (warning,) = [record for record in caplog.records if "recomputed" in record.message]
    assert "scheduler Always" in warning.getMessage()


# Memory


def test_a_request_that_alone_fills_the_pool_ends_at_its_length() -> None:
    world = World(shape=Shape(num_pages=3, max_model_len=100))
    world.add(Spec("a", PROMPT, max_tokens=50))
    for _ in range(30):
        world.step()
    assert world.finished["a"] == Finish(EndReason.KV_CAPACITY, "kv_capacity")
    assert world.tokens["a"] == world.expected("a")[0][: len(world.tokens["a"])]
    assert len(world.tokens["a"]) == 3 * 4 - len(PROMPT) + 1, (
        "K and V of all but the last token fill the pool"
    )
    assert world.kv.counts.held == 0
    world.add(Spec("b", PROMPT, max_tokens=2))
    while "b" not in world.finished:
        world.step()


def test_a_policy_that_stalls_with_a_full_pool_ends_no_request_early() -> None:
    """The request could go on: it is the policy that doesn't let it."""
    world = World(
        scripted(lambda step: step.grant(step.waiting[0], reserve=True), *[lambda step: None] * 9),
        Shape(num_pages=3, max_model_len=12),
    )
    world.add(Spec("a", (*PROMPT, 9, 10), max_tokens=2))
    world.drain()
    assert world.finished["a"] == Finish(EndReason.LENGTH)


# Executors


class WrongStep(RecordingExecutor):
    def collect(self, handle: int) -> Result:
        result = super().collect(handle)
        return dataclasses.replace(result, step=result.step + 1)


class FewTokens(RecordingExecutor):
    def collect(self, handle: int) -> Result:
        result = super().collect(handle)
        return dataclasses.replace(result, token_ids=result.token_ids[:-1])


class DiesAtSubmit(RecordingExecutor):
    def submit(self, batch: Batch) -> int:
        if batch.step == 2:
            raise RuntimeError("the device is gone")
        return super().submit(batch)


class DiesAtCollect(RecordingExecutor):
    def collect(self, handle: int) -> Result:
        if handle == 2:
            raise RuntimeError("the device is gone")
        return super().collect(handle)


@pytest.mark.parametrize(
    ("executor", "words"),
    [
        (WrongStep, "results must come in order"),
        (FewTokens, "tokens for the"),
        (DiesAtSubmit, "device is gone"),
        (DiesAtCollect, "device is gone"),
    ],
)
def test_an_executor_that_fails_ends_the_engine_and_everybody_is_answered(
    executor: type[RecordingExecutor], words: str
) -> None:
    world = populated(executor=executor)
    step_until_dead(world)
    assert words in str(world.core.dead)
    check_all_answered(world)


def failing(id: str, at: int) -> type[RecordingExecutor]:
    """Fails the row of one request in its `at`-th step, and its tokens there are rubbish."""

    class Failing(RecordingExecutor):
        def __init__(self, options: FakeExecutorOptions, context: ExecutorContext) -> None:
            super().__init__(options, context)
            self.seen = 0
            self.requests: dict[int, str] = {}  # row -> request id
            self.ids: dict[int, list[str]] = {}  # step -> request ids

        def submit(self, batch: Batch) -> int:
            self.requests |= {new.row: new.request_id for new in batch.added}
            self.ids[batch.step] = [self.requests[row] for row in batch.rows.tolist()]
            return super().submit(batch)

        def collect(self, handle: int) -> Result:
            result = super().collect(handle)
            if id in self.ids[handle]:
                self.seen += 1
                if self.seen >= at:
                    index = self.ids[handle].index(id)
                    tokens = np.array(
                        [
                            -1 if row == index else token
                            for row, token in enumerate(result.token_ids)
                        ]
                    )
                    return dataclasses.replace(
                        result, token_ids=tokens, failed={index: "not a number"}
                    )
            return result

    return Failing


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_row_that_fails_ends_its_request_alone(at: int, overlap: bool) -> None:
    world = World(shape=Shape(overlap=overlap, token_budget=6), executor=failing("a", at))
    world.add(Spec("a", PROMPT))
    world.add(Spec("b", (9, 9, 9)))
    request = world.requests["a"]
    while world.core.has_unfinished():
        world.step()
        world.check()
    assert world.finished["a"] == Finish(EndReason.ERROR, "not a number")
    assert world.finished["b"] == Finish(EndReason.LENGTH)
    assert world.tokens["b"] == world.expected("b")[0]
    assert world.kv.counts.held == 0
    assert world.heard.finished == ["a", "b"]
    again = LiveRequest("again", PROMPT, request.params, max_tokens=4)
    assert world.kv.lookup(again) == 0, "what it computed isn't trusted"


def test_samples_do_not_fork_a_sibling_that_failed() -> None:
    world = World(executor=failing("s#0", 1), shape=Shape(overlap=False))
    world.add(Spec("s", PROMPT, n=3))
    while world.core.has_unfinished():
        world.step()
    assert not any(batch.copies for batch in world.executor.sent[:2])
    assert [world.finished[id].reason for id in ("s#0", "s#1", "s#2")] == [
        "error",
        "length",
        "length",
    ]


# Observers


class Bad(Observer):
    def __init__(self, method: str) -> None:
        self.calls = 0

        def fail(event: object) -> None:
            self.calls += 1
            raise ValueError("observer")

        setattr(self, method, fail)


@pytest.mark.parametrize("method", ["on_arrived", "on_admitted", "on_finished", "on_step"])
def test_an_observer_that_raises_is_logged_once_and_dropped_after_a_few_more_errors(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Bad(method), RecordingObserver()
    world = World(observers=[("bad", bad), ("good", good)])
    for index in range(8):
        world.add(Spec(f"r{index}", PROMPT[: index + 1]))
    with caplog.at_level(logging.ERROR, "dovetail"):
        world.drain()
    assert bad.calls == MAX_ERRORS
    assert [record.getMessage().split(" raised ")[0] for record in caplog.records] == [
        "observer bad",
        "observer bad",
    ]
    assert good.events == world.observer.events, "the others miss nothing"


class Unable(RecordingObserver):
    def on_started(self, event: object) -> None:
        raise ConfigError("the port is taken")


def test_an_observer_that_can_not_do_what_its_options_say_keeps_the_engine_from_starting() -> None:
    before, after = RecordingObserver(), RecordingObserver()
    hub = ObserverHub([("before", before), ("unable", Unable()), ("after", after)])
    with pytest.raises(ConfigError, match="the port is taken"):
        hub.start(EngineStarted(0.0, "fcfs", "prefix", "local", 1, 1, 1, {}, ()))
    assert [type(event).__name__ for event in before.events] == ["EngineStarted", "EngineStopped"]
    assert not after.events


def test_events_come_in_an_order_that_makes_sense() -> None:
    world = World(
        scripted(
            lambda step: (
                step.grant_each(step.waiting),
                step.reject(step.waiting[0] if step.waiting else step.running[0], "no"),
            )
        )
    )
    world.add(Spec("a", PROMPT, max_tokens=1))
    world.add(Spec("b", PROMPT, max_tokens=1))
    world.drain()
    of_a = [
        type(event).__name__
        for event in world.observer.events
        if getattr(event, "request", None) is world.requests["a"]
    ]
    of_b = [
        type(event).__name__
        for event in world.observer.events
        if getattr(event, "request", None) is world.requests["b"]
    ]
    assert of_a == ["RequestArrived", "RequestFinished"]
    assert of_b == ["RequestArrived", "RequestPreempted", "RequestAdmitted", "RequestFinished"], (
        "b shared what a was to compute"
    )


def test_observers_hear_of_the_end_and_why() -> None:
    world = populated(always(lambda step: step.wake_at(float("nan"))))
    step_until_dead(world)
    world.core.stop()
    ends = {
        event.request.id: event.finish_reason
        for event in world.observer.events
        if isinstance(event, RequestFinished)
    }
    assert ends == dict.fromkeys(world.requests, "error")
    last = world.observer.events[-1]
    assert isinstance(last, EngineStopped)
    assert last.error is world.core.dead


# Ids


def test_an_id_is_taken_while_its_request_is_unfinished() -> None:
    world = World()
    (request,) = world.add(Spec("a", PROMPT))
    for another in (LiveRequest("a", PROMPT, request.params, max_tokens=3), request):
        with pytest.raises(RequestError, match="'a'"):
            world.core.add(another)
    world.drain()
    world.add(Spec("a", PROMPT))


def test_aborting_twice_or_an_unknown_request_does_nothing() -> None:
    world = World()
    (request,) = world.add(Spec("a", PROMPT))
    world.step()
    world.abort("a")
    world.abort("a")
    world.core.abort(LiveRequest("b", PROMPT, request.params, max_tokens=3))
    world.drain()
    assert world.heard.finished == ["a"]


def test_dead_engines_raise_dovetail_errors_only() -> None:
    assert issubclass(EngineDeadError, DovetailError)
    assert issubclass(SchedulerStalled, DovetailError)


def test_parts_are_swapped_only_while_nothing_is_unfinished() -> None:
    world = World()
    world.add(Spec("a", PROMPT))
    world.step()
    with pytest.raises(DovetailError, match="no request is unfinished"):
        world.core.swap(scheduler=world.core.scheduler)
    world.drain()

    class Listens(FCFS):
        steps = 0

        def on_step(self, done: object) -> None:
            self.steps += 1

    listens = Listens(NoOptions(), SchedulerContext(64, 8, 64, 4, 0))
    world.core.swap(scheduler=listens)
    world.add(Spec("b", PROMPT, max_tokens=3))
    while world.core.has_unfinished():
        world.step()
    assert listens.steps >= 3, "a policy that is put in later is told of steps too"
