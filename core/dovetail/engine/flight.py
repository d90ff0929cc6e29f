"""A step in flight: the core's notes on it (`InFlightStep`), and what the front end gets of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, Any

from dovetail.api.executor import Batch, HostLogprobs, Result
from dovetail.api.observer import Decision, StepFinished
from dovetail.api.scheduler import Ran, StepDone
from dovetail.end_reason import EndReason
from dovetail.engine.finish import Finish
from dovetail.engine.live_request import LiveRequest, Status
from dovetail.errors import DovetailError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Tokens = Iterable[tuple[int, tuple[LiveRequest, int]]]  # numbers in a step, requests and ids
Run = tuple[int, LiveRequest, list[int]]  # the number of the first token, its request, ids


@dataclass(slots=True)
class Delivery:
    """The results of a call of `step`, for the front end: `token_ids[i]` is new for `requests[i]`.

    A request with several new tokens is listed that often, in a row; requests may finish without a
    token.
    """

    requests: list[LiveRequest] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finished: dict[LiveRequest, Finish] = field(default_factory=dict)
    # of each token of requests that want them, with its index
    logprobs: list[tuple[LiveRequest, HostLogprobs, int]] = field(default_factory=list)
    prompt_logprobs: list[tuple[LiveRequest, HostLogprobs]] = field(default_factory=list)
    # results of requests that pool, which end with them
    pooled: list[tuple[LiveRequest, NDArray[np.float32]]] = field(default_factory=list)


@dataclass(slots=True)
class InFlightStep:
    """A step from when it is submitted until its results are delivered."""

    index: int
    batch: Batch
    planned: float
    requests: list[LiveRequest]
    num_tokens: list[int]  # of each
    prefilled: dict[LiveRequest, int]  # of those that prefill in it: tokens computed before
    recomputed: dict[LiveRequest, int]  # of these: tokens of this step computed once already
    prefill_tokens: int
    decode_tokens: int
    context_tokens: int
    cached_tokens: int
    preempted: int
    recomputed_tokens: int
    decisions: tuple[Decision, ...]
    drafts: Mapping[LiveRequest, Sequence[int]]
    unsampled: bool  # it waits for `Executor.sample`
    # of constrained ones: the tokens that it may yield, and why no more
    cuts: dict[LiveRequest, tuple[int, Finish]] = field(default_factory=dict)
    features: Sequence[Any] = ()  # `EngineFeature`s that its requests may ask for
    # requests whose tokens of this step aren't delivered, also since a check has failed: see
    # `windows`
    provisional: Collection[LiveRequest] = ()
    core_s: float = 0.0
    handle: Any = None  # the executor's
    result: Result = field(init=False)
    results_at: float = field(init=False)  # when the host had them
    seconds: float = field(init=False)  # on the device
    accepted: Mapping[LiveRequest, int] = field(default_factory=dict)  # of `drafts`, by the results

    def take(self, result: Result, now: float) -> None:
        """Keep the results, which the host has since `now`.

        Raises `DovetailError` unless they are this step's, with as many tokens as it may yield.
        """
        self.result = result
        self.results_at = now
        self.seconds = result.ended - result.started
        if result.step != self.index:
            raise DovetailError(
                f"the executor returned step {result.step} where {self.index} was due: results "
                "must come in order"
            )
        counts = result.counts
        num_tokens = len(self.requests)
        if (counts is None) == bool(self.drafts):
            raise DovetailError(
                f"step {self.index} has {len(self.drafts)} rows with drafts, and the executor "
                f"returned counts {counts}"
            )
        if counts is not None:
            most = self.batch.num_lines
            least = self.batch.yields_token.copy()
            least[list(result.failed)] = False
            if len(counts) != len(most) or ((counts < least) | (counts > most)).any():
                raise DovetailError(
                    f"step {self.index}: the executor returned {counts.tolist()} tokens a row, "
                    f"where {most.tolist()} are the most"
                )
            num_tokens = int(counts.sum())
            self.accepted = {
                request: max(0, count - 1)
                for request, count in zip(self.requests, counts.tolist(), strict=True)
                if request in self.drafts
            }
        if len(result.token_ids) != num_tokens:
            raise DovetailError(
                f"the executor returned {len(result.token_ids)} tokens for the {num_tokens} rows "
                f"of step {self.index}"
            )
        if self.drafts and result.failed:
            failed = [self.requests[index] for index in result.failed]
            again = [one for one in failed if one.has_window and one in self.drafts]
            self.provisional = {*self.provisional, *again}

    def tokens(self, finished: dict[LiveRequest, Finish]) -> Tokens:
        """Return the tokens to deliver in order, each with its request and its number in the step.

        Rows of requests that ended before are dropped, as are tokens of those in `finished`: the
        caller adds to it between tokens. Rows that fail are added here. Provisional tokens are left
        out.
        """
        result = self.result
        ended = Status.FINISHED
        if (
            result.counts is not None
            or result.failed
            or len(self.provisional) > 0
            or [True for request in self.requests if request.status is ended]
        ):
            return self._sound_tokens(finished)
        if not self.prefilled:
            return enumerate(zip(self.requests, result.token_ids.tolist(), strict=True))
        yields = self.batch.yields_token
        requests = compress(self.requests, yields.tolist())
        return enumerate(zip(requests, result.token_ids[yields].tolist(), strict=True))

    def _sound_tokens(self, finished: dict[LiveRequest, Finish]) -> Tokens:
        """Do as `tokens` for any step."""
        for number, request, row in self.runs(finished):
            for place, token in enumerate(row, number):
                yield place, (request, token)
                if request in finished:
                    break

    def runs(self, finished: dict[LiveRequest, Finish]) -> Iterator[Run]:
        """Do as `tokens` for any step, with all tokens of a request at once. The caller appends
        them to its output, in order, until one of them ends it."""
        token_ids = self.result.token_ids
        yields = self.batch.yields_token
        if self.result.counts is None:  # each row has a place
            token_ids = token_ids[yields]
        counts = yields if self.result.counts is None else self.result.counts
        numbers = token_ids.tolist()
        end = 0
        for index, (request, count) in enumerate(zip(self.requests, counts.tolist(), strict=True)):
            start = end
            end += count
            # Its row counts nowhere; a provisional token counts once it is delivered.
            if request.status is Status.FINISHED or request in self.provisional:
                if request in self.prefilled:
                    self.prefill_tokens -= self.num_tokens[index]
                    self.recomputed_tokens -= self.recomputed.get(request, 0)
                self.num_tokens[index] = 0
                continue
            if index in self.result.failed:
                finished[request] = Finish(EndReason.ERROR, self.result.failed[index])
            most, cut = self.cuts.get(request, (count, None))
            given = 0
            if most and count and request not in finished:
                before = len(request.output)
                yield start, request, numbers[start : min(end, start + most)]
                given = len(request.output) - before
            if cut is not None and count > most and request not in finished:
                finished[request] = cut
            if request in self.drafts:  # only what is delivered counts; one for a failed row
                self.num_tokens[index] = max(1, given)
        self.decode_tokens = sum(self.num_tokens) - self.prefill_tokens

    def provisional_tokens(self) -> Iterator[tuple[LiveRequest, int]]:
        """Yield the provisional token of each request that has one in this step; -1 if its row, or
        a check, failed."""
        if not self.provisional:
            return
        result = self.result
        counts = result.counts
        places: Sequence[int] = range(len(self.requests))
        if counts is not None:
            places = (counts.cumsum() - counts).tolist()
        provisional = self.provisional
        failed = result.failed
        token_ids = result.token_ids.tolist()
        for index, (request, place) in enumerate(zip(self.requests, places, strict=True)):
            if request in provisional:
                yield request, -1 if index in failed else token_ids[place]

    def done(self, delivered: Iterable[LiveRequest]) -> StepDone:
        """Return the policy's account of the step, without requests that had ended before it."""
        given = Counter(delivered)
        ran = tuple(
            Ran(
                request=request,
                computed=tokens,
                generated=given[request],
                drafted=len(self.drafts.get(request, ())),
                accepted=self.accepted.get(request, 0),
            )
            for request, tokens in zip(self.requests, self.num_tokens, strict=True)
            if request.status is not Status.FINISHED and request not in self.provisional
        )
        return StepDone(self.index, self.result.started, self.result.ended, ran)

    def event(self, **counts: Any) -> StepFinished:
        """Return what observers are told of the step, with `counts` of the engine after it."""
        return StepFinished(
            index=self.index,
            planned=self.planned,
            started=self.result.started,
            ended=self.result.ended,
            prefill_tokens=self.prefill_tokens,
            decode_tokens=self.decode_tokens,
            cached_tokens=self.cached_tokens,
            preempted=self.preempted,
            recomputed_tokens=self.recomputed_tokens,
            core_s=self.core_s,
            decisions=self.decisions,
            draft_rows=len(self.drafts),
            draft_tokens=sum(map(len, self.drafts.values())),
            accepted_drafts=tuple(self.accepted.values()),
            graphs=self.result.graphs,
            page_copies=len(self.batch.copies),
            checkpoints=len(self.batch.checkpoints),
            **counts,
        )
