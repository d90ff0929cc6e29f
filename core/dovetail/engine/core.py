"""`EngineCore`: the loop of arrivals, planning, submitting and collecting. The same on a GPU, on a CPU and in simulation.

One call of `EngineCore.step` plans at most one step and collects at most one. With overlap, step N + 1 is planned and submitted while the
device still runs step N, so that the device never waits for Python:

      planning     N-1        N        N+1                     results of N-1 are in before N+1 is planned,
      device            N-2 |  N-1  |   N   |  N+1             those of N are not
      results            N-3     N-2     N-1

This file and `step.py` hide overlap from policies: tokens in flight count as computed; a stop detected late wastes one row, which is dropped;
blocks freed while a step is in flight may be reused at once, because batches run in order.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.api.clock import Clock
from dovetail.api.executor import Capacity, Executor, Masks, Result
from dovetail.api.kv_cache import KVCacheManager
from dovetail.api.observer import (
    EngineStopped,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestPreempted,
    StepFinished,
)
from dovetail.api.scheduler import Scheduler, StepDone
from dovetail.engine.arrivals import Arrivals
from dovetail.engine.batch_builder import NONE, BatchBuilder
from dovetail.engine.books import Books
from dovetail.engine.feature import EngineFeature
from dovetail.engine.finish import Finish
from dovetail.engine.flight import Delivery, InFlightStep
from dovetail.engine.live_request import LiveRequest, Status
from dovetail.engine.masks import fill_masks
from dovetail.engine.speculation import Speculation, SpeculationSettings
from dovetail.engine.stand_in import plan_by_arrival
from dovetail.engine.stats import EngineStats, ObserverHub, StormWatch
from dovetail.engine.step import PlannedStep
from dovetail.engine.step_times import PlanTiming, PromptLimit
from dovetail.errors import (
    DovetailError,
    EngineDeadError,
    PolicyError,
    RequestError,
    SchedulerStalled,
)

logger = logging.getLogger("dovetail")

NO_WORDS = np.zeros((0, 0), np.uint32)
PREPARING_S = 0.001  # how often an idle engine looks whether a request is ready


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """The settings of `engine.yaml` that the core reads."""

    max_num_seqs: int
    max_num_batched_tokens: int
    overlap: bool
    scheduler_name: str
    pace: float | None = (
        None  # times as long as its decodes alone; None: prompts may fill the budget of a step
    )
    strict: bool = False  # raise `SchedulerStalled` rather than plan in the policy's place


class EngineCore:
    """Owns the books and drives scheduler, KV-cache manager and executor. Not thread safe."""

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KVCacheManager,
        executor: Executor,
        capacity: Capacity,
        clock: Clock,
        settings: CoreSettings,
        observers: ObserverHub | None = None,
        features: Sequence[EngineFeature] = (),
        speculation: SpeculationSettings | None = None,
    ) -> None:
        self.kv, self.executor, self.clock, self.settings = kv, executor, clock, settings
        self.observers = observers or ObserverHub([])
        self.features = features
        self.books = Books(
            kv,
            capacity.layout,
            capacity.num_pages,
            settings.max_num_seqs,
            settings.scheduler_name,
            features,
        )
        self.max_in_flight = capacity.max_in_flight if settings.overlap else 1
        self.plan_timing = PlanTiming(clock)
        self._prompt_limit = PromptLimit(capacity.prompt_rate)
        self.stats = EngineStats()
        self.dead: BaseException | None = None
        self._requests: dict[str, LiveRequest] = {}  # unfinished, by id
        self._arrivals = Arrivals()
        self._constrained = 0  # unfinished requests that have a constraint
        self._preparing: dict[LiveRequest, None] = {}  # arrived, but not prepared yet; in order
        self._arrived_until = -math.inf  # the latest arrival time of those that policies have seen
        self._added = 0
        self._flights: list[InFlightStep] = []
        self._index = 0
        self._finished: dict[LiveRequest, Finish] = {}  # not by a step's results: rejected, failed
        self._take_scheduler(scheduler)
        self._batches = BatchBuilder(
            kv, self.books.rows, features, capacity.layout, capacity.shared_prefix
        )
        self._vocab_size = capacity.vocab_size
        self._storm = StormWatch(settings.scheduler_name)
        self._speculation: Speculation | None = None
        if speculation is not None:
            self._speculation = Speculation(
                speculation, capacity, self.books.fit, clock, overlaps=self.max_in_flight > 1
            )
        self._free_from: float | None = (
            None  # when the host began the work between a step's results and the next step; later by its sleep
        )

    # For the front end

    def earliest_arrival(self, arrival_time: float) -> float:
        """Return `arrival_time`, or that of the last request that policies have seen, if it is later."""
        return max(arrival_time, self._arrived_until)

    def add(self, request: LiveRequest) -> None:
        """Add a validated request. Policies see it from its `arrival_time` on. Raises `RequestError` if its id is in use."""
        self.check_alive()
        if request.id in self._requests or request.status is not Status.NEW:
            raise RequestError(
                f"request {request.id!r} is in the engine already: ids of unfinished requests are unique"
            )
        request.order = self._added
        self._added += 1
        self._requests[request.id] = request
        self._constrained += request.constraint is not None
        self._arrivals.add(request)

    def abort(self, request: LiveRequest) -> None:
        """Abort `request`: no more of it is delivered, and its tokens in flight are dropped. No-op for an unknown request. Raises nothing: if the
        policy fails in `on_finished`, the engine ends as in `step`, which then delivers the others."""
        if self._requests.get(request.id) is not request:
            return
        try:
            self._finish(request, Finish("abort"))
        except Exception as error:
            self._die(error)

    @property
    def is_computing(self) -> bool:
        """True while a step is in flight."""
        return bool(self._flights)

    def has_unfinished(self) -> bool:
        return bool(self._requests or self._finished)

    def swap(self, *, scheduler: Scheduler | None = None, executor: Executor | None = None) -> None:
        """Replace the scheduler, the executor or both, while no request is unfinished. A new executor must be started, with the capacity of the old
        one. Raises `DovetailError` if a request is unfinished, or if a step is in flight, whose results only the
        old executor can give."""
        if self.has_unfinished() or (executor is not None and self._flights):
            raise DovetailError(
                "parts can be swapped only while no request is unfinished and, for the executor, no step is in flight"
            )
        if scheduler is not None:
            self._take_scheduler(scheduler)
        if executor is not None:
            self.executor = executor
            for feature in self.features:
                feature.forget()

    def _take_scheduler(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.pace = (
            self.settings.pace if scheduler.claims.is_paced else None
        )  # the pace that its steps keep
        self._watches_steps = type(scheduler).on_step is not Scheduler.on_step

    def step(self) -> Delivery:
        """Plan and submit a step, if possible; collect the oldest, if the device has enough work. An error of a component ends the engine: each
        unfinished request is delivered as finished with "error", and later calls raise `EngineDeadError`."""
        delivery = Delivery()
        if (
            not self._finished
        ):  # requests that ended outside of a step, perhaps by an error, are delivered first
            self.check_alive()
        if self.dead is None:
            try:
                self._step(delivery)
            except Exception as error:
                self._die(error)
            except BaseException as error:  # an interrupt within a step: tokens that are booked may not have been computed
                self._die(
                    DovetailError(f"a step was interrupted by {type(error).__name__}"), log=False
                )  # the user who interrupts knows
                raise
        if self._finished:
            delivery.finished |= self._finished
            self._finished = {}
        return delivery

    def update_stats(self) -> EngineStats:
        self.stats.waiting, self.stats.running = len(self.books.waiting), len(self.books.running)
        self.stats.blocks = self.kv.counts
        if self._speculation is not None:
            self.stats.drafting_s = self._speculation.drafting_s
        return self.stats

    def stop(self) -> None:
        """Collect the steps in flight, stop the executor, notify the observers."""
        flights, self._flights = self._flights, []
        try:
            for flight in flights:
                if self.dead is None:
                    if flight.unsampled:
                        self.executor.sample(flight.handle, Masks(NONE, NO_WORDS))
                    self.executor.collect(flight.handle)
        finally:
            self.executor.stop()
            if self._speculation is not None:
                self._speculation.stop()
            if self.observers:
                self.observers.tell("on_stopped", EngineStopped(self.clock.now(), self.dead))

    # The loop

    def _step(self, delivery: Delivery) -> None:
        """Do as `step`, filling `delivery`, which keeps its content if a component fails."""
        for _ in range(
            2 * len(self._requests) + 8
        ):  # a policy may take several plans to make room, but not forever
            planned = None
            if self._has_room():
                if self._flights:
                    self._sleep_until_due()
                planned = self._plan_and_submit(self._schedule)
                if planned.granted and self._has_room():
                    return
            if self._flights:
                self._collect(delivery)
                return
            if self._finished or not self._requests:
                return
            if planned is not None and not planned.acted:
                self._idle(planned)
                return
        self._stand_in("preempts and rejects, but never grants")

    def _has_room(self) -> bool:
        """True if another step may be submitted."""
        if not self._flights:
            return True
        return (
            len(self._flights) < self.max_in_flight
            and not self._flights[-1].unsampled
            and not self._awaits_results()
        )

    def _awaits_results(self) -> bool:
        """True if the step in flight has drafts, or the next one is to have some: they follow its results."""
        if self._speculation is None:
            return False
        return bool(self._flights[-1].drafts) or (
            self._speculation.is_active and any(flight.yields for flight in self._flights)
        )

    def _sleep_until_due(self) -> None:
        before = self.clock.now()
        self.plan_timing.wait_until_due(
            self._flights[-1], self._arrivals.next_time(), self.books.fit
        )
        if self._free_from is not None:
            self._free_from += self.clock.now() - before

    def _idle(self, planned: PlannedStep) -> None:
        """Sleep until something changes, as nothing is in flight and nothing was granted."""
        wake, self._free_from = min(planned.wake_time, self._arrivals.next_time()), None
        if self._preparing:
            wake = min(wake, self.clock.now() + PREPARING_S)
        if wake < math.inf:
            self.plan_timing.wait_until(wake)
        elif not self._release_memory():
            self._stand_in("grants nothing, sets no wake_at")

    def _stand_in(self, what: str) -> None:
        """Plan a step in place of a policy that would let the engine wait forever. Raises `SchedulerStalled` if the settings are strict, or if no
        request could be granted or ended."""
        stalled = SchedulerStalled(
            f"scheduler {self.settings.scheduler_name} {what}, and nothing is in flight: {len(self._requests)} unfinished requests would wait "
            f"forever ({len(self.books.waiting)} waiting, {len(self.books.running)} running, {self.kv.available_pages} pages available)"
        )
        if self.settings.strict:
            raise stalled
        if not self.stats.stalls:
            logger.warning(
                "%s. The engine plans such steps itself, first come, first served", stalled
            )
        self.stats.stalls += 1
        if not self._plan_and_submit(plan_by_arrival).acted:
            raise stalled

    def _release_memory(self) -> bool:
        """Release pages if a running request lacks them: those that requests keep for samples of their prompts, otherwise those of a decode that is
        too large for the whole pool, which ends at its present length. Returns True if planning again may help."""
        running = self.books.running.as_tuple()
        short = [request for request in running if self._lacks_pages(request)]
        if not short:
            return False
        released = [self.books.release_prompt(request) for request in running]
        if any(released):
            return True
        for request in short:
            others = [other for other in running if other is not request]
            if not request.prefill_left and self._lacks_pages(request, without=others):
                self._finish(request, Finish("length", "kv_capacity"), deliver=True)
                return True
        return False

    def _lacks_pages(self, request: LiveRequest, without: Sequence[LiveRequest] = ()) -> bool:
        """Return True if its known tokens need more pages than are available, even if the requests `without` held none."""
        if request.num_tokens <= request.capacity:
            return False
        return self.kv.pages_needed(request, request.num_tokens, without) > self.kv.available_pages

    # Planning

    def _schedule(self, step: PlannedStep) -> None:
        self._ask("schedule", step)

    def _plan_and_submit(self, plan: Callable[[PlannedStep], None]) -> PlannedStep:
        begun = time.perf_counter()
        now = self.clock.now()
        self._admit_arrivals(now)
        step = PlannedStep(
            self.books,
            self._index,
            now,
            self.settings.max_num_batched_tokens,
            self.settings.max_num_seqs,
            pace=self.pace,
            longest=self._prompt_limit.most_tokens(len(self.books.running)),
            flights_end=self._flights_end if self._flights else None,
            log=self.observers.wants_decisions,
        )
        self._index += 1
        if self.books.waiting or self.books.running:
            plan(step)
        step.close()
        lingering = list(self.books.lingering)
        self._apply(step)
        step.freed = bool(lingering)
        self.books.drop_lingering([r for r in lingering if r in self.books.lingering])
        if step.granted:
            drafts = (
                {}
                if self._speculation is None or self._flights
                else self._draft(self._speculation, step)
            )
            flight = self._batches.build(step, drafts, constrained=self._constrained > 0)
            self._drain(flight.requests)
            self.books.submitted(step.granted)
            flight.core_s = time.perf_counter() - begun
            flight.handle = self.executor.submit(flight.batch)
            self._flights.append(flight)
            for feature in self.features:
                feature.submitted(flight.index)
            if self._speculation is not None:
                self._note_host_time(self._speculation)
            self._sample_late()
            self.plan_timing.planned(time.perf_counter() - begun)
        return step

    def _draft(
        self, speculation: Speculation, step: PlannedStep
    ) -> dict[LiveRequest, Sequence[int]]:
        if not speculation.is_active:
            return {}
        num_lines = len(step.granted) - sum([not r.yields_token for r in step.prefilled])
        before = speculation.drafting_s
        drafts = speculation.draft(step, num_lines)
        if self._free_from is not None:
            self._free_from += speculation.drafting_s - before
        return drafts

    def _note_host_time(self, speculation: Speculation) -> None:
        if self._free_from is not None:
            speculation.host_took(self.clock.now() - self._free_from)
        self._free_from = None
        if not speculation.is_active:
            speculation.consider(self.books.running.as_tuple())

    def _flights_end(self) -> float:
        return self.plan_timing.flights_end(self._flights, self.books.fit)

    def _admit_arrivals(self, now: float) -> None:
        while self._arrivals.next_time() <= now:
            request = self._arrivals.pop()
            self._arrived_until = request.arrival_time
            self.stats.arrived += 1
            if self.observers:
                self.observers.tell("on_arrived", RequestArrived(now, request))
            if any(preparation.closed() for preparation in request.preparations):
                request.status = Status.PREPARING
                self._preparing[request] = None
            else:
                self._show(request)
        for request in [
            r
            for r in self._preparing
            if not any(preparation.closed() for preparation in r.preparations)
        ]:
            del self._preparing[request]
            self._show(request)

    def _show(self, request: LiveRequest) -> None:
        """Show the policy an arrived request whose preparations are done; finish it if one has failed."""
        for preparation in request.preparations:
            if (why := preparation.failed()) is not None:
                request.status = Status.PREPARING
                self._finish(request, Finish("rejected", why), deliver=True)
                return
        self.books.arrive(request)
        self._ask("on_arrival", request)

    def _apply(self, step: PlannedStep) -> None:
        """Apply the policy's decisions besides grants: `on_preempted`, rejections, admissions."""
        self.stats.preemptions += len(step.preempted)
        for request in step.preempted:
            request.pause(step.now)
            if self.observers:
                self.observers.tell("on_preempted", RequestPreempted(step.now, request))
            self._ask("on_preempted", request)
        for request, reason in step.rejected.items():
            self._finish(request, Finish("rejected", reason), deliver=True)
        for request, cached in step.admitted.items():
            self.stats.cached_tokens += cached
            request.resume(step.now)
            if self.observers:
                self.observers.tell("on_admitted", RequestAdmitted(step.now, request, cached))

    def _drain(self, requests: list[LiveRequest]) -> None:
        """Mark requests as draining whose last allowed token is in flight."""
        for request in [r for r in requests if r.num_computed >= r.last_computed]:
            request.status = Status.DRAINING
            self.books.running.remove(request)

    # Late sampling

    def _sample_late(self) -> None:
        """Sample the oldest step, if it is late: all earlier results are in, so its matchers have seen every token."""
        if not self._flights or not self._flights[0].unsampled:
            return
        flight = self._flights[0]
        masks, failed = fill_masks(flight, self._vocab_size, self.executor.mask_words)
        flight.unsampled = False
        self.executor.sample(flight.handle, masks)
        for request, why in failed.items():
            self._finish(request, Finish("error", why), deliver=True)

    # Results

    def _collect(self, delivery: Delivery) -> None:
        flight = self._flights.pop(0)
        result = self.executor.collect(flight.handle)
        begun, self._free_from = time.perf_counter(), self.clock.now()
        flight.check(result)
        self.plan_timing.collected(result)
        self.books.fit.update(
            result.ended - result.started,
            flight.prefill_tokens,
            flight.decode_tokens,
            flight.context_tokens,
        )
        if flight.prefill_tokens:
            self._prompt_limit.update(
                result.ended - result.started, flight.prefill_tokens + flight.decode_tokens
            )
        if self._speculation is not None and not flight.prefill_tokens:
            self._speculation.device_took(
                result.ended - result.started,
                flight.decode_tokens,
                flight.context_tokens,
                flight.drafts,
            )
        self._deliver(flight, result, delivery)
        self._settle(flight, result, delivery, begun)
        self._sample_late()

    def _deliver(self, flight: InFlightStep, result: Result, delivery: Delivery) -> None:
        """Give each unfinished request its tokens, and check whether it stops. Rows of finished requests are dropped, as are tokens after an end."""
        now = self.clock.now()
        requests, token_ids, finished = delivery.requests, delivery.token_ids, delivery.finished
        for line, (request, token) in flight.tokens_of(result, finished):
            # As `LiveRequest.receive`: a call for each token would be 3 % of a step's time here.
            if request.in_flight:
                request.in_flight -= 1
            else:  # the token before was an accepted draft, and is computed
                request.num_computed += 1
            output = request.output_token_ids
            output.append(token)
            requests.append(request)
            token_ids.append(token)
            request.last_token_time = now
            if result.logprobs is not None and request.params.logprobs is not None:
                delivery.logprobs.append((request, result.logprobs, line))
            if request.first_token_time is None:
                request.first_token_time = now
            if token in request.stop_ids and len(output) > request.params.min_tokens:
                told = token if token in (request.params.stop_token_ids or ()) else None
                finished[request] = Finish("stop", told)
            elif request.watchers and (finish := _watched(request, token)) is not None:
                finished[request] = finish
            elif len(output) >= request.max_tokens:
                finished[request] = Finish("length")
            elif request.num_computed >= request.next_commit:
                self.books.commit(request)
        for feature in self.features:
            feature.collected(flight, result, delivery, now)

    def _settle(
        self, flight: InFlightStep, result: Result, delivery: Delivery, begun: float
    ) -> None:
        """Update the statistics, call the policy's `on_step`, then finish requests, then tell the observers."""
        stats = self.stats
        if flight.drafts:
            flight.drop_rejected(delivery.requests)
            stats.count_drafts(flight.drafts, flight.accepted)
        if self._speculation is not None:
            self._speculation.collected(flight.drafts, flight.accepted)
        stats.steps += 1
        stats.prefill_tokens += flight.prefill_tokens
        stats.decode_tokens += flight.decode_tokens
        stats.generated_tokens += len(delivery.requests)
        stats.recomputed_tokens += flight.recomputed_tokens
        stats.device_s += result.ended - result.started
        self._storm.saw(flight.recomputed_tokens, flight.prefill_tokens + flight.decode_tokens)
        if self._watches_steps:
            self._ask(
                "on_step",
                StepDone(flight.index, result.started, result.ended, flight.ran(delivery.requests)),
            )
        for request, finish in delivery.finished.items():
            if finish.reason == "error" and request.capacity:
                self.kv.uncommit(request, 0)
            self._finish(request, finish, settling=True)
        core_s = flight.core_s + time.perf_counter() - begun
        stats.core_s += core_s
        if self.observers:
            self._tell_of(flight, result, len(delivery.requests), core_s)

    def _tell_of(self, flight: InFlightStep, result: Result, generated: int, core_s: float) -> None:
        fields: dict[str, int] = {}
        for feature in self.features:
            fields |= feature.observed(flight)
        event = StepFinished(
            index=flight.index,
            planned=flight.planned,
            started=result.started,
            ended=result.ended,
            prefill_tokens=flight.prefill_tokens,
            decode_tokens=flight.decode_tokens,
            generated_tokens=generated,
            cached_tokens=flight.cached_tokens,
            waiting=len(self.books.waiting),
            running=len(self.books.running),
            preempted=flight.preempted,
            recomputed_tokens=flight.recomputed_tokens,
            blocks=self.kv.counts,
            core_s=core_s,
            decisions=flight.decisions,
            draft_rows=len(flight.drafts),
            draft_tokens=sum(map(len, flight.drafts.values())),
            accepted_drafts=tuple(flight.accepted.values()),
            graphs=result.graphs,
            page_copies=len(flight.batch.copies),
            checkpoints=len(flight.batch.checkpoints),
            **fields,
        )
        self.observers.tell("on_step", event)

    # Ends

    def _finish(
        self, request: LiveRequest, finish: Finish, *, deliver: bool = False, settling: bool = False
    ) -> None:
        """Remove a finished request from the books; notify the policy and the observers, if they know of its arrival. `settling`: it ends by the
        results of a step that observers haven't been told of."""
        arrived, known = request.status is not Status.NEW, request in self.books.known
        if request.capacity and finish.reason != "error":
            self.books.commit(request)  # its output may be part of the next turn's prompt
        self._preparing.pop(request, None)
        self.books.remove(request, sound=finish.reason != "error")
        del self._requests[request.id]
        self._constrained -= request.constraint is not None
        if deliver:
            self._finished[request] = finish
        self.books.open_gates()
        if not arrived:
            self._arrivals.aborted()
            return
        self.stats.finished += 1
        if self._speculation is not None:
            self._speculation.ended(request)
        if self.observers:
            more_steps = settling or bool(self._flights)
            self.observers.tell(
                "on_finished",
                RequestFinished(
                    self.clock.now(), request, finish.reason, finish.stop_reason, more_steps
                ),
            )
        if known:
            self._ask("on_finished", request)

    def _die(self, error: Exception, *, log: bool = True) -> None:
        """End the engine, whose state is undefined now: fail every request, without calling the policy."""
        self.dead = error
        if log:
            logger.error("the engine is dead: %s", error)
        for request in list(self._requests.values()):
            request.status = Status.FINISHED
            self._finished[request] = Finish("error", str(error) or repr(error))
            if self.observers:
                self.observers.tell(
                    "on_finished", RequestFinished(self.clock.now(), request, "error", str(error))
                )
        self._requests.clear()
        self._arrivals.clear()
        self._preparing.clear()
        self._constrained = 0

    def check_executor(self) -> None:
        """End the engine if the executor has failed, for example because one of its processes died. Raises nothing."""
        if self.dead is None:
            try:
                self.executor.check()
            except Exception as error:
                self._die(error)

    def check_alive(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(
                f"the engine is dead and takes no more work: {self.dead}"
            ) from self.dead

    def _ask(self, method: str, argument: Any) -> None:
        """Call a method of the policy. If it raises, the error names the policy."""
        try:
            getattr(self.scheduler, method)(argument)
        except PolicyError:
            raise
        except Exception as error:
            name = self.settings.scheduler_name
            raise PolicyError(
                f"scheduler {name} raised in {method}(): {type(error).__name__}: {error}"
            ) from error


def _watched(request: LiveRequest, token: int) -> Finish | None:
    """Pass a token to all watchers of a request. Returns the first `Finish`, if any."""
    finish = None
    for watcher in request.watchers:
        seen = watcher.see(token)
        finish = finish or seen
    return finish
