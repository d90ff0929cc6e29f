"""Policies with one thing wrong, most of them first come, first served otherwise."""

from __future__ import annotations

import datetime
import math
import random
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from pydantic import BaseModel

from dovetail.api.scheduler import (
    Refusal,
    Scheduler,
    SchedulerCapabilities,
    SchedulerContext,
    Step,
    StepDone,
)
from dovetail.request import Request
from dovetail.testing import make_request
from dovetail_schedulers.fcfs import FCFS
from dovetail_schedulers.in_order import grant_in_order
from dovetail_schedulers.priority import Priority
from tests.conformance.mutants import mutant


def serve(step: Step, order: Sequence[Request]) -> None:
    """Those that run, the youngest of them making room, and then those that wait in this
    `order`."""
    for request in step.grant_each(step.running):
        step.grant(request, evict=reversed(step.running))
    for request in order:
        if not step.grant(request):
            break


class Plain(Scheduler):
    """Declares nothing, and keeps all promises."""

    def schedule(self, step: Step) -> None:
        serve(step, step.waiting)


# The books


@mutant(caught_by="scheduler.sound")
class UsesTheStepLater(Plain):
    def schedule(self, step: Step) -> None:
        super().schedule(step)
        self.step = step

    def on_step(self, done: StepDone) -> None:
        if self.step.tokens_left:
            self.busy = False


@mutant(caught_by="scheduler.sound")
class RaisesWhenSomebodyWaits(Plain):
    def schedule(self, step: Step) -> None:
        super().schedule(step)
        if len(step.waiting) > 3:
            raise KeyError("too many")


@mutant(caught_by="scheduler.sound")
class GrantsNothingToTheFinishedPrompt(Plain):
    """Asks for as many tokens as the prefill has left, which is 0 while decoding."""

    def schedule(self, step: Step) -> None:
        for request in (*step.running, *step.waiting):
            step.grant(
                request, min_tokens=min(1, request.prefill_left), evict=reversed(step.running)
            )


@mutant(caught_by="scheduler.aborts")
class KeepsAQueueOfItsOwn(Plain):
    """It never takes those out that go away while they wait."""

    def __init__(self, options: BaseModel, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.queue: list[Request] = []

    def on_arrived(self, request: Request) -> None:
        self.queue.append(request)

    def on_preempted(self, request: Request) -> None:
        self.queue.append(request)

    def schedule(self, step: Step) -> None:
        serve(step, ())
        shown = set(step.waiting)
        for request in [r for r in self.queue if r in shown or r.generated == 0]:
            if step.grant(request) or request in step.running:
                self.queue.remove(request)


@mutant(caught_by="scheduler.aborts")
class ExpectsATokenOfEverybody(Plain):
    """Counts tokens from the first one on, and an early end has none."""

    def __init__(self, options: BaseModel, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.tokens: dict[str, int] = {}

    def on_step(self, done: StepDone) -> None:
        for ran in done.ran:
            id = ran.request.id
            self.tokens[id] = self.tokens.get(id, 0) + ran.generated

    def on_finished(self, request: Request) -> None:
        del self.tokens[request.id]


@mutant(caught_by="scheduler.budget")
class Overspends(Plain):
    def schedule(self, step: Any) -> None:
        step._tokens_left += 4
        super().schedule(step)


@mutant(caught_by="scheduler.seqs")
class TakesMoreSequences(Plain):
    def schedule(self, step: Any) -> None:
        step._seqs_left += 2
        super().schedule(step)


@mutant(caught_by="scheduler.memory")
class FreesBlocksItself(Plain):
    def schedule(self, step: Any) -> None:
        for request in step.decoding[:1]:
            step._kv.free(request)
        super().schedule(step)


@mutant(caught_by="scheduler.memory")
class TakesBlocksBehindTheBack(Plain):
    def schedule(self, step: Any) -> None:
        super().schedule(step)
        if step.index == 0 and step.free_pages:
            step._kv.allocate(make_request("nobody's"), 1)


@mutant(caught_by="scheduler.read_only")
class AgesByWriting(Plain):
    def schedule(self, step: Step) -> None:
        super().schedule(step)
        for request in step.waiting:
            request.priority -= 1


@mutant(caught_by="scheduler.forgets")
class Remembers(Plain):
    def __init__(self, options: BaseModel, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.seen: list[Request] = []

    def on_arrived(self, request: Request) -> None:
        self.seen.append(request)


@mutant(caught_by="scheduler.forgets")
class ForgetsOnlyWhoWasServed(Remembers):
    def on_finished(self, request: Request) -> None:
        if request.generated:
            self.seen.remove(request)


@mutant(caught_by="scheduler.forgets")
class RemembersInAClosure(Plain):
    def __init__(self, options: BaseModel, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.later: list[Callable[[], Request]] = []

    def on_arrived(self, request: Request) -> None:
        self.later.append(lambda: request)


@mutant(caught_by="scheduler.forgets")
class RemembersInItsClass(Plain):
    seen: ClassVar[list[Request]] = []

    def on_arrived(self, request: Request) -> None:
        self.seen.append(request)


# Promises


@mutant(caught_by="scheduler.finishes")
class NeverChunks(Plain):
    """A prompt longer than the budget waits for ever."""

    capabilities = SchedulerCapabilities(idles=True, starves=True)

    def schedule(self, step: Step) -> None:
        step.grant_each(step.decoding)
        for request in (*step.running, *step.waiting):
            step.grant(
                request, min_tokens=max(1, request.prefill_left), evict=reversed(step.running)
            )


@mutant(caught_by="scheduler.finishes")
class NeverEvicts(Plain):
    """Two that need another block each wait for the other's."""

    def schedule(self, step: Step) -> None:
        step.grant_each(step.running)
        for request in step.waiting:
            if not step.grant(request):
                break


@mutant(caught_by="scheduler.finishes")
class ForgetsThePreempted(Plain):
    def schedule(self, step: Step) -> None:
        serve(step, [request for request in step.waiting if not request.preemptions])


@mutant(caught_by="scheduler.indivisible")
class TakesBackWhatIsMoreThanItAllowed(Plain):
    """So a prompt that is granted whole, though it asked for half the budget, never runs."""

    def schedule(self, step: Step) -> None:
        step.grant_each(step.running)
        for request in step.waiting:
            allowed = max(1, self.context.token_budget // 2)
            if step.grant(request, allowed).tokens > allowed:
                step.preempt(request)


@mutant(caught_by="scheduler.no_starvation")
class LastComeFirstServed(Plain):
    def schedule(self, step: Step) -> None:
        serve(step, step.waiting[::-1])


@mutant(caught_by="scheduler.no_starvation")
class SmallPassLarge(Plain):
    """Whoever doesn't fit is passed over."""

    def schedule(self, step: Step) -> None:
        serve(step, ())
        for request in step.waiting:
            step.grant(request, min_tokens=max(1, request.prefill_left))


@mutant(caught_by="scheduler.no_starvation")
class PriorityForEver(Priority):
    def __init__(self, options: Any, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.capabilities = SchedulerCapabilities(order="priority")


@mutant(caught_by="scheduler.no_starvation")
class ShortestFirst(Plain):
    def schedule(self, step: Step) -> None:
        serve(step, sorted(step.waiting, key=lambda request: request.prompt_tokens))


@mutant(caught_by="scheduler.no_starvation")
class SamplesComeLast(Plain):
    def schedule(self, step: Step) -> None:
        serve(step, sorted(step.waiting, key=lambda request: request.parent is not None))


@mutant(caught_by="scheduler.no_starvation")
class ThePreemptedComeLast(Plain):
    """As if they had arrived when they were evicted, and behind all who come after that too."""

    def schedule(self, step: Step) -> None:
        serve(step, sorted(step.waiting, key=lambda request: request.preemptions > 0))


@mutant(caught_by="scheduler.no_idling")
class AdmitsOneAStep(Plain):
    def schedule(self, step: Step) -> None:
        serve(step, step.waiting[:1])


@mutant(caught_by="scheduler.no_idling")
class WaitsForTheWholeBatch(Plain):
    """Static batching: nobody is admitted while anybody runs."""

    def schedule(self, step: Step) -> None:
        serve(step, () if step.running else step.waiting)


@mutant(caught_by="scheduler.no_idling")
class KeepsASeatFree(Plain):
    def schedule(self, step: Step) -> None:
        serve(step, ())
        for request in step.waiting:
            if (step.seqs_left <= 1 and step.running) or not step.grant(request):
                break


@mutant(caught_by="scheduler.no_rejection")
class TurnsTheLongAway(Plain):
    def schedule(self, step: Step) -> None:
        for request in step.waiting:
            if request.prompt_tokens > 16:
                step.reject(request, "too long")
        super().schedule(step)


@mutant(caught_by="scheduler.adapters")
class NeverAsksAgain(Plain):
    """Gives up on a request once its adapter got no slot."""

    def __init__(self, options: BaseModel, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.given_up: set[Request] = set()

    def schedule(self, step: Step) -> None:
        step.grant_each(step.running)
        for request in step.waiting:
            if request not in self.given_up and step.grant(request).refused is Refusal.ADAPTERS:
                self.given_up.add(request)

    def on_finished(self, request: Request) -> None:
        self.given_up.discard(request)


@mutant(caught_by="scheduler.adapters")
class DoesNotKnowTheRefusal(Plain):
    """Takes the reasons of its time for all that there are."""

    def schedule(self, step: Step) -> None:
        known = (
            Refusal.BUDGET,
            Refusal.PREFILL_LIMIT,
            Refusal.SEQS,
            Refusal.MEMORY,
            Refusal.NOT_NOW,
        )
        for request in step.grant_each(step.running):
            step.grant(request, evict=reversed(step.running))
        for request in step.waiting:
            if (refused := step.grant(request).refused) is not None:
                known.index(refused)
                break


@mutant(caught_by="scheduler.no_stalls")
class PromptsFirst(Plain):
    """Decodes wait while a prompt is computed."""

    def schedule(self, step: Step) -> None:
        if not any(
            map(
                step.grant,
                [request for request in (*step.running, *step.waiting) if request.prefill_left],
            )
        ):
            serve(step, ())


@mutant(caught_by="scheduler.prefill_limit")
class GrantsAPromptOnce(Plain):
    """Counts on a prompt to be computed in the step that admits it, whatever it declares of the
    answers beside it."""

    capabilities = SchedulerCapabilities(stalls_decodes=True, prefill_limited=True)

    def schedule(self, step: Step) -> None:
        step.grant_each((*step.decoding, *step.waiting))


@mutant(caught_by="scheduler.order")
class ClaimsPriorityAndHasNone(FCFS):
    capabilities = SchedulerCapabilities(order="priority", starves=True)


@mutant(caught_by="scheduler.order")
class ClaimsDeadlineAndHasNone(FCFS):
    capabilities = SchedulerCapabilities(order="deadline", starves=True)


@mutant(caught_by="scheduler.order")
class EvictsTheOldest(FCFS):
    def schedule(self, step: Step) -> None:
        for request in reversed(step.grant_each(step.running)):
            step.grant(request, evict=(other for other in step.running if other is not request))
        for request in step.waiting:
            if not step.grant(request):
                break


@mutant(caught_by="scheduler.order")
class PutsThePreemptedAtTheBack(FCFS):
    def schedule(self, step: Step) -> None:
        serve(step, sorted(step.waiting, key=lambda request: request.preemptions > 0))


@mutant(caught_by="scheduler.order")
class AdmitsPastAPromptThatLacksMemory(FCFS):
    def schedule(self, step: Step) -> None:
        for request in (
            *step.grant_each(step.decoding),
            *[request for request in step.running if request.prefill_left],
        ):
            step.grant(request, evict=reversed(step.running))
        for request in step.waiting:
            if not step.grant(request):
                return


@mutant(caught_by="scheduler.recompute")
class EvictsForWhoWaits(Plain):
    """The waiting take memory from those that run, in turns."""

    capabilities = SchedulerCapabilities(starves=True)

    def schedule(self, step: Step) -> None:
        for request in step.waiting[::-1]:
            step.grant(request, evict=step.running)
        for request in step.grant_each(step.running):
            step.grant(request, evict=reversed(step.running))


@mutant(caught_by="scheduler.replay")
class DrawsLots(Plain):
    def schedule(self, step: Step) -> None:
        serve(step, random.sample(step.waiting, len(step.waiting)))


@mutant(caught_by="scheduler.replay")
class SharesAClassAttribute(Plain):
    steps: ClassVar[list[int]] = []

    def schedule(self, step: Step) -> None:
        self.steps.append(step.index)
        serve(step, step.waiting if len(self.steps) < 5 else step.waiting[::-1])


@mutant(caught_by="scheduler.replay")
class GoesByHash(Plain):
    """The order of strings in a set is another in each process."""

    def schedule(self, step: Step) -> None:
        by_id = {request.id: request for request in step.waiting}
        serve(step, [by_id[id] for id in set(by_id)])


@mutant(caught_by="scheduler.forgets")
class CountsStepsOfEachIdForEver(Plain):
    def __init__(self, options: BaseModel, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.steps: dict[str, int] = {}

    def on_step(self, done: StepDone) -> None:
        for ran in done.ran:
            self.steps[ran.request.id] = self.steps.get(ran.request.id, 0) + 1


@mutant(caught_by="scheduler.forgets")
class CountsSamplesOfEachPrompt(Plain):
    def __init__(self, options: BaseModel, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.samples: dict[str | None, int] = {}

    def on_arrived(self, request: Request) -> None:
        self.samples[request.parent] = self.samples.get(request.parent, 0) + 1


@mutant(caught_by="scheduler.read_only")
class RaisesThePriorityOfThePreempted(Plain):
    def on_preempted(self, request: Request) -> None:
        request.priority -= 10


@mutant(caught_by="scheduler.read_only")
class GivesATokenTimeToWhoHasNone(Plain):
    def on_arrived(self, request: Request) -> None:
        if request.ttft_deadline is not None and request.tbt_s is None:
            request.tbt_s = 1.0


@mutant(caught_by="scheduler.forgets")
class KeepsWhoEndsHeldBack(Plain):
    def __init__(self, options: BaseModel, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.held: set[Request] = set()

    def schedule(self, step: Step) -> None:
        self.held -= {*step.waiting, *step.running}
        self.held |= set(step.held_back)
        super().schedule(step)


@mutant(caught_by="scheduler.read_only")
class WritesForAWhile(Plain):
    """Marks requests while it plans, and restores them."""

    def schedule(self, step: Step) -> None:
        waiting = step.waiting
        for request in waiting:
            request.priority += 1
        serve(step, waiting)
        for request in waiting:
            request.priority -= 1


@mutant(caught_by="scheduler.read_only")
class SortsPromptsThatItCan(Plain):
    """Writes to a prompt that came as an array, after making it writable."""

    def on_arrived(self, request: Request) -> None:
        with suppress(ValueError):
            request.prompt_array.flags.writeable = True
            request.prompt_array.sort()


@mutant(caught_by="scheduler.forgets")
class KeepsThePreemptedThatStopEarly(Plain):
    def __init__(self, options: BaseModel, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.preempted: set[str] = set()

    def on_preempted(self, request: Request) -> None:
        self.preempted.add(request.id)

    def on_finished(self, request: Request) -> None:
        if request.generated in (0, request.max_tokens):
            self.preempted.discard(request.id)


@mutant(caught_by="scheduler.forgets")
class KeepsWhoIsRejectedFromACrowd(Plain):
    capabilities = SchedulerCapabilities(rejects=True)

    def __init__(self, options: BaseModel, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.rejected: set[str] = set()

    def schedule(self, step: Step) -> None:
        if len(step.waiting) > 6:
            self.rejected.add(step.waiting[-1].id)
            step.reject(step.waiting[-1], "too many wait")
        super().schedule(step)


@mutant(caught_by="scheduler.no_starvation")
class TheSaltedComeLast(Plain):
    def schedule(self, step: Step) -> None:
        serve(step, sorted(step.waiting, key=lambda request: bool(request.cache_keys)))


@mutant(caught_by="scheduler.no_idling")
class AdmitsEightAStep(Plain):
    def schedule(self, step: Step) -> None:
        serve(step, step.waiting[:8])


@mutant(caught_by="scheduler.no_rejection")
class TurnsTheLateAway(Plain):
    def schedule(self, step: Step) -> None:
        for request in step.waiting:
            if (
                request.ttft_deadline is not None
                and request.ttft_deadline < step.now
                and not request.generated
            ):
                step.reject(request, "too late")
        super().schedule(step)


@mutant(caught_by="scheduler.replay")
class ShufflesACrowd(Plain):
    def schedule(self, step: Step) -> None:
        head, rest = step.waiting[:4], step.waiting[4:]
        serve(step, [*head, *random.sample(rest, len(rest))])


@mutant(caught_by="scheduler.replay")
class ReadsAnotherClock(Plain):
    """An hour after it was made, it changes the order."""

    def __init__(self, options: BaseModel, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.begun = time.monotonic()

    def schedule(self, step: Step) -> None:
        serve(step, step.waiting[::-1] if time.monotonic() > self.begun + 3600 else step.waiting)


@mutant(caught_by="scheduler.replay")
class ReadsTheDate(Plain):
    """An hour after it was made, it changes the order."""

    def __init__(self, options: BaseModel, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.late = datetime.datetime.now() + datetime.timedelta(hours=1)

    def schedule(self, step: Step) -> None:
        late = datetime.datetime.now() > self.late
        serve(step, step.waiting[::-1] if late else step.waiting)


@mutant(caught_by="scheduler.blocks")
class SleepsWhileNothingRuns(Plain):
    def schedule(self, step: Step) -> None:
        if not step.running:
            time.sleep(0)
        super().schedule(step)


@mutant(caught_by="scheduler.blocks")
class AsksTheNetworkForEachRequest(Plain):
    def on_arrived(self, request: Request) -> None:
        with suppress(OSError):
            socket.getaddrinfo("127.0.0.1", 1)


@mutant(caught_by="scheduler.order")
class TakesADeadlineOfZeroForNone(Scheduler):
    capabilities = SchedulerCapabilities(order="deadline", starves=True)

    def key(self, request: Request) -> tuple[float, float]:
        return request.deadline or math.inf, request.arrival_time

    def schedule(self, step: Step) -> None:
        order = sorted((*step.running, *step.waiting), key=self.key)
        grant_in_order(step, order, lambda request: reversed(order))


@mutant(caught_by="scheduler.order")
class HasNoNegativePriorities(TakesADeadlineOfZeroForNone):
    capabilities = SchedulerCapabilities(order="priority", starves=True)

    def key(self, request: Request) -> tuple[float, float]:
        return max(0, request.priority), request.arrival_time


class _ShortIds(Plain):
    """Keeps requests by a short form of their ids, until they end."""

    def __init__(self, options: BaseModel, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.known: dict[str, Request] = {}

    def short(self, id: str) -> str:
        raise NotImplementedError

    def on_arrived(self, request: Request) -> None:
        self.known[self.short(request.id)] = request

    def on_finished(self, request: Request) -> None:
        self.known.pop(self.short(request.id), None)

    def schedule(self, step: Step) -> None:
        serve(step, [r for r in step.waiting if self.known.get(self.short(r.id)) is r])


@mutant(caught_by="scheduler.ids")
class TakesTheBeginningOfIds(_ShortIds):
    def short(self, id: str) -> str:
        return id[:8]


@mutant(caught_by="scheduler.ids")
class TakesTheEndOfIds(_ShortIds):
    def short(self, id: str) -> str:
        return id[-8:]


@mutant(caught_by="scheduler.ids")
class TakesIdsInAnyCase(_ShortIds):
    def short(self, id: str) -> str:
        return id.casefold()


@mutant(caught_by="scheduler.ids")
class ReadsNumbersInIds(Plain):
    """The ids of other programs have none."""

    def on_arrived(self, request: Request) -> None:
        self.last = int(request.id.strip("r").partition(".")[0])


@mutant(caught_by="scheduler.long_run")
class StopsAfterAThousandSteps(Plain):
    def schedule(self, step: Step) -> None:
        if step.index < 1000:
            super().schedule(step)


@mutant(caught_by="scheduler.long_run")
class AdmitsAThousandRequests(Plain):
    def __init__(self, options: BaseModel, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.arrived = 0

    def on_arrived(self, request: Request) -> None:
        self.arrived += 1
        if self.arrived > 1000:
            raise OverflowError("too many requests")


@mutant(caught_by="scheduler.long_run")
class KeepsTheTimeOfEachStep(Plain):
    def __init__(self, options: BaseModel, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.times: list[float] = []

    def on_step(self, done: StepDone) -> None:
        self.times.append(done.ended - done.started)


@mutant(caught_by="scheduler.long_run")
class CountsLengthsOfEachRequest(Plain):
    """By number, not by id."""

    def __init__(self, options: BaseModel, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.lengths: dict[int, int] = {}

    def on_finished(self, request: Request) -> None:
        self.lengths[hash(request)] = request.prompt_tokens


@mutant(caught_by="scheduler.order")
class ClampsPriorities(TakesADeadlineOfZeroForNone):
    capabilities = SchedulerCapabilities(order="priority", starves=True)

    def key(self, request: Request) -> tuple[float, float]:
        return min(max(request.priority, -100), 100), request.arrival_time


@mutant(caught_by="scheduler.order")
class TakesDeadlinesInWholeSeconds(TakesADeadlineOfZeroForNone):
    def key(self, request: Request) -> tuple[float, float]:
        deadline = request.deadline
        return math.inf if deadline is None else int(deadline), request.arrival_time


@mutant(caught_by="scheduler.order")
class TakesADayForever(TakesADeadlineOfZeroForNone):
    def key(self, request: Request) -> tuple[float, float]:
        deadline = request.deadline
        return math.inf if deadline is None else min(deadline, 86400.0), request.arrival_time


@mutant(caught_by="scheduler.order")
class ServesWhoWaitsTheShortestFirst(TakesADeadlineOfZeroForNone):
    """Orders by the time between arrival and deadline."""

    def key(self, request: Request) -> tuple[float, float]:
        deadline = request.deadline
        wait = math.inf if deadline is None else deadline - request.arrival_time
        return wait, request.arrival_time


@mutant(caught_by="scheduler.replay")
class GoesByTheHashOfClients(Plain):
    def schedule(self, step: Step) -> None:
        serve(step, sorted(step.waiting, key=lambda request: hash(str(request.client)) % 3))


@mutant(caught_by="scheduler.sound")
class ActsWhileItNamesVictims(Plain):
    def schedule(self, step: Step) -> None:
        def victims() -> Iterator[Request]:
            for request in reversed(step.running):
                step.preempt(request)
                yield request

        for request in step.grant_each(step.running):
            step.grant(request, evict=victims())
        for request in step.waiting:
            if not step.grant(request):
                break


@mutant(caught_by="scheduler.sound")
class CountsATokenForEachStep(Plain):
    """With drafts, a step yields several."""

    def on_step(self, done: StepDone) -> None:
        assert all(ran.generated <= 1 for ran in done.ran)


@mutant(caught_by="scheduler.order_ties")
class BreaksTiesById(Scheduler):
    capabilities = SchedulerCapabilities(order="arrival")

    def schedule(self, step: Step) -> None:
        order = sorted((*step.running, *step.waiting), key=lambda one: (one.arrival_time, one.id))
        for request in order:
            if not step.grant(request, evict=reversed(order)):
                break


@mutant(caught_by="scheduler.reused_ids")
class RemembersLengthsByChecksum(Scheduler):
    capabilities = SchedulerCapabilities(starves=True)

    def on_arrived(self, request: Request) -> None:
        lengths: dict[int, int] = self.__dict__.setdefault("lengths", {})
        lengths.setdefault(zlib.crc32(request.id.encode()), request.prompt_tokens)

    def length(self, request: Request) -> int:
        lengths: dict[int, int] = self.__dict__["lengths"]
        return lengths[zlib.crc32(request.id.encode())]

    def schedule(self, step: Step) -> None:
        for request in (*step.running, *sorted(step.waiting, key=self.length)):
            if not step.grant(request):
                break


@mutant(caught_by="scheduler.no_starvation_beside")
class ServesStreamsFirst(Scheduler):
    def schedule(self, step: Step) -> None:
        waiting = sorted(step.waiting, key=lambda request: request.tbt_s is None)
        for request in (*step.running, *waiting):
            if not step.grant(request):
                break
