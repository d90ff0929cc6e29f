"""A step in flight: the core's notes on it until its results are in (`InFlightStep`), and the results for the front end (`Delivery`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from dovetail.api.executor import Batch, HostLogprobs, Result
from dovetail.api.observer import Decision
from dovetail.api.scheduler import Ran
from dovetail.engine.finish import Finish
from dovetail.engine.live_request import LiveRequest, Status
from dovetail.errors import DovetailError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True)
class Delivery:
    """The results of a call of `step`, for the front end: `token_ids[i]` is new for `requests[i]`. A request with several new tokens is listed
    that often, in a row; requests may finish without a token."""

    requests: list[LiveRequest] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finished: dict[LiveRequest, Finish] = field(default_factory=dict)
    logprobs: list[tuple[LiveRequest, HostLogprobs, int]] = field(
        default_factory=list
    )  # of each token of requests that want them, with its index
    prompt_logprobs: list[tuple[LiveRequest, HostLogprobs]] = field(default_factory=list)
    pooled: list[tuple[LiveRequest, NDArray[np.float32]]] = field(
        default_factory=list
    )  # results of requests that pool, which end with them


@dataclass(slots=True)
class InFlightStep:
    """A step that was submitted and whose results aren't in yet."""

    index: int
    batch: Batch
    handle: Any
    planned: float
    requests: list[LiveRequest]
    tokens: list[int]
    yields_token: list[bool] | None  # None: all
    prefilled: dict[
        LiveRequest, int
    ]  # request that prefills in it -> tokens that it had computed before
    recomputed: dict[
        LiveRequest, int
    ]  # the same request -> how many of this step's tokens it had computed once already
    prefill_tokens: int
    decode_tokens: int
    context_tokens: int
    cached_tokens: int
    preempted: int
    recomputed_tokens: int
    core_s: float
    decisions: tuple[Decision, ...]
    unsampled: bool = False  # it waits for `Executor.sample`
    drafts: dict[LiveRequest, Sequence[int]] = field(default_factory=dict)
    cuts: dict[LiveRequest, tuple[int, str]] = field(
        default_factory=dict
    )  # of constrained ones: the tokens that it may yield, and why no more
    accepted: dict[LiveRequest, int] = field(
        default_factory=dict
    )  # of `drafts`, once the results are in

    @property
    def yields(self) -> bool:
        """True if some row yields a token."""
        return self.yields_token is None or any(self.yields_token)

    def check(self, result: Result) -> None:
        """Raise `DovetailError` unless `result` is this step's, and has as many tokens as the step may yield."""
        if result.step != self.index:
            raise DovetailError(
                f"the executor returned step {result.step} where {self.index} was due: results must come in order"
            )
        rows, counts = len(self.requests), result.counts
        if (counts is None) == bool(self.drafts):
            raise DovetailError(
                f"step {self.index} has {len(self.drafts)} rows with drafts, and the executor returned counts {counts}"
            )
        if counts is not None:
            yields = self.yields_token or [True] * rows
            most = [
                y * (1 + len(self.drafts.get(request, ())))
                for y, request in zip(yields, self.requests, strict=True)
            ]
            least = [y and index not in result.failed for index, y in enumerate(yields)]
            if len(counts) != rows or not all(
                low <= count <= high
                for low, count, high in zip(least, counts.tolist(), most, strict=True)
            ):
                raise DovetailError(
                    f"step {self.index}: the executor returned {counts.tolist()} tokens a row, where {most} are the most"
                )
            rows = int(counts.sum())
            for request, count in zip(self.requests, counts.tolist(), strict=True):
                if request in self.drafts:
                    self.accepted[request] = max(0, count - 1)
        if len(result.token_ids) != rows:
            raise DovetailError(
                f"the executor returned {len(result.token_ids)} tokens for the {rows} rows of step {self.index}"
            )

    def tokens_of(
        self, result: Result, finished: dict[LiveRequest, Finish]
    ) -> Iterable[tuple[int, tuple[LiveRequest, int]]]:
        """Return the tokens to deliver in order, each with its request and its number in the step.

        Rows of requests that ended before are dropped, as are tokens of those in `finished`: the
        caller adds to it between tokens. Rows that fail are added here.
        """
        ended = Status.FINISHED
        if (
            self.yields_token is None
            and result.counts is None
            and not result.failed
            and not [True for request in self.requests if request.status is ended]
        ):
            return enumerate(zip(self.requests, result.token_ids.tolist(), strict=True))
        return self._sound_tokens(result, finished)

    def _sound_tokens(
        self, result: Result, finished: dict[LiveRequest, Finish]
    ) -> Iterator[tuple[int, tuple[LiveRequest, int]]]:
        """Do as `tokens_of` for any step."""
        token_ids, yields = result.token_ids, self.batch.yields_token
        if result.counts is None:  # each row has a place
            token_ids = token_ids[yields]
        counts: list[int] = (yields if result.counts is None else result.counts).tolist()
        numbered = enumerate(token_ids.tolist())
        for index, (request, count) in enumerate(zip(self.requests, counts, strict=True)):
            tokens = list(islice(numbered, count))
            if request.status is Status.FINISHED:
                self.forget(index)
                continue
            if index in result.failed:
                finished[request] = Finish("error", result.failed[index])
            for number, token in tokens:
                if request in finished or self.ends_before_token(request, finished):
                    break
                yield number, (request, token)

    def ends_before_token(self, request: LiveRequest, finished: dict[LiveRequest, Finish]) -> bool:
        """Count a token of `request`; finish it if its grammar can't have it."""
        if request not in self.cuts:
            return False
        left, why = self.cuts[request]
        if left:
            self.cuts[request] = left - 1, why
        else:
            finished[request] = Finish("error", why)
        return not left

    def drop_rejected(self, delivered: Iterable[LiveRequest]) -> None:
        """Count only the tokens that were delivered as computed by rows with drafts, and one for a row that failed."""
        kept = Counter(delivered)
        for index, request in enumerate(self.requests):
            if request in self.drafts and request.status is not Status.FINISHED:
                self.decode_tokens -= self.tokens[index] - max(1, kept[request])
                self.tokens[index] = max(1, kept[request])

    def forget(self, index: int) -> None:
        """Drop the row of a request that ended before its results came: it counts nowhere. No-op if it was dropped."""
        request, tokens = self.requests[index], self.tokens[index]
        self.tokens[index] = 0
        if request in self.prefilled:
            self.prefill_tokens -= tokens
            self.recomputed_tokens -= self.recomputed.get(request, 0)
        else:
            self.decode_tokens -= tokens

    def ran(self, delivered: Iterable[LiveRequest]) -> tuple[Ran, ...]:
        """Return the policy's account of the step, now that its results are in, without requests that had ended before."""
        given = Counter(delivered)
        return tuple(
            Ran(request, tokens, given[request])
            for request, tokens in zip(self.requests, self.tokens, strict=True)
            if request.status is not Status.FINISHED
        )
