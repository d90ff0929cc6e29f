"""The observer: it is told what the engine does. It overrides the methods for the events that it wants, and should return quickly."""

import logging

from dovetail.api.observer import Observer, ObserverContext, RequestFinished
from pydantic import BaseModel, ConfigDict, Field

logger = logging.getLogger(__name__)


class AcmeOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    slow_s: float = Field(10.0, ge=0, description="Requests that took longer than this, in seconds, are logged.")


class AcmeObserver(Observer):
    """An observer that logs each slow request, with the time to its first token. Times are on the engine's clock."""

    options: AcmeOptions

    def __init__(self, options: AcmeOptions, context: ObserverContext) -> None:
        super().__init__(options, context)
        self.num_slow = 0

    def on_finished(self, event: RequestFinished) -> None:
        request = event.request
        took_s = event.time - request.arrival_time
        if took_s <= self.options.slow_s:
            return
        self.num_slow += 1
        if request.first_token_time is None:
            waited = "no token came"
        else:
            waited = f"the first token after {request.first_token_time - request.arrival_time:.3f} s"
        logger.warning("request %s took %.3f s (%s): %s", request.id, took_s, event.finish_reason, waited)
