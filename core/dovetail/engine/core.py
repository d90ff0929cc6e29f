"""`EngineCore`: the loop of arrivals, planning, submitting and collecting, on any device or none.

One call of `EngineCore.step` plans at most one step and collects at most one. With overlap, step
N + 1 is planned and submitted while the device still runs step N, so that the device never waits
for Python:

      planning     N-1        N        N+1               results of N-1 are in before N+1 is
      device            N-2 |  N-1  |   N   |  N+1       planned, those of N are not
      results            N-3     N-2     N-1

This file and `step.py` hide overlap from policies: tokens in flight count as computed; a stop
detected late wastes one row, which is dropped; blocks freed while a step is in flight may be reused
at once, because batches run in order.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, repeat, takewhile
from typing import Any

import numpy as np

from dovetail.api.clock import Clock
from dovetail.api.executor import Capacity, Executor, Masks
from dovetail.api.kv_cache import KVCacheManager
from dovetail.api.observer import (
    EngineStopped,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestPreempted,
)
from dovetail.api.scheduler import Scheduler
from dovetail.end_reason import EndReason
from dovetail.engine.batch_builder import BatchBuilder
from dovetail.engine.books import Arrivals, Books
from dovetail.engine.feature import EngineFeature
from dovetail.engine.finish import Finish
from dovetail.engine.flight import Delivery, InFlightStep, Run, Tokens
from dovetail.engine.live_request import LiveRequest, Status
from dovetail.engine.masks import MaskFill, accept_tokens
from dovetail.engine.stand_in import plan_by_arrival
from dovetail.engine.stats import EngineStats, ObserverHub, StormWatch
from dovetail.engine.step import PlannedStep
from dovetail.engine.step_times import PlanTiming, StepTimeFit, WaitUntil
from dovetail.engine.windows import Windows
from dovetail.errors import (
    DovetailError,
    EngineDeadError,
    PolicyError,
    RequestError,
    SchedulerStalled,
)

logger = logging.getLogger("dovetail")

NO_MASKS = Masks(np.zeros(0, np.int32), np.zeros((0, 0), np.uint32))
PREPARING_S = 0.001  # how often an idle engine looks whether a request is ready


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """The settings of `engine.yaml` that the core reads."""

    max_num_seqs: int
    max_num_batched_tokens: int
    overlap: bool
    scheduler_name: str
    # times as long as its decodes alone; None: prompts may fill the budget of a step
    prefill_limit: float | None = None
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
        timing: Callable[[Clock, StepTimeFit, Capacity, int], PlanTiming] = PlanTiming,
    ) -> None:
        """`timing`: makes the strategy of planning, as `PlanTiming` is made."""
        self.scheduler = scheduler
        self.kv = kv
        self.executor = executor
        self.clock = clock
        self.settings = settings
        self.observers = observers or ObserverHub([])
        self.windows = Windows(capacity.deterministic_window, changes_rows=capacity.changes_rows)
        self.features: Sequence[EngineFeature] = [*features, self.windows]
        name = settings.scheduler_name
        self.books = Books(
            kv, capacity.layout, capacity.num_pages, settings.max_num_seqs, name, self.features
        )
        self.max_in_flight = capacity.max_in_flight if settings.overlap else 1
        self.plan_timing = timing(clock, self.books.fit, capacity, self.max_in_flight)
        self.stats = EngineStats()
        self.dead: BaseException | None = None
        self._requests: dict[str, LiveRequest] = {}  # unfinished, by id
        self._arrivals = Arrivals()
        self._constrained = 0  # unfinished requests that have a constraint
        self._preparing: dict[LiveRequest, None] = {}  # arrived, but not prepared yet; in order
        self._arrived_until = -math.inf  # the latest arrival time that policies have seen
        self._orders = count()
        self._flights: list[InFlightStep] = []
        self._masks: MaskFill | None = None  # of the oldest step, if they are being filled
        self._index = 0
        # not by a step's results: rejected, failed
        self._finished: dict[LiveRequest, Finish] = {}
        # those whose new blocks are committed while the device computes the next step
        self._to_commit: list[LiveRequest] = []
        self._batches = BatchBuilder(self.books, may_share=capacity.shared_prefix)
        self._vocab_size = capacity.vocab_size
        self._storm = StormWatch(name)

    # For the front end

    def earliest_arrival(self, arrival_time: float) -> float:
        """Return `arrival_time`, or that of the last request that policies have seen, if later."""
        return max(arrival_time, self._arrived_until)

    def add(self, request: LiveRequest) -> None:
        """Add a validated request. Policies see it from its `arrival_time` on.

        Raises `RequestError` if its id is in use.
        """
        self.check_alive()
        if request.id in self._requests or request.status is not Status.NEW:
            raise RequestError(
                f"request {request.id!r} is in the engine already: ids of unfinished requests are "
                "unique"
            )
        request.order = next(self._orders)
        self._requests[request.id] = request
        self._constrained += request.constraint is not None
        self._arrivals.add(request)

    def abort(self, request: LiveRequest) -> None:
        """Abort `request`: no more of it is delivered. No-op for an unknown request.

        Raises nothing: if the policy fails in `on_finished`, the engine ends as in `step`, which
        then delivers the others.
        """
        if self._requests.get(request.id) is request:
            try:
                self._finish(request, Finish(EndReason.ABORT))
            except Exception as error:
                self._die(error)

    @property
    def is_computing(self) -> bool:
        """True while a step is in flight."""
        return bool(self._flights)

    def has_unfinished(self) -> bool:
        return bool(self._requests or self._finished)

    def swap(self, *, scheduler: Scheduler | None = None, executor: Executor | None = None) -> None:
        """Replace the scheduler, the executor or both, while no request is unfinished.

        A new executor must be started, with the capacity of the old one. Raises `DovetailError`,
        with nothing changed, if a request is unfinished, if a step is in flight, whose results only
        the old executor can give, or if a feature depends on the old executor.
        """
        if self.has_unfinished() or (executor is not None and self._flights):
            raise DovetailError(
                "parts can be swapped only while no request is unfinished and, for the executor, "
                "no step is in flight"
            )
        if executor is not None:
            for feature in self.features:
                feature.check_forget()
            self.executor = executor
            for feature in self.features:
                feature.forget()
        if scheduler is not None:
            self.scheduler = scheduler

    def reset_cache(self) -> None:
        """Drop all K and V: later requests reuse nothing computed before."""
        self.kv.reset()
        for feature in self.features:
            feature.reset()

    @property
    def prefill_limit(self) -> float | None:
        """The prefill limit of the scheduler's steps; None: none."""
        return (
            self.settings.prefill_limit if self.scheduler.capabilities.is_prefill_limited else None
        )

    def step(self, wait_until: WaitUntil | None = None) -> Delivery:
        """Plan and submit a step, if possible; collect the oldest, if the device has enough work.

        `wait_until`: how to sleep until an instant of the clock; it may return earlier, when there
        is something to do. None: as the clock does. An error of a component ends the engine: each
        unfinished request is delivered as finished with "error", and later calls raise
        `EngineDeadError`.
        """
        delivery = Delivery()
        # Requests that ended outside of a step, perhaps by an error, are delivered first.
        if not self._finished:
            self.check_alive()
        if self.dead is None:
            try:
                self._advance(delivery, wait_until or self.clock.wait_until)
            except Exception as error:
                self._die(error)
            except BaseException as error:
                # Tokens that are booked may not have been computed. The user knows why.
                wrong = f"a step was interrupted by {type(error).__name__}"
                self._die(DovetailError(wrong), log=False)
                raise
        if self._finished:
            delivery.finished |= self._finished
            self._finished = {}
        return delivery

    def update_stats(self) -> EngineStats:
        self.stats.waiting, self.stats.running = len(self.books.waiting), len(self.books.running)
        self.stats.pages = self.kv.counts
        return self.stats

    def stop(self) -> None:
        """Collect the steps in flight, stop the executor, notify the observers."""
        flights = self._flights
        self._flights = []
        masks = self._masks
        self._masks = None
        if masks is not None:  # until then, the executor's memory is written to
            masks.finish()
        try:
            for flight in flights:
                if self.dead is None:
                    if flight.unsampled:
                        self.executor.sample(flight.handle, NO_MASKS)
                    self.executor.collect(flight.handle)
        finally:
            for feature in self.features:
                feature.stop()
            self.executor.stop()
            self.plan_timing.stop()
            self._tell("on_stopped", EngineStopped, self.clock.now(), self.dead)

    # A step: planned, submitted, collected, delivered

    def _advance(self, delivery: Delivery, wait_until: WaitUntil) -> None:
        """Do as `step`, filling `delivery`, which keeps its content if a component fails."""
        # A policy may take several plans to make room, but not forever.
        for _ in range(2 * len(self._requests) + 8):
            planned = None
            if self._may_submit():
                if self._flights:
                    last = self._flights[-1]
                    arrival = self._arrivals.next_time
                    wait = partial(self._wait_sampled, wait_until)
                    self.plan_timing.wait_until_due(last, arrival, wait)
                planned = self._plan_and_submit(partial(self._ask, "schedule"))
                if planned.granted and self._may_submit():
                    return
            if self._flights:
                self._collect(delivery)
                return
            if self._finished or not self._requests:
                return
            if planned is not None and not planned.acted:
                self._idle(planned, wait_until)
                return
        self._stand_in("preempts and rejects, but never grants")

    def _may_submit(self) -> bool:
        return not self._flights or (
            len(self._flights) < self.max_in_flight
            and (not self._flights[-1].unsampled or self._masks is not None)
            and not self.windows.awaits_results
            and self.plan_timing.may_overlap(self._flights)
        )

    def _plan_and_submit(self, plan: Callable[[PlannedStep], None]) -> PlannedStep:
        begun = time.perf_counter()
        flights = self._flights
        now = self.clock.now()
        self._admit_arrivals(now)
        budget = self.settings.max_num_batched_tokens
        step = PlannedStep(
            self.books,
            self._index,
            now,
            budget,
            self.settings.max_num_seqs,
            prompt_tokens=partial(self.plan_timing.prompt_tokens, self.prefill_limit),
            flights_end=partial(self.plan_timing.flights_end, flights) if flights else None,
            log=self.observers.wants_decisions,
            reserved=self.windows.settle(self.books, budget, in_flight=bool(flights)),
        )
        self._index += 1
        for request in [*self.windows.failed]:
            step.preempt(request)
        if step.has_requests:
            plan(step)
        step.close()
        self._apply(step)
        if step.granted:
            checked = {} if flights else self.windows.drafts(step, self.books.rows)
            drafts = checked if flights or checked else self.plan_timing.drafts(step)
            flight = self._batches.build(step, drafts, constrained=self._constrained > 0)
            self.books.submitted(flight.requests)
            self.windows.submitted_step(flight, step)
            flight.core_s = time.perf_counter() - begun
            self._finish_masks()
            flight.handle = self.executor.submit(flight.batch)
            flights.append(flight)
            self._commit()
            for feature in flight.features:
                feature.submitted(flight.index)
            if flights[0].unsampled:
                self._sample_late(flights[0])
            self.plan_timing.submitted(self.books.running, time.perf_counter() - begun)
        return step

    def _collect(self, delivery: Delivery) -> None:
        self._commit()
        self._finish_masks()
        flight = self._flights.pop(0)
        result = self.executor.collect(flight.handle)
        begun = time.perf_counter()
        flight.take(result, self.clock.now())
        self.plan_timing.collected(flight)
        if self._constrained:
            accept_tokens(flight)
        self._deliver(flight, delivery)
        self.plan_timing.settled(flight, self.stats)
        self.stats.count(flight, len(delivery.requests))
        self._storm.saw(flight)
        if type(self.scheduler).on_step is not Scheduler.on_step:
            self._ask("on_step", flight.done(delivery.requests))
        for index in result.failed:
            self.kv.distrust(flight.requests[index])
        for request, finish in delivery.finished.items():
            if finish.reason.is_error and request.capacity:
                self.kv.uncommit(request, 0)
            self._finish(request, finish, settling=True)
        flight.core_s += time.perf_counter() - begun
        self.stats.core_s += flight.core_s
        if self.observers.listens:
            self._tell_of(flight, len(delivery.requests))
        if self._flights and self._flights[0].unsampled:
            masks = MaskFill(self._flights[0], self._vocab_size, self.executor.mask_words)
            self._masks = masks
            if not masks.start():
                self._finish_masks()

    def _deliver(self, flight: InFlightStep, delivery: Delivery) -> None:
        """Give the unfinished requests their tokens, and find those that end with this step."""
        if flight.drafts:
            for run in flight.runs(delivery.finished):
                self._give_run(flight, delivery, run)
        else:
            self._give(flight, delivery, flight.tokens(delivery.finished))
        for feature in flight.features:
            feature.collected(flight, delivery)

    def _give(self, flight: InFlightStep, delivery: Delivery, tokens: Tokens) -> None:
        """Give requests these tokens, each up to one that ends it."""
        now = flight.results_at
        logprobs = flight.result.logprobs
        requests = delivery.requests
        token_ids = delivery.token_ids
        finished = delivery.finished
        for number, (request, token) in tokens:
            # As `LiveRequest.receive`: a call for each token would be 3 % of a step's time here.
            if request.in_flight:
                request.in_flight -= 1
            else:  # the token before was accepted ahead of its step, and is computed
                request.num_computed += 1
            output = request.output
            output.append(token)
            requests.append(request)
            token_ids.append(token)
            request.last_token_time = now
            if logprobs is not None and request.params.logprobs is not None:
                delivery.logprobs.append((request, logprobs, number))
            if request.first_token_time is None:
                request.first_token_time = now
            if token in request.stop_ids and len(output) > request.params.min_tokens:
                told = token if token in (request.params.stop_token_ids or ()) else None
                finished[request] = Finish(EndReason.STOP, told)
            elif request.watchers and (finish := request.watch(token)) is not None:
                finished[request] = finish
            elif len(output) >= request.max_tokens:
                finished[request] = Finish(EndReason.LENGTH)
            elif request.num_computed >= request.next_commit:
                self.books.commit(request)

    def _give_run(self, flight: InFlightStep, delivery: Delivery, run: Run) -> None:
        """Do as `_give` with the tokens of one request: with all at once if none can end it."""
        number, request, token_ids = run
        if not request.goes_on_after(token_ids):
            each = enumerate(zip(repeat(request), token_ids), number)
            going_on = takewhile(lambda _: request not in delivery.finished, each)
            self._give(flight, delivery, going_on)
            return
        size = len(token_ids)
        awaited = min(request.in_flight, size)
        request.in_flight -= awaited
        request.num_computed += size - awaited
        request.output.extend(token_ids)
        delivery.requests += [request] * size
        delivery.token_ids += token_ids
        logprobs = flight.result.logprobs
        if logprobs is not None and request.params.logprobs is not None:
            delivery.logprobs += [(request, logprobs, number + place) for place in range(size)]
        request.last_token_time = flight.results_at
        if request.first_token_time is None:
            request.first_token_time = flight.results_at
        if request.num_computed >= request.next_commit:
            self._to_commit.append(request)

    def _commit(self) -> None:
        """Commit what steps with drafts have computed, which are many tokens at once."""
        if self._to_commit:
            for request in self._to_commit:
                self.books.commit(request)
            self._to_commit.clear()

    # Late sampling

    def _sample_late(self, flight: InFlightStep) -> None:
        """Sample the oldest step, which is late: its matchers have seen all tokens before it."""
        self._masks = MaskFill(flight, self._vocab_size, self.executor.mask_words)
        self._finish_masks()

    def _finish_masks(self) -> None:
        """Sample the oldest step once its masks are filled, if they are being filled."""
        filling = self._masks
        if filling is None:
            return
        flight = self._flights[0]
        masks, failed = filling.finish()
        self._masks = None
        flight.unsampled = False
        self.executor.sample(flight.handle, masks)
        for request, finish in failed.items():
            if request.status is not Status.FINISHED:
                self._finish(request, finish, deliver=True)

    def _wait_sampled(self, wait_until: WaitUntil, instant: float) -> None:
        """Wait for `instant`; the device needn't wait for masks meanwhile."""
        self._finish_masks()
        wait_until(instant)

    # Nothing to do

    def _idle(self, planned: PlannedStep, wait_until: WaitUntil) -> None:
        """Sleep until something changes, as nothing is in flight and nothing was granted."""
        if self.windows.give_way():
            return
        wake = min(planned.wake_time, self._arrivals.next_time, self.books.next_look(planned.now))
        if self._preparing:
            wake = min(wake, self.clock.now() + PREPARING_S)
        self.plan_timing.idle_until(wake, wait_until)
        if wake < math.inf or self.books.release_prompts():
            return
        if (request := self.books.too_large()) is not None:
            self._finish(request, Finish(EndReason.KV_CAPACITY, "kv_capacity"), deliver=True)
        else:
            self._stand_in("grants nothing, sets no wake_at")

    def _stand_in(self, what: str) -> None:
        """Plan a step in place of a policy that would let the engine wait forever.

        Raises `SchedulerStalled` if the settings are strict, or if no request could be granted or
        ended.
        """
        stalled = SchedulerStalled(
            f"scheduler {self.settings.scheduler_name} {what}, and nothing is in flight: "
            f"{len(self._requests)} unfinished requests would wait forever "
            f"({len(self.books.waiting)} waiting, {len(self.books.running)} running, "
            f"{self.kv.available_pages} pages available)"
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

    # Planning

    def _admit_arrivals(self, now: float) -> None:
        while self._arrivals.next_time <= now:
            request = self._arrivals.pop()
            self._arrived_until = request.arrival_time
            request.status = Status.PREPARING
            self.stats.arrived += 1
            self._tell("on_arrived", RequestArrived, now, request)
            if request.preparations and not request.is_prepared:
                self._preparing[request] = None
            else:
                self._show(request)
        if self._preparing:
            for request in [r for r in self._preparing if r.is_prepared]:
                del self._preparing[request]
                self._show(request)

    def _show(self, request: LiveRequest) -> None:
        """Show the policy a prepared request; finish it if a preparation has failed."""
        for preparation in request.preparations:
            if (finish := preparation.failed()) is not None:
                self._finish(request, finish, deliver=True)
                return
        self.books.arrive(request)
        self._ask("on_arrived", request)

    def _apply(self, step: PlannedStep) -> None:
        """Apply the policy's decisions besides grants: preemptions, rejections, admissions."""
        lingering = [*self.books.lingering]
        self.stats.preemptions += len(step.preempted)
        for request in step.preempted:
            request.pause(step.now)
            self._tell("on_preempted", RequestPreempted, step.now, request)
            self._ask("on_preempted", request)
        for request, reason in step.rejected.items():
            self._finish(request, Finish(EndReason.REJECTED, reason), deliver=True)
        for request, cached in step.admitted.items():
            self.stats.cached_tokens += cached
            if request.pauses:
                request.resume(step.now)
            self._tell("on_admitted", RequestAdmitted, step.now, request, cached)
        if lingering:
            self.books.drop_lingering(lingering)
            step.freed = True

    # Ends

    def _finish(
        self, request: LiveRequest, finish: Finish, *, deliver: bool = False, settling: bool = False
    ) -> None:
        """Remove a finished request from the books; notify whoever knows of its arrival.

        `settling`: it ends by the results of a step that observers haven't been told of.
        """
        arrived = request.status is not Status.NEW
        known = request in self.books.known
        self._preparing.pop(request, None)
        self.books.remove(request, sound=not finish.reason.is_error)
        del self._requests[request.id]
        self._constrained -= request.constraint is not None
        if deliver:
            self._finished[request] = finish
        if self.books.gated:
            self.books.open_gates()
        if not arrived:
            self._arrivals.aborted()
            return
        self.stats.finished += 1
        self.plan_timing.ended(request)
        self._tell_end(request, finish, settling or bool(self._flights))
        if known:
            self._ask("on_finished", request)

    def _die(self, error: Exception, *, log: bool = True) -> None:
        """End the engine, whose state is undefined now: fail all requests, and call no policy."""
        self.dead = error
        if log:
            logger.error("the engine is dead: %s", error)
        finish = Finish(EndReason.ENGINE_DEAD, str(error) or repr(error))
        for request in [*self._requests.values()]:
            request.status = Status.FINISHED
            self._finished[request] = finish
            self._tell_end(request, finish)
        self._requests.clear()
        self._arrivals.clear()
        self._preparing.clear()
        self._constrained = 0

    def check_executor(self) -> None:
        """End the engine if the executor has failed, for example if one of its processes died.

        Raises nothing.
        """
        if self.dead is None:
            try:
                self.executor.check()
            except Exception as error:
                self._die(error)

    def idle(self, *, finish_start: bool = False) -> bool:
        """Let the features do a piece of what they have left for later, unless there are requests.
        A step in flight, whose requests have all ended, is collected first.

        `finish_start`: the executor, too, does a piece of its start, such as recording a CUDA
        graph. Only for a process in which no other code uses the device: CUDA refuses to
        synchronize a device while a graph is recorded, in any thread. Returns True if more is left;
        raises nothing.
        """
        if self.dead is not None or self._requests:
            return False
        try:
            if self._flights:
                self._collect(Delivery())
                return True
            left = [feature.idle() for feature in self.features]
            return (finish_start and self.executor.finish_start()) or any(left)
        except Exception as error:
            self._die(error)
            return False

    def check_alive(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(
                f"the engine is dead and takes no more work: {self.dead}"
            ) from self.dead

    # Policy and observers

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

    def _tell(self, method: str, event: Callable[..., object], *values: Any) -> None:
        """Tell the observers of an event with these values, if there are any."""
        if self.observers.listens:
            self.observers.tell(method, event(*values))

    def _tell_end(self, request: LiveRequest, finish: Finish, more_steps: bool = False) -> None:
        why = finish.reason.finish_reason, finish.stop_reason
        self._tell("on_finished", RequestFinished, self.clock.now(), request, *why, more_steps)

    def _tell_of(self, flight: InFlightStep, generated: int) -> None:
        event = flight.event(
            generated_tokens=generated,
            waiting=len(self.books.waiting),
            running=len(self.books.running),
            pages=self.kv.counts,
        )
        for feature in flight.features:
            event = feature.observed(flight, event)
        self.observers.tell("on_step", event)
