"""A step in flight: the core's notes on it until its results are in (`InFlightStep`), and the results for the front end (`Delivery`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dovetail.api.executor import HostLogprobs
from dovetail.api.observer import Decision
from dovetail.api.scheduler import Ran
from dovetail.engine.finish import Finish
from dovetail.engine.live_request import LiveRequest, Status


@dataclass(slots=True)
class Delivery:
    """The results of a call of `step`, for the front end: `token_ids[i]` is new for `requests[i]`. Requests may finish without a token."""

    requests: list[LiveRequest] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finished: dict[LiveRequest, Finish] = field(default_factory=dict)
    logprobs: dict[LiveRequest, tuple[HostLogprobs, int]] = field(default_factory=dict)  # with the request's index in it
    prompt_logprobs: list[tuple[LiveRequest, HostLogprobs]] = field(default_factory=list)


@dataclass(slots=True)
class InFlightStep:
    """A step that was submitted and whose results aren't in yet."""

    index: int
    handle: Any
    planned: float
    requests: list[LiveRequest]
    tokens: list[int]
    yields_token: list[bool] | None  # None: all
    prefilled: dict[LiveRequest, int]  # request that prefills in it -> tokens that it had computed before
    recomputed: dict[LiveRequest, int]  # the same request -> how many of this step's tokens it had computed once already
    prefill_tokens: int
    decode_tokens: int
    context_tokens: int
    cached_tokens: int
    preempted: int
    recomputed_tokens: int
    core_s: float
    decisions: tuple[Decision, ...]
    unsampled: bool = False  # it waits for `Executor.sample`

    def forget(self, index: int) -> None:
        """Drop the row of a request that ended before its results came: it counts nowhere."""
        request, tokens = self.requests[index], self.tokens[index]
        if request in self.prefilled:
            self.prefill_tokens -= tokens
            self.recomputed_tokens -= self.recomputed.get(request, 0)
        else:
            self.decode_tokens -= tokens

    def fresh_prompt_logprobs(self, request: LiveRequest, logprobs: HostLogprobs) -> HostLogprobs | None:
        """Return the rows of `logprobs` that belong to prompt tokens and weren't given out before a preemption."""
        if request not in self.prefilled:
            return None
        begin, end = self.recomputed.get(request, 0), request.prompt_tokens - 1 - self.prefilled[request]
        if begin >= min(end, len(logprobs.ranks)):
            return None
        return HostLogprobs(logprobs.token_ids[begin:end], logprobs.logprobs[begin:end], logprobs.ranks[begin:end])

    def ran(self, delivered: Iterable[LiveRequest]) -> tuple[Ran, ...]:
        """Return the policy's account of the step, now that its results are in, without requests that had ended before."""
        given = set(delivered)
        return tuple(
            Ran(request, tokens, int(request in given))
            for request, tokens in zip(self.requests, self.tokens, strict=True)
            if request.status is not Status.FINISHED
        )
