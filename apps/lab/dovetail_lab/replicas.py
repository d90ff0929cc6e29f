"""Data-parallel replicas: `replay_replicas` runs one trace through several equal engines, and a router says which engine each request goes to.

Each replica is a whole simulated engine with a virtual clock and a thread of its own. No clock passes an instant at which all replicas must be looked
at before all have come to it; then one thread acts while the others wait (`_Meeting`). So the result doesn't depend on threads.

Replicas may keep in step, as those do that share the experts of a mixture: all devices begin a step together, and it takes as long as the longest.

    replica 0   | prefill ................ | decode | decode |
    replica 1   | decode | waiting ....... | decode | prefill ....
                         a request that comes here begins ^ with the next step of all
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Condition, Event
from typing import Any

from dovetail import EngineConfig, LLMEngine
from dovetail.api.clock import VirtualClock
from dovetail.errors import ConfigError, DovetailError, UnsupportedError
from dovetail.registry.registry import Registry
from dovetail_lab.feeding import Feeder
from dovetail_lab.recording import Recorder
from dovetail_lab.records import RequestRecord, RunResult, StepTimes, Timeline
from dovetail_lab.routers import Arrival, ReplicaLoad, Router
from dovetail_lab.simulate import UNREAD_MODEL, Progress, measured_otherwise, notes_of, settings_of
from dovetail_lab.simulated import SimulatedExecutor
from dovetail_lab.token_ids import prompt_ids
from dovetail_lab.traces.request import Trace, TraceRequest

OVER: tuple[float, TraceRequest | None] = (math.inf, None)


def replay_replicas(
    config: str | Path | Mapping[str, Any] | EngineConfig,
    trace: Trace,
    replicas: int,
    router: Router,
    *,
    in_step: bool = False,
    name: str | None = None,
    seed: int = 0,
    registry: Registry | None = None,
    progress: Progress | None = None,
) -> RunResult:
    """Run every request of `trace`, at its time, through the one of `replicas` engines that `router` chooses. Each engine is as `config` describes,
    with the executor `simulated`; `in_step`: their devices begin each step together.

    Raises `UnsupportedError` for another executor, `ConfigError` for a choice that is no replica and for fewer than one,
    what `LLMEngine` raises, and what ended an engine.
    """
    if replicas < 1:
        raise ConfigError(f"replicas: expected at least 1, got {replicas}")
    loaded = EngineConfig.load(config, seed=seed)
    registry = registry or Registry.discover(loaded.plugins)
    runnable = EngineConfig.load(loaded, model=UNREAD_MODEL, tokenizer=None)
    with ExitStack() as stack:
        clocks = [_MeetingClock() for _ in range(replicas)]
        engines = [stack.enter_context(LLMEngine.from_config(runnable, registry=registry, clock=clock)) for clock in clocks]
        members = [_Replica(engine, clock, trace) for engine, clock in zip(engines, clocks, strict=True)]
        meeting = _Meeting(members, trace, router, progress or (lambda done, of_all: None))
        for member in members:
            member.join(meeting, in_step)
        with ThreadPoolExecutor(replicas) as threads:
            try:
                running = [threads.submit(member.run, meeting) for member in members]
                meeting.opened.set()
                wait(running)
            except BaseException:  # Ctrl-C comes to this thread alone
                meeting.break_off()
                raise
        errors = [error for future in running if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, BrokenMeetingError)):  # of those who only missed another, last
            raise error
        records = {id: replace(record, replica=index) for index, member in enumerate(members) for id, record in member.ended.items()}
        in_order = tuple(records[request.id] for request in trace)
        timeline = Timeline.of_replicas([member.timeline for member in members], engines[0].capacity.num_blocks)
        notes = notes_of(in_order, timeline, sum(member.cut for member in members), engines[0].capacity.max_model_len)
        return RunResult(
            name=name or loaded.scheduler.label,
            trace=trace.name,
            trace_source=trace.source,
            seed=seed,
            settings={**settings_of(loaded.in_full(registry), engines[0], True), "replicas": replicas, "router": router.label},
            step_times=members[0].step_times,
            requests=in_order,
            timeline=timeline,
            notes=(*trace.notes, *members[0].measured_otherwise, *notes),
            seeded=trace.seeded,
            window=trace.window,
        )


class _Replica:
    """One engine, and what was sent to it."""

    def __init__(self, engine: LLMEngine, clock: _MeetingClock, trace: Trace) -> None:
        if not isinstance(engine.core.executor, SimulatedExecutor):
            raise UnsupportedError(f"replicas are simulated: expected executor simulated, got {type(engine.core.executor).__name__}")
        self.core, self._clock, self._executor = engine.core, clock, engine.core.executor
        self.core.plan_timing.plans_late = self._executor.options.plans_late
        self._vocab_size = engine.capacity.vocab_size
        self._recorder = Recorder(engine.core, trace, 0.0)
        nothing = replace(trace, requests=())  # what is sent to it, it is given one by one
        self._feeder = Feeder(engine, self._executor, nothing, 0.0, self._recorder.refused)

    def join(self, meeting: _Meeting, in_step: bool) -> None:
        self._clock.meeting = meeting
        if in_step:
            self._executor.together = meeting.run_together

    @property
    def load(self) -> ReplicaLoad:
        books = self.core.books
        tokens = sum(request.num_tokens for requests in (books.waiting, books.running) for request in requests)
        return ReplicaLoad(len(books.waiting), len(books.running), tokens)

    def as_seen(self, request: TraceRequest) -> Arrival:
        prompt = prompt_ids(request, self._vocab_size)
        return Arrival(request.id, request.client, request.priority, request.arrival_time, prompt, request.limit)

    @property
    def ended(self) -> Mapping[str, RequestRecord]:
        return self._recorder.ended

    @property
    def timeline(self) -> Timeline:
        return self._recorder.timeline

    @property
    def step_times(self) -> StepTimes:
        return self._executor.profile.as_step_times()

    @property
    def measured_otherwise(self) -> tuple[str, ...]:
        return tuple(measured_otherwise(self._executor, self.core))

    @property
    def cut(self) -> int:
        return self._feeder.cut

    def take(self, request: TraceRequest) -> None:
        self._feeder.take(request, request.arrival_time)

    def run(self, meeting: _Meeting) -> None:
        """Run until all that was sent has ended, and nothing more will be."""
        try:
            meeting.opened.wait()
            while self.core.has_unfinished() or meeting.next_s < math.inf:
                meeting.check()
                if not self.core.has_unfinished():
                    self._clock.wait_until(meeting.next_s)
                    continue
                self._feeder.let_in()
                delivery = self.core.step()
                if self.core.dead is not None:
                    raise self.core.dead
                self._recorder.take(delivery)
                self.core.plan_timing.virtual_plan_s = self._executor.plan_s
                self._feeder.forget(delivery.finished)
        except BaseException:
            meeting.break_off()
            raise
        meeting.leave()


@dataclass(slots=True)
class _Waiting:
    """A replica's step that is to run together with those of others. Seconds."""

    ready_s: float
    seconds: float
    started_s: float | None = None  # None: it doesn't run yet


class _Meeting:
    """The instants at which all replicas are looked at: their loads are reported, a request comes and is routed, or a step begins
    that all run together.

    A replica that comes to one waits. Once all do, the last to come does what is due first: nothing can happen any more that comes before it.
    """

    def __init__(self, members: Sequence[_Replica], trace: Trace, router: Router, progress: Progress) -> None:
        self._members, self._router, self._progress = members, router, progress
        self._requests = len(trace)
        self._loads: list[ReplicaLoad] = []  # as last reported
        self._agenda = self._instants(trace)
        self.next_s, self._arriving = next(self._agenda, OVER)
        self._changed = Condition()
        self._present, self._held = len(members), 0  # replicas that still run; instants of the agenda that are past
        self._blocked = 0  # replicas that wait here
        self._steps: list[_Waiting] = []  # of some of these
        self._ended_s = -math.inf  # when the last step that all ran ended
        self._broken = False
        self.opened = Event()  # once all threads have been started: a thread pool that is interrupted while it starts one forgets it

    def attend(self) -> None:
        """Wait until all replicas are at `next_s`, and what is due then is done."""
        with self._changed:
            held = self._held
            self._block(lambda: self._held > held)

    def run_together(self, ready_s: float, seconds: float) -> tuple[float, float]:
        """Wait until a step begins that all replicas run together, at `ready_s` or later. Return when it does, and how long it takes."""
        own = _Waiting(ready_s, seconds)
        with self._changed:
            self._steps.append(own)
            self._block(lambda: own.started_s is not None)
        assert own.started_s is not None
        return own.started_s, own.seconds

    def leave(self) -> None:
        """Let the others not wait for one that has come to its end."""
        with self._changed:
            self._present -= 1
            if self._present and self._blocked == self._present:
                self._act()

    def check(self) -> None:
        """Raise `BrokenMeetingError` if the run was broken off, which a replica that meets nobody any more wouldn't notice."""
        if self._broken:
            raise BrokenMeetingError("another replica has failed, or the run was interrupted")

    def break_off(self) -> None:
        """Let the replicas end, since one has failed or the run was interrupted."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()
        self.opened.set()

    def _block(self, done: Callable[[], bool]) -> None:
        self._blocked += 1
        if self._blocked == self._present:
            self._act()
        self._changed.wait_for(lambda: done() or self._broken)
        if not done():
            self.check()

    def _act(self) -> None:
        """Do what is due first, and release those who waited for it."""
        start = max(min((step.ready_s for step in self._steps), default=math.inf), self._ended_s)
        if start < self.next_s:
            ready = [step for step in self._steps if step.ready_s <= start]
            longest = max(step.seconds for step in ready)
            for step in ready:
                step.started_s, step.seconds = start, longest
            self._steps = [step for step in self._steps if step.started_s is None]
            self._ended_s = start + longest
            self._blocked -= len(ready)
        else:
            if self._arriving is None:
                self._loads = [member.load for member in self._members]
            else:
                self._route(self._arriving)
            self.next_s, self._arriving = next(self._agenda, OVER)
            self._held += 1
            self._blocked = len(self._steps)
            if self._blocked == self._present:  # nobody waited for this instant but those who wait for a step
                self._act()
        self._changed.notify_all()

    def _route(self, request: TraceRequest) -> None:
        self._progress(sum(len(member.ended) for member in self._members), self._requests)
        seen = self._members[0].as_seen(request)
        told = self._router.choose(seen, [replace(load) for load in self._loads])
        try:
            chosen = operator.index(told)
        except TypeError:  # 1.0 is equal to a replica's number, but names none
            chosen = -1
        if chosen not in range(len(self._members)):
            raise ConfigError(f"{type(self._router).__name__}.choose: expected a replica from 0 to {len(self._members) - 1}, got {told!r}")
        self._loads[chosen].sent += 1
        self._loads[chosen].sent_tokens += request.prompt_tokens
        self._members[chosen].take(request)

    def _instants(self, trace: Trace) -> Iterator[tuple[float, TraceRequest | None]]:
        """Yield when to meet, in order, and the request that arrives then; None: loads are reported."""
        reported_s = -math.inf
        for request in trace:
            due_s = self._router.reports_at(request.arrival_time)
            if due_s > reported_s:
                reported_s = due_s
                yield due_s, None
            yield request.arrival_time, request


class BrokenMeetingError(DovetailError):
    """Another replica has failed, or the run was interrupted."""


class _MeetingClock(VirtualClock):
    """A replica's clock, which stops at each meeting on its way."""

    meeting: _Meeting | None = None

    def wait_until(self, instant: float) -> None:
        while self.meeting is not None and self.meeting.next_s <= instant:
            super().wait_until(self.meeting.next_s)
            self.meeting.attend()
        super().wait_until(instant)
