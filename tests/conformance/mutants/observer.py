"""Observers with one thing wrong."""

from __future__ import annotations

import gc
import logging
import random
import signal
import threading
import warnings

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
        del event.request.output_token_ids[:]


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
