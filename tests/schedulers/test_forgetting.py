"""Policies that keep numbers by client forget those of the idle, and decide as if they had not."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import tracemalloc
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from dovetail.api.executor import Batch
from dovetail.api.scheduler import Ran, Scheduler, SchedulerContext, Step, StepDone
from dovetail.request import Request
from dovetail.testing import FakeExecutor, make_request, plan
from dovetail_schedulers import counters, rpm
from dovetail_schedulers.counters import CounterOptions, Counters, Turns
from dovetail_schedulers.lcf import LCF, LCFOptions
from dovetail_schedulers.lightllm import LightLLM, LightLLMOptions
from dovetail_schedulers.rpm import RPM, RPMOptions
from dovetail_schedulers.vtc import VTC, VTCOptions
from tests.engine import world as engine_world
from tests.engine.world import RecordingExecutor, Shape, Spec, World
from tests.support import examples

CLIENTS = 5
NAME = 400  # characters


class KeepsAll(Counters):
    """The oracle: the paper's counters, looked through one by one, and never forgotten."""

    def in_turn(self, waiting: Iterable[Request]) -> Iterator[Request]:
        left = list(waiting)
        while left:
            request = min(left, key=lambda request: self.served[request.client])
            left.remove(request)
            yield request

    def finished(self, request: Request) -> None:
        pass


class VTCKeepsAll(VTC):
    def __init__(self, options: VTCOptions, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.counters = KeepsAll(options, lift=self.lift)


class LCFKeepsAll(VTCKeepsAll, LCF):
    pass


class LightLLMKeepsAll(LightLLM):
    def __init__(self, options: LightLLMOptions, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.turns = KeepsAll(options, lift=options.order == "vtc")


class RPMKeepsAll(RPM):
    """The oracle: all times when requests of a client were let in, since ever."""

    def __init__(self, options: RPMOptions, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.times: dict[str | None, list[float]] = {}
        self.planned = -math.inf

    def schedule(self, step: Step) -> None:
        super().schedule(step)
        self.planned = step.now

    def _lets_in(self, step: Step, request: Request) -> bool:
        defer, window_s = self.options.over == "defer", self.options.window_s
        time = step.now if defer else max(request.arrival_time, self.planned - window_s)
        times = self.times.setdefault(request.client, [])
        recent = sorted(one for one in times if one + window_s > time)
        if len(recent) < self.options.limit:
            times.append(time)
            self._let_in.add(request)
            return True
        if defer:
            step.wake_at(recent[0] + window_s)
            step.note(
                request,
                f"its client {request.client!r} is over its limit until {recent[0] + window_s:.3f} s",
            )
        else:
            step.reject(
                request,
                f"its client {request.client!r} sent more than {self.options.limit} requests in "
                f"{window_s:g} s",
            )
        return False


TWINS: dict[str, tuple[type[Scheduler], type[Scheduler], BaseModel]] = {
    "vtc": (VTC, VTCKeepsAll, VTCOptions()),
    "vtc, weighted": (VTC, VTCKeepsAll, VTCOptions(weights={"c0": 3.0}, input_weight=0.0)),
    "lcf": (LCF, LCFKeepsAll, LCFOptions()),
    "lightllm by vtc": (LightLLM, LightLLMKeepsAll, LightLLMOptions(order="vtc", every=2)),
    "lightllm by lcf": (LightLLM, LightLLMKeepsAll, LightLLMOptions(order="lcf", every=2)),
    "lightllm by arrival": (LightLLM, LightLLM, LightLLMOptions(every=2)),
    "rpm": (RPM, RPMKeepsAll, RPMOptions(limit=2, window_s=0.1)),
    "rpm, deferring": (RPM, RPMKeepsAll, RPMOptions(limit=1, window_s=0.1, over="defer")),
}


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that can be forgotten is forgotten at once."""
    for module in (counters, rpm):
        monkeypatch.setattr(module, "LOOK_AFTER", 0)


@st.composite
def acts(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """Simulate clients: requests arrive, now or later, and some are aborted; the engine steps."""
    done: list[tuple[str, Any]] = []
    for index in range(draw(st.integers(2, 16))):
        client = draw(st.sampled_from([None, *(f"c{i}" for i in range(CLIENTS))]))
        delay = draw(st.sampled_from([0.0, 0.0, 0.0, 0.02, 0.15, 0.6]))
        prompt = tuple(range(draw(st.integers(1, 12))))
        done.append(
            (
                "add",
                Spec(
                    f"r{index}",
                    prompt,
                    max_tokens=draw(st.integers(1, 12)),
                    n=draw(st.sampled_from([1, 1, 1, 2])),
                    delay=delay,
                    client=client,
                ),
            )
        )
        done.append(("steps", draw(st.sampled_from([0, 0, 1, 3, 8, 40]))))
        if draw(st.integers(0, 5)) == 0:
            done.append(("abort", draw(st.integers(0, index))))
    return done


def played(policy: type[Scheduler], options: BaseModel, acts: list[tuple[str, Any]]) -> World:
    """An engine short of memory, so that requests are preempted, after `acts`."""
    world = World(
        policy,
        Shape(num_pages=16, block_size=2, max_num_seqs=3, token_budget=16, max_model_len=32),
        options,
    )
    for act, argument in acts:
        if act == "add":
            world.add(argument)
        elif act == "abort":
            world.abort(sorted(world.requests)[argument % len(world.requests)])
        else:
            for _ in range(argument):
                world.step()
    world.drain()
    return world


class Bench:
    """Counters without an engine: waiting and running requests, and the calls that tell the
    counters about them."""

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.orders: list[list[str]] = []  # in which the waiting had their turns

    def perform(self, act: str, number: int) -> None:
        counters, some = self.counters, self.running[number % max(1, len(self.running)) :][:1]
        if act == "arrive":
            request = make_request(
                f"{len(self.orders)}.{len(self.waiting)}.{number}",
                1 + number % 7,
                client=f"c{number % CLIENTS}",
            )
            self.waiting.append(request)
            counters.arrived(request)
        elif act == "plan":
            for request in itertools.islice(counters.in_turn(tuple(self.waiting)), 1 + number % 3):
                counters.admitted(request)
                self.waiting.remove(request)
                self.running.append(request)
            counters.still_wait(self.waiting)
        elif act == "generate":
            counters.generated(
                StepDone(
                    0,
                    0.0,
                    1.0,
                    tuple(
                        Ran(request=request, computed=1, generated=1 + number % 9)
                        for request in some or self.running
                    ),
                )
            )
        elif act == "preempt":
            for request in some:
                self.running.remove(request)
                self.waiting.append(request)
                request.preemptions += 1
        else:
            for request in (
                self.waiting[number % max(1, len(self.waiting)) :][:1] if act == "abort" else some
            ):
                (self.waiting if act == "abort" else self.running).remove(request)
                counters.finished(request)
        self.orders.append([request.id for request in counters.in_turn(tuple(self.waiting))])


ACTS = ["arrive"] * 3 + ["plan", "generate", "finish"] * 2 + ["abort", "preempt"]


@pytest.mark.parametrize("lift", [True, False])
@pytest.mark.usefixtures("forgetful")
@examples(quick=120, full=20_000)
@given(
    script=st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 62)), min_size=20, max_size=60)
)
def test_turns_are_the_same_whether_the_idle_are_forgotten_or_not(
    lift: bool, script: list[tuple[str, int]]
) -> None:
    forgets, keeps_all = (Bench(kind(CounterOptions(), lift=lift)) for kind in (Counters, KeepsAll))
    for act, number in script:
        forgets.perform(act, number)
        keeps_all.perform(act, number)
    assert forgets.orders == keeps_all.orders


@pytest.mark.parametrize("twins", TWINS.values(), ids=TWINS)
@pytest.mark.usefixtures("forgetful")
@examples(quick=8, full=1_000)
@given(acts=acts())
def test_a_policy_decides_as_its_twin_that_forgets_nothing(
    twins: tuple[type[Scheduler], type[Scheduler], BaseModel], acts: list[tuple[str, Any]]
) -> None:
    policy, keeps_all, options = twins
    assert played(policy, options, acts).story() == played(keeps_all, options, acts).story()


# (client, seconds ago)
ARRIVALS = st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 4)), max_size=3)


@pytest.mark.usefixtures("forgetful")
@examples(quick=80, full=5_000)
@given(
    options=st.builds(
        RPMOptions,
        limit=st.integers(1, 2),
        window_s=st.just(1.0),
        over=st.sampled_from(["reject", "defer"]),
    ),
    plannings=st.lists(
        st.tuples(st.sampled_from([0.1, 0.4, 0.7, 1.0, 3.0]), ARRIVALS), min_size=3, max_size=12
    ),
)
def test_rpm_decides_as_its_twin_however_far_requests_are_dated_back(
    options: RPMOptions, plannings: list[tuple[float, list[tuple[str, float]]]]
) -> None:
    context = SchedulerContext(64, 8, 64, 4, 0)
    twins = [RPM(options, context), RPMKeepsAll(options, context)]
    now = 0.0
    for planning, (later, requests) in enumerate(plannings):
        now += later
        decisions = [
            plan(
                twin,
                waiting=[
                    make_request(f"{planning}.{index}", client=client, arrival_time=now - age)
                    for index, (client, age) in enumerate(requests)
                ],
                now=now,
            )
            for twin in twins
        ]
        assert dataclasses.replace(decisions[0], policy=twins[1]) == decisions[1]


class Fleeting(RecordingExecutor):
    """Keeps no batches."""

    def submit(self, batch: Batch) -> int:
        return FakeExecutor.submit(self, batch)


def entries(policy: Scheduler) -> int:
    """In all tables of a policy and of its counters."""
    owners = [policy, *(value for value in vars(policy).values() if isinstance(value, Turns))]
    return sum(
        len(table)
        for owner in owners
        for table in vars(owner).values()
        if isinstance(table, dict | set)
    )


@dataclasses.dataclass(frozen=True)
class Soak:
    """What was kept in the tables by client, and in all, while many clients came that never came
    again."""

    most_entries: int
    mib: float


def soak(
    policy: type[Scheduler],
    options: BaseModel,
    *,
    clients: int = 480,
    at_once: int = 8,
    pause_s: float = 1.0,
) -> Soak:
    """Each client sends one request and has a long name. `at_once` come together; the next when all
    of them have ended, and after a pause."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_world, "watched", lambda policy: policy)  # it notes all that it sees
        world = World(policy, Shape(events=False, max_num_seqs=4), options, executor=Fleeting)
    most = 0
    gc.collect()
    tracemalloc.start()
    try:
        for first in range(0, clients, at_once):
            for index in range(first, first + at_once):
                world.add(
                    Spec(f"r{index}", (1, 2, 3), max_tokens=2, client=f"c{index}".ljust(400, "x"))
                )
            while world.core.has_unfinished():
                world.core.step()
                most = max(most, entries(world.policy))
            world.clock.wait_until(world.clock.now() + pause_s)
            for noted in (world.requests, world.tokens, world.seeds):
                noted.clear()
        gc.collect()
        return Soak(most, tracemalloc.get_traced_memory()[0] / 2**20)
    finally:
        tracemalloc.stop()


BOUNDED: dict[str, tuple[type[Scheduler], BaseModel, int]] = {  # and how many entries there may be
    "vtc": (
        VTC,
        VTCOptions(),
        2 * counters.LOOK_AFTER + 8 * 3,
    ),  # three tables have the clients with requests
    "lightllm by vtc": (LightLLM, LightLLMOptions(order="vtc"), 2 * counters.LOOK_AFTER + 8 * 3),
    "lightllm by arrival": (LightLLM, LightLLMOptions(), 0),
    "rpm": (
        RPM,
        RPMOptions(window_s=2.0),
        2 * (2 * 2 * 8) + rpm.LOOK_AFTER + 8,
    ),  # eight clients a second at most
    "rpm, deferring": (
        RPM,
        RPMOptions(window_s=2.0, over="defer"),
        2 * (2 * 2 * 8) + rpm.LOOK_AFTER + 8,
    ),
}


@pytest.mark.parametrize(("policy", "options", "most"), BOUNDED.values(), ids=BOUNDED)
@pytest.mark.slow("tries large sizes")
def test_clients_that_never_come_again_take_no_memory(
    policy: type[Scheduler], options: BaseModel, most: int
) -> None:
    soaked = soak(policy, options)
    assert soaked.most_entries <= most
    assert soaked.mib < 0.12, "a name and an entry of each client would be 0.23 MiB"


def test_lcf_remembers_only_clients_that_it_served() -> None:
    """Time away earns credit there, so that forgetting would change whose turn it is."""
    kept = Counters(CounterOptions(), lift=False)
    for index in range(2 * counters.LOOK_AFTER):
        request = make_request(f"r{index}", client=f"c{index}")
        kept.arrived(request)
        assert list(kept.in_turn([request])) == [request]
        if index % 2:
            kept.admitted(request)
        kept.still_wait([])
        kept.finished(request)
    assert len(kept.served) == counters.LOOK_AFTER


def test_vtc_remembers_who_was_served_more_until_the_others_have_caught_up() -> None:
    kept, waiting = Counters(CounterOptions(), lift=True), make_request("w", client="waits")
    kept.arrived(waiting)

    def serve(client: str, tokens: int, times: int = 1) -> None:
        for _ in range(times):
            request = make_request("r", tokens, client=client)
            kept.arrived(request)
            kept.admitted(request)
            kept.still_wait([waiting])
            kept.finished(request)

    serve("greedy", 100)
    serve("other", 1, times=2 * counters.LOOK_AFTER)
    assert "greedy" in kept.served
    serve("waits", 200)
    serve("other", 200, times=counters.LOOK_AFTER)
    assert set(kept.served) == {"waits", "other"}
