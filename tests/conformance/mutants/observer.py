"""Observers with one thing wrong."""

from __future__ import annotations

import atexit
import gc
import json
import logging
import random
import signal
import socket
import threading
import warnings
from contextlib import suppress
from functools import partial

import numpy as np
from pydantic import BaseModel

from dovetail.api.observer import (
    EngineStarted,
    EngineStopped,
    Observer,
    ObserverCapabilities,
    ObserverContext,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestPreempted,
    StepFinished,
)
from tests.conformance.mutants import mutant


@mutant(caught_by="observer.no_effect")
class StopsRequestsEarly(Observer):
    def on_admitted(self, event: RequestAdmitted) -> None:
        event.request.stop_ids = frozenset(range(0, 97, 2))


@mutant(caught_by="observer.no_effect")
class DrainsTheTokensItIsShown(Observer):
    def on_preempted(self, event: RequestPreempted) -> None:
        del event.request.output[:]


@mutant(caught_by="observer.request_untouched")
class SignsWhatItHasSeen(Observer):
    def on_finished(self, event: RequestFinished) -> None:
        event.request.client = f"{event.request.client} (seen)"


@mutant(caught_by="observer.raises_nothing")
class ExpectsAFirstToken(Observer):
    """An aborted request may have none."""

    def on_finished(self, event: RequestFinished) -> None:
        assert event.request.first_token_time is not None


@mutant(caught_by="observer.raises_nothing")
class ExpectsDecisionsItHasNotAskedFor(Observer):
    def on_step(self, event: StepFinished) -> None:
        event.decisions[0]


@mutant(caught_by="observer.raises_nothing")
class LeavesTheProgram(Observer):
    capabilities = ObserverCapabilities(decisions=True)

    def on_preempted(self, event: RequestPreempted) -> None:
        raise SystemExit("a preemption")


@mutant(caught_by="observer.empty_run")
class DividesByTheNumberOfSteps(Observer):
    tokens = steps = 0

    def on_step(self, event: StepFinished) -> None:
        self.steps += 1
        self.tokens += event.generated_tokens

    def on_stopped(self, event: EngineStopped) -> None:
        self.mean = self.tokens / self.steps


@mutant(caught_by="observer.failed_run")
class RaisesTheErrorItIsTold(Observer):
    def on_stopped(self, event: EngineStopped) -> None:
        if event.error is not None:
            raise event.error


@mutant(caught_by="observer.process_untouched")
class SeedsForEverybody(Observer):
    """To sample which requests it keeps."""

    def on_arrived(self, event: RequestArrived) -> None:
        random.seed(0)


@mutant(caught_by="observer.process_untouched")
class TurnsGarbageCollectionOff(Observer):
    def on_started(self, event: EngineStarted) -> None:
        gc.disable()


@mutant(caught_by="observer.process_untouched")
class ConfiguresLoggingForAll(Observer):
    def on_started(self, event: EngineStarted) -> None:
        logging.getLogger().setLevel(logging.DEBUG)


@mutant(caught_by="observer.process_untouched")
class SilencesWarnings(Observer):
    def on_started(self, event: EngineStarted) -> None:
        warnings.filterwarnings("ignore", message="from this observer")


@mutant(caught_by="observer.process_untouched")
class HandlesASignal(Observer):
    def on_started(self, event: EngineStarted) -> None:
        signal.signal(signal.SIGUSR1, lambda number, frame: None)


@mutant(caught_by="observer.leaves_nothing")
class NeverEndsItsThread(Observer):
    def __init__(self, options: BaseModel, context: ObserverContext) -> None:
        super().__init__(options, context)
        threading.Thread(target=threading.Event().wait, daemon=True, name="exporter").start()


@mutant(caught_by="observer.request_untouched")
class CapsWhatRequestsAskFor(Observer):
    """Writes into the parameters, which are frozen."""

    def on_arrived(self, event: RequestArrived) -> None:
        object.__setattr__(event.request.params, "max_tokens", 3)


@mutant(caught_by="observer.raises_nothing")
class SortsThePrompt(Observer):
    """A prompt's array is read-only."""

    def on_arrived(self, event: RequestArrived) -> None:
        event.request.prompt_array.sort()


@mutant(caught_by="observer.raises_nothing")
class WantsIdsToBeNew(Observer):
    def __init__(self, options: BaseModel, context: ObserverContext) -> None:
        super().__init__(options, context)
        self.seen: set[str] = set()

    def on_arrived(self, event: RequestArrived) -> None:
        if event.request.id in self.seen:
            raise ValueError(f"{event.request.id} arrived twice")
        self.seen.add(event.request.id)


@mutant(caught_by="observer.raises_nothing")
class ExpectsADecisionInEachStep(Observer):
    """Once a step had some."""

    capabilities = ObserverCapabilities(decisions=True)

    def on_step(self, event: StepFinished) -> None:
        event.decisions[0]


@mutant(caught_by="observer.forgets")
class KeepsARecordOfEachRequest(Observer):
    def __init__(self, options: BaseModel, context: ObserverContext) -> None:
        super().__init__(options, context)
        self.preemptions: dict[str, int] = {}

    def on_preempted(self, event: RequestPreempted) -> None:
        self.preemptions[event.request.id] = self.preemptions.get(event.request.id, 0) + 1


@mutant(caught_by="observer.forgets")
class ForgetsOnlyWhoFinishedWell(Observer):
    def __init__(self, options: BaseModel, context: ObserverContext) -> None:
        super().__init__(options, context)
        self.requests: list[object] = []

    def on_arrived(self, event: RequestArrived) -> None:
        self.requests.append(event.request)

    def on_finished(self, event: RequestFinished) -> None:
        if event.finish_reason in ("stop", "length"):
            self.requests.remove(event.request)


@mutant(caught_by="observer.no_effect")
class RewritesWhatOthersAreTold(Observer):
    """An event is frozen, and the next observer's too."""

    def on_step(self, event: StepFinished) -> None:
        object.__setattr__(event, "generated_tokens", 0)


@mutant(caught_by="observer.no_effect")
class CountsPreemptionsFromZero(Observer):
    def on_preempted(self, event: RequestPreempted) -> None:
        event.request.preemptions = 0  # type: ignore[misc]


@mutant(caught_by="observer.raises_nothing")
class AddsToTheDetails(Observer):
    def on_started(self, event: EngineStarted) -> None:
        event.details["observer"] = "this one"  # type: ignore[index]


@mutant(caught_by="observer.process_untouched")
class GivesAllSocketsATimeout(Observer):
    def on_started(self, event: EngineStarted) -> None:
        socket.setdefaulttimeout(3600.0)


@mutant(caught_by="observer.forgets")
class CountsSamplesOfEachPrompt(Observer):
    def __init__(self, options: BaseModel, context: ObserverContext) -> None:
        super().__init__(options, context)
        self.samples: dict[str | None, int] = {}

    def on_arrived(self, event: RequestArrived) -> None:
        self.samples[event.request.parent] = self.samples.get(event.request.parent, 0) + 1


@mutant(caught_by="observer.process_untouched")
class ChangesTheProcessWhenTheEngineFails(Observer):
    def on_stopped(self, event: EngineStopped) -> None:
        if event.error is not None:
            socket.setdefaulttimeout(1.0)


@mutant(caught_by="observer.process_untouched")
class CollectsNoGarbageDuringARun(Observer):
    """And lets it be collected afterwards."""

    def on_started(self, event: EngineStarted) -> None:
        gc.disable()

    def on_stopped(self, event: EngineStopped) -> None:
        gc.enable()


@mutant(caught_by="observer.forgets")
class KeepsThePreemptedThatAreRejected(Observer):
    def __init__(self, options: BaseModel, context: ObserverContext) -> None:
        super().__init__(options, context)
        self.preempted: set[str] = set()

    def on_preempted(self, event: RequestPreempted) -> None:
        self.preempted.add(event.request.id)

    def on_finished(self, event: RequestFinished) -> None:
        if event.finish_reason != "rejected":
            self.preempted.discard(event.request.id)


@mutant(caught_by="observer.raises_nothing")
class ExpectsTheRejectedNeverToHaveRun(Observer):
    def on_finished(self, event: RequestFinished) -> None:
        assert event.finish_reason != "rejected" or not event.request.preemptions


@mutant(caught_by="observer.request_untouched")
class SortsPromptsThatItCan(Observer):
    """Writes to a prompt that came as an array, after making it writable."""

    def on_arrived(self, event: RequestArrived) -> None:
        prompt = event.request.prompt_array
        with suppress(ValueError):
            prompt.flags.writeable = True
            prompt.sort()


@mutant(caught_by="observer.request_untouched")
class WritesForAWhile(Observer):
    def on_preempted(self, event: RequestPreempted) -> None:
        event.request.priority += 1
        event.request.priority -= 1


@mutant(caught_by="observer.process_untouched")
class SilencesTheEngine(Observer):
    def on_started(self, event: EngineStarted) -> None:
        logging.getLogger("dovetail").setLevel(logging.CRITICAL)


@mutant(caught_by="observer.raises_nothing")
class ExpectsHitsInThePrompt(Observer):
    """After a preemption, generated tokens are found too."""

    def on_admitted(self, event: RequestAdmitted) -> None:
        assert event.cached_tokens < event.request.prompt_tokens


@mutant(caught_by="observer.raises_nothing")
class TakesStopReasonsForText(Observer):
    def on_finished(self, event: RequestFinished) -> None:
        if event.finish_reason == "stop":
            assert isinstance(event.stop_reason, str)


@mutant(caught_by="observer.forgets")
class KeepsThoseThatFailed(Observer):
    def __init__(self, options: BaseModel, context: ObserverContext) -> None:
        super().__init__(options, context)
        self.requests: set[str] = set()

    def on_arrived(self, event: RequestArrived) -> None:
        self.requests.add(event.request.id)

    def on_finished(self, event: RequestFinished) -> None:
        if event.finish_reason != "error":
            self.requests.discard(event.request.id)


@mutant(caught_by="observer.leaves_nothing")
class LeavesItsThreadAfterAFailure(Observer):
    def on_started(self, event: EngineStarted) -> None:
        self.end = threading.Event()
        threading.Thread(target=self.end.wait, daemon=True, name="exporter").start()

    def on_stopped(self, event: EngineStopped) -> None:
        if event.error is None:
            self.end.set()


@mutant(caught_by="observer.no_effect")
class TakesWhatItNeedsOfTheDetails(Observer):
    def on_started(self, event: EngineStarted) -> None:
        if isinstance(event.details, dict):
            self.device = event.details.pop("device")


@mutant(caught_by="observer.no_effect")
class FreesTheFramesOfAnError(Observer):
    def on_stopped(self, event: EngineStopped) -> None:
        if event.error is not None:
            event.error.__traceback__ = None


@mutant(caught_by="observer.process_untouched")
class PrintsShortNumbers(Observer):
    def on_started(self, event: EngineStarted) -> None:
        np.set_printoptions(precision=3)


@mutant(caught_by="observer.process_untouched")
class WritesAnythingAsJson(Observer):
    def on_started(self, event: EngineStarted) -> None:
        json.dumps = partial(json.dumps, default=str)


@mutant(caught_by="observer.process_untouched")
class RenamesALevel(Observer):
    def on_started(self, event: EngineStarted) -> None:
        logging.addLevelName(logging.DEBUG, "dbg")


@mutant(caught_by="observer.raises_nothing")
class CountsAtMostTwoDrafts(Observer):
    def __init__(self, options: BaseModel, context: ObserverContext) -> None:
        super().__init__(options, context)
        self.accepted = [0, 0, 0]

    def on_step(self, event: StepFinished) -> None:
        for count in event.accepted_drafts:
            self.accepted[count] += 1


@mutant(caught_by="observer.raises_nothing")
class KnowsOneCacheGroup(Observer):
    def on_started(self, event: EngineStarted) -> None:
        (self.group,) = event.cache_groups


@mutant(caught_by="observer.raises_nothing")
class FormatsIds(Observer):
    def on_arrived(self, event: RequestArrived) -> None:
        self.line = f"{event.request.id} arrived after %d others" % event.request.priority


@mutant(caught_by="observer.long_run", soon=True)
class HasRoomForSomeRequests(Observer):
    def __init__(self, options: BaseModel, context: ObserverContext) -> None:
        super().__init__(options, context)
        self.latencies = np.zeros(800)
        self.count = 0

    def on_finished(self, event: RequestFinished) -> None:
        self.latencies[self.count] = event.time - event.request.arrival_time
        self.count += 1


@mutant(caught_by="observer.long_run")
class KeepsTheTimesOfAllSteps(Observer):
    def __init__(self, options: BaseModel, context: ObserverContext) -> None:
        super().__init__(options, context)
        self.times: list[float] = []

    def on_step(self, event: StepFinished) -> None:
        self.times.append(event.ended - event.started)


@mutant(caught_by="observer.forgets")
class KeepsIdsInASlot(Observer):
    __slots__ = ("ids",)

    def on_arrived(self, event: RequestArrived) -> None:
        self.ids = {*getattr(self, "ids", ()), event.request.id}


_SEEN: list[object] = []


@mutant(caught_by="observer.forgets")
class KeepsRequestsInItsModule(Observer):
    def on_finished(self, event: RequestFinished) -> None:
        _SEEN.append(event.request)


@mutant(caught_by="observer.first_use")
class ReportsAtExit(Observer):
    def on_started(self, event: EngineStarted) -> None:
        atexit.register(self.report)

    def report(self) -> None: ...


@mutant(caught_by="observer.reused_ids")
class DropsIdsAtTheEndOfTheStep(Observer):
    def __init__(self, options: BaseModel, context: ObserverContext) -> None:
        super().__init__(options, context)
        self.since: dict[str, float] = {}
        self.ended: list[str] = []

    def on_arrived(self, event: RequestArrived) -> None:
        self.since[event.request.id] = event.time

    def on_finished(self, event: RequestFinished) -> None:
        self.last = event.time - self.since[event.request.id]
        if event.more_steps:
            self.ended.append(event.request.id)
        else:
            del self.since[event.request.id]

    def on_step(self, event: StepFinished) -> None:
        for name in self.ended:
            self.since.pop(name, None)
        self.ended.clear()


@mutant(caught_by="observer.forgets_bytes")
class CountsTheLastIds(Observer):
    def __init__(self, options: BaseModel, context: ObserverContext) -> None:
        super().__init__(options, context)
        self.times: dict[bytes, int] = {}

    def on_arrived(self, event: RequestArrived) -> None:
        key = event.request.id.encode()
        self.times[key] = self.times.pop(key, 0) + 1
        if len(self.times) > 100:
            del self.times[next(iter(self.times))]
