"""Data-parallel replicas: `replay_replicas` runs one trace through several identical engines, and a
router assigns each request to one of them.

Each replica is a complete simulated engine with its own virtual clock and thread. No clock passes
an instant at which all replicas are inspected before all have reached it; then one thread acts
while the others wait (`_Meeting`). So the result doesn't depend on thread scheduling.

Replicas may run in lockstep, as those of a mixture of experts that share the experts: all devices
start a step together, and it takes as long as the longest.

    replica 0   | prefill ................ | decode | decode |
    replica 1   | decode | waiting ....... | decode | prefill ....
                         a request arriving here starts   ^ with the next step of all
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from heapq import heappop, heappush
from pathlib import Path
from threading import Condition, Event
from typing import Any

from dovetail import EngineConfig, LLMEngine
from dovetail.api.clock import VirtualClock
from dovetail.errors import ConfigError, DovetailError, UnsupportedError
from dovetail.request.lora import LoRARequest
from dovetail.request.request import Request
from dovetail.request.sampling_params import SamplingParams
from dovetail.serving import Assembly, Registry, assemble
from dovetail_lab.adapters import SimulatedAdapter
from dovetail_lab.feeding import Feeder, SimulatedRules
from dovetail_lab.recording import Recorder
from dovetail_lab.records import RequestRecord, RunResult, StepTimes, Timeline
from dovetail_lab.routers import Arrival, Completion, ReplicaLoad, Router
from dovetail_lab.sessions import Followers, Released
from dovetail_lab.simulate import (
    Progress,
    device_notes,
    measured_otherwise,
    notes_of,
    settings_of,
    without_model,
)
from dovetail_lab.simulated import SimulatedExecutor
from dovetail_lab.token_ids import media_items, prompt_ids
from dovetail_lab.traces.request import Trace, TraceRequest
from dovetail_lab.traces.transform import arriving_at

TICK_S = 0.05  # how often replicas meet while requests wait for others


class Due(Enum):
    """The next event when replicas synchronize."""

    ARRIVAL = "a request is routed"
    REPORT = "loads are reported"
    NOTHING = "replicas have waited for each other"


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
    """Run every request of `trace`, at its time, through the one of `replicas` engines that
    `router` chooses. Each engine is configured by `config`, with the executor `simulated`;
    `in_step`: their devices start each step together.

    Raises `UnsupportedError` for another executor, `ConfigError` if the router's choice is invalid
    or there is no replica, the errors of `LLMEngine`, and the error that ended an engine.
    """
    if replicas < 1:
        raise ConfigError(f"replicas: expected at least 1, got {replicas}")
    loaded = EngineConfig.load(config, seed=seed)
    registry = registry or Registry.discover(loaded.plugins)
    runnable = without_model(loaded, trace)
    with ExitStack() as stack:
        clocks = [_MeetingClock() for _ in range(replicas)]
        engines: list[LLMEngine] = []
        members: list[_Replica] = []
        for clock in clocks:
            rules = SimulatedRules()
            assembly = assemble(runnable, {}, registry=registry, clock=clock)
            engine = LLMEngine(assembly, constraints_of=rules, adapter_of=_adapter_of(assembly))
            engines.append(stack.enter_context(engine))
            members.append(_Replica(engines[-1], clock, trace, rules))
        meeting = _Meeting(members, trace, router, progress or (lambda done, of_all: None))
        for member in members:
            member.join(meeting, in_step)
        with ThreadPoolExecutor(replicas) as threads:
            try:
                running = [threads.submit(member.run, meeting) for member in members]
                meeting.opened.set()
                wait(running)
            except BaseException:  # Ctrl-C is delivered only to this thread
                meeting.break_off()
                raise
        errors = [error for future in running if (error := future.exception()) is not None]
        for error in sorted(
            errors, key=lambda error: isinstance(error, BrokenMeetingError)
        ):  # secondary errors last
            raise error
        records = {
            id: replace(record, replica=index)
            for index, member in enumerate(members)
            for id, record in member.ended.items()
        }
        in_order = tuple(records[request.id] for request in trace)
        timeline = Timeline.of_replicas(
            [member.timeline for member in members], engines[0].capacity.num_pages
        )
        notes = notes_of(
            in_order,
            timeline,
            sum(member.cut for member in members),
            engines[0].capacity.max_model_len,
        )
        return RunResult(
            name=name or loaded.scheduler.label,
            trace=trace.name,
            trace_source=trace.source,
            seed=seed,
            settings={
                **settings_of(loaded.in_full(registry), engines[0], True),
                "replicas": replicas,
                "router": router.label,
            },
            step_times=members[0].step_times,
            requests=in_order,
            timeline=timeline,
            notes=(
                *trace.notes,
                *members[0].measured_otherwise,
                *device_notes([member.device for member in members]),
                *notes,
            ),
            seeded=trace.seeded,
            window=trace.window,
        )


def _adapter_of(assembly: Assembly) -> Callable[[LoRARequest], SimulatedAdapter] | None:
    """Return what makes the adapters of a simulated engine."""
    device = assembly.core.executor
    return device.adapters.get if isinstance(device, SimulatedExecutor) else None


class _Replica:
    """One engine, and the requests sent to it."""

    def __init__(
        self, engine: LLMEngine, clock: _MeetingClock, trace: Trace, rules: SimulatedRules
    ) -> None:
        if not isinstance(engine.core.executor, SimulatedExecutor):
            raise UnsupportedError(
                f"replicas are simulated: expected executor simulated, got "
                f"{type(engine.core.executor).__name__}"
            )
        self.core, self._clock, self.device = engine.core, clock, engine.core.executor
        self.core.plan_timing.plans_late = self.device.host.plans_late
        self._vocab_size = engine.capacity.vocab_size
        front_end = self.device.host.front_end
        self._recorder = Recorder(engine.core, trace, 0.0, front_end)
        nothing = replace(trace, requests=())  # requests are added one by one
        self.completions: list[Completion] = []  # not yet passed to the router
        refused = self._recorder.refused
        self._feeder = Feeder(engine, self.device, nothing, 0.0, refused, rules, front_end)

    def join(self, meeting: _Meeting, in_step: bool) -> None:
        self._clock.meeting = meeting
        if in_step:
            self.device.together = meeting.run_together

    @property
    def load(self) -> ReplicaLoad:
        books = self.core.books
        tokens = sum(
            request.num_tokens
            for requests in (books.waiting, books.running)
            for request in requests
        )
        return ReplicaLoad(len(books.waiting), len(books.running), tokens)

    def as_seen(self, request: TraceRequest) -> Arrival:
        prompt = prompt_ids(request, self._vocab_size)
        return Arrival(
            request.id,
            request.client,
            request.priority,
            request.arrival_time,
            prompt,
            request.limit,
            request.session,
        )

    def cached_tokens(self, request: TraceRequest) -> int:
        """Return how many tokens of a request's prompt its cache holds."""
        prompt = prompt_ids(request, self._vocab_size)
        media = tuple([item.span for item in media_items(request)])
        probe = Request("router's probe", prompt, SamplingParams(), max_tokens=1, media=media)
        found = self.core.kv.lookup(probe)
        self.core.kv.free(probe)
        return found

    @property
    def ended(self) -> Mapping[str, RequestRecord]:
        return self._recorder.ended

    @property
    def timeline(self) -> Timeline:
        return self._recorder.timeline

    @property
    def step_times(self) -> StepTimes:
        return self.device.profile.as_step_times()

    @property
    def measured_otherwise(self) -> tuple[str, ...]:
        return tuple(measured_otherwise(self.device, self.core))

    @property
    def cut(self) -> int:
        return self._feeder.cut

    def take(self, request: TraceRequest) -> bool:
        """Add a request. Returns False if the engine refused it."""
        return self._feeder.take(request, request.arrival_time) is not None

    def refuse(self, request: TraceRequest, why: str) -> None:
        self._recorder.refused(request, why)

    def run(self, meeting: _Meeting) -> None:
        """Run until all requests have ended, and no more will be sent."""
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
                self.core.plan_timing.virtual_plan_s = self.device.plan_s
                self._feeder.delivered(delivery)
                if delivery.finished:
                    meeting.ended(
                        self, [self._recorder.ended[request.id] for request in delivery.finished]
                    )
        except BaseException:
            meeting.break_off()
            raise
        meeting.leave()


@dataclass(slots=True)
class _Waiting:
    """A replica's step that runs together with those of others. Times in seconds."""

    ready_s: float
    seconds: float
    started_s: float | None = None  # None: not running yet


class _Meeting:
    """Synchronizes replicas at the instants at which all are inspected: their loads are reported, a
    request is routed, or a step starts that all run together.

    A replica that reaches one waits. Once all do, the last one performs the earliest due action:
    nothing earlier can happen any more.

    While requests wait for others to end, replicas also meet every `TICK_S`, so that none passes
    the arrival of a follower: one that would arrive before the next meeting arrives at that.
    """

    def __init__(
        self, members: Sequence[_Replica], trace: Trace, router: Router, progress: Progress
    ) -> None:
        self._members = members
        self._router = router
        self._progress = progress
        self._requests = len(trace)
        self._loads: list[ReplicaLoad] = []  # most recently reported
        self._followers = Followers(trace)
        self._coming = deque([request for request in trace if request.id not in self._followers])
        self._released: list[Released] = []  # heap of followers with an arrival time
        self._past_s = self._reported_s = -math.inf  # the last instant, and report
        self.next_s, self._due = self._next_instant()
        self._changed = Condition()
        # replicas still running; instants of the agenda that have passed
        self._present = len(members)
        self._held = 0
        self._blocked = 0  # replicas waiting here
        self._steps: list[_Waiting] = []  # of some of these replicas
        self._ended_s = -math.inf  # end of the last common step
        self._broken = False
        # set once all threads are started: a thread pool interrupted while starting one would
        # forget it
        self.opened = Event()

    def attend(self) -> None:
        """Wait until all replicas have reached `next_s` and the actions due then are done."""
        with self._changed:
            held = self._held
            self._block(lambda: self._held > held)

    def run_together(self, ready_s: float, seconds: float) -> tuple[float, float]:
        """Wait for the start of a step that all replicas run together, at `ready_s` or later.
        Returns (start, duration)."""
        own = _Waiting(ready_s, seconds)
        with self._changed:
            self._steps.append(own)
            self._block(lambda: own.started_s is not None)
        assert own.started_s is not None
        return own.started_s, own.seconds

    def leave(self) -> None:
        """Deregister a replica that has ended, so that others don't wait for it."""
        with self._changed:
            self._present -= 1
            if self._present and self._blocked == self._present:
                self._act()

    def check(self) -> None:
        """Raise `BrokenMeetingError` if the run was aborted, which a replica past its last meeting
        wouldn't notice."""
        if self._broken:
            raise BrokenMeetingError("another replica has failed, or the run was interrupted")

    def break_off(self) -> None:
        """Abort all replicas, since one has failed or the run was interrupted."""
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
        """Perform the earliest due action, and release the replicas that waited for it."""
        start = max(min((step.ready_s for step in self._steps), default=math.inf), self._ended_s)
        if start < self.next_s:
            ready = [step for step in self._steps if step.ready_s <= start]
            longest = max(step.seconds for step in ready)
            for step in ready:
                step.started_s = start
                step.seconds = longest
            self._steps = [step for step in self._steps if step.started_s is None]
            self._ended_s = start + longest
            self._blocked -= len(ready)
        else:
            if self._due is Due.ARRIVAL:
                self._route(self._take_next())
            elif self._due is Due.REPORT:
                self._loads = [member.load for member in self._members]
            self._past_s = self.next_s
            self.next_s, self._due = self._next_instant()
            self._held += 1
            self._blocked = len(self._steps)
            if (
                self._blocked == self._present
            ):  # only replicas that wait for a step were waiting for this instant
                self._act()
        self._changed.notify_all()

    def ended(self, member: _Replica, records: Sequence[RequestRecord]) -> None:
        """Note that requests of a replica have ended: the router is told at the next arrival, and
        those that waited for them get an arrival time."""
        with self._changed:
            for record in records:
                member.completions.append(
                    Completion(
                        record.id,
                        record.session,
                        self._members.index(member),
                        record.finished_s,
                        record.prompt_tokens,
                        record.output_tokens,
                        record.completed,
                    )
                )
                if not record.completed:
                    self._abandon(record.id, record.finished_s)
                for one in self._followers.ended(record.id, record.finished_s):
                    arrival_s = max(one.arrival_s, self.next_s)
                    heappush(
                        self._released,
                        Released(arrival_s, one.place, arriving_at(one.request, arrival_s)),
                    )

    def _abandon(self, id: str, time_s: float) -> None:
        for request, why in self._followers.failed(id, time_s):
            self._members[0].refuse(request, why)

    def _route(self, request: TraceRequest) -> None:
        self._progress(sum(len(member.ended) for member in self._members), self._requests)
        ended = [one for member in self._members for one in member.completions]
        for completion in sorted(ended, key=lambda one: (one.time_s, one.replica)):
            self._router.ended(completion)
        for member in self._members:
            member.completions.clear()
        seen = self._members[0].as_seen(request)
        loads = [replace(load) for load in self._loads]
        if self._router.sees_cache:
            for load, member in zip(loads, self._members, strict=True):
                load.cached_tokens = member.cached_tokens(request)
        told = self._router.choose(seen, loads)
        try:
            chosen = operator.index(told)
        except TypeError:  # 1.0 equals a replica's index, but isn't one
            chosen = -1
        if chosen not in range(len(self._members)):
            raise ConfigError(
                f"{type(self._router).__name__}.choose: expected a replica from 0 to "
                f"{len(self._members) - 1}, got {told!r}"
            )
        self._loads[chosen].sent += 1
        self._loads[chosen].sent_tokens += request.prompt_tokens
        if not self._members[chosen].take(request):
            self._abandon(request.id, request.arrival_time)

    def _take_next(self) -> TraceRequest:
        """Remove and return the request that arrives next."""
        if self._released and not (
            self._coming and self._coming[0].arrival_time <= self._released[0].arrival_s
        ):
            return heappop(self._released).request
        return self._coming.popleft()

    def _next_instant(self) -> tuple[float, Due]:
        """Return when to meet next, and what is due then."""
        arrivals = (
            self._coming[0].arrival_time if self._coming else math.inf,
            self._released[0].arrival_s if self._released else math.inf,
        )
        arrival_s = min(arrivals)
        tick_s = (
            (math.floor(max(self._past_s, 0.0) / TICK_S + 1e-9) + 1) * TICK_S
            if self._followers
            else math.inf
        )
        if tick_s < arrival_s:
            due_s = self._router.reports_at(tick_s) if self._router.reported_every_s else -math.inf
            if due_s > self._reported_s:
                self._reported_s = due_s
                return tick_s, Due.REPORT
            return tick_s, Due.NOTHING
        if arrival_s < math.inf:
            due_s = self._router.reports_at(arrival_s)
            if due_s > self._reported_s:
                self._reported_s = due_s
                return max(due_s, self._past_s), Due.REPORT
        return arrival_s, Due.ARRIVAL


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
