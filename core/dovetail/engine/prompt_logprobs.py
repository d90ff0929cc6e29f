"""`DeliversPromptLogprobs`: delivers the log-probabilities of prompt tokens, each once."""

from __future__ import annotations

from operator import attrgetter

from dovetail.api.executor import HostLogprobs, PromptLogprobs
from dovetail.engine.feature import EngineFeature
from dovetail.engine.flight import Delivery, InFlightStep
from dovetail.engine.live_request import LiveRequest, Status


class DeliversPromptLogprobs(EngineFeature):
    """The executor computes them for each row whose sampling parameters ask for them."""

    asked_by = attrgetter("params.prompt_logprobs")

    def collected(self, flight: InFlightStep, delivery: Delivery) -> None:
        for index, logprobs in flight.result.values(PromptLogprobs).items():
            request = flight.requests[index]
            if request.status is Status.FINISHED or index in flight.result.failed:
                continue
            fresh = _fresh(flight, request, logprobs)
            if fresh is not None:
                delivery.prompt_logprobs.append((request, fresh))


def _fresh(
    flight: InFlightStep, request: LiveRequest, logprobs: HostLogprobs
) -> HostLogprobs | None:
    """Return the rows of prompt tokens that weren't delivered before a preemption; None: none."""
    if request not in flight.prefilled:
        return None
    begin = flight.recomputed.get(request, 0)
    end = request.prompt_tokens - 1 - flight.prefilled[request]
    if begin >= min(end, len(logprobs.ranks)):
        return None
    return HostLogprobs(
        logprobs.token_ids[begin:end], logprobs.logprobs[begin:end], logprobs.ranks[begin:end]
    )
