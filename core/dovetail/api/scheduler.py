"""Scheduling policy: decides which requests run. The step (`dovetail.engine.step`) does the
accounting.

A policy subclasses `Scheduler` and grants tokens in `schedule`. Prefill, decode, chunked prefill
and re-prefill after preemption are all the same here: a number of tokens. The core overlaps
planning and computing without any policy's help. All times are seconds on the engine's clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol

from pydantic import BaseModel

from dovetail.request import Request


class Refusal(Enum):
    """Reason why a grant was refused. Members may be added in a later minor version."""

    BUDGET = "fewer than min_tokens left in this step's token budget"
    PREFILL_LIMIT = (
        "more prompt tokens would raise the inter-token latency of streamed answers too much"
    )
    SEQS = "max_num_seqs requests run in this step already"
    MEMORY = "not enough free pages, even if all offered requests were evicted"
    MEDIA = "this step encodes as many images as it may"
    ADAPTERS = "every slot for adapters was taken in this step"
    NOT_NOW = (
        "granted, evicted or rejected in this step already, or waiting for tokens in flight, "
        "or for prompts that keep their rows"
    )


@dataclass(frozen=True, slots=True)
class Grant:
    """Result of `Step.grant`. `tokens`: number of tokens computed and charged to the budget (cached
    ones are neither). Falsy if refused."""

    tokens: int = 0
    refused: Refusal | None = None

    def __bool__(self) -> bool:
        return self.tokens > 0


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of finishing the prefill, or of one decode: tokens to compute, pages of the KV pool to
    take from `free_pages`, tokens cached now. The next token may need several pages, one or more
    for each group of layers with the same sliding window (`dovetail.api.kv_cache`)."""

    tokens: int
    pages: int
    cached: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Quality of `Step.estimate_s`. `steps`: number of finished steps that were fitted. `error`:
    root mean square of the relative error on them (newer steps weigh more); infinity until there
    are more steps than terms to fit."""

    steps: int
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Tokens of one request in a finished step. `computed`: tokens whose K and V were computed.
    `generated`: tokens delivered to the client; 0 for a chunk that doesn't end a prefill.
    `drafted`: draft tokens that the step checked (`dovetail.api.drafter`). `accepted`: how many of
    these were sampled, too; `generated` is one more, unless the answer ended before. Discarded
    results don't count, nor do tokens of a deterministic request before they are delivered, as
    checked drafts."""

    request: Request
    computed: int
    generated: int
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class StepDone:
    """A finished step. Times are seconds on the engine's clock at which the device started and
    ended it."""

    index: int
    started: float
    ended: float
    ran: tuple[Ran, ...]


@dataclass(frozen=True, slots=True)
class SchedulerCapabilities:
    """Properties of a policy. `order`: the order in which it serves requests, which the conformance
    suite checks. The next four exempt it from a check each, and the suite's verdict prints them:
    the policy may leave room unused (`idles`), pass a request over while others arrive (`starves`),
    reject requests (`rejects`), or compute prompts in steps without the decodes (`stalls_decodes`).
    `prefill_limited`: whether the engine's `prefill_limit` caps the prompt tokens of its steps."""

    order: Literal["arrival", "priority", "deadline"] | None = None
    idles: bool = False
    starves: bool = False
    rejects: bool = False
    stalls_decodes: bool = False
    prefill_limited: bool | None = None  # None: unless it stalls decodes

    @property
    def is_prefill_limited(self) -> bool:
        """Return `prefill_limited` with None resolved."""
        return not self.stalls_decodes if self.prefill_limited is None else self.prefill_limited


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    """Constants passed to a policy's constructor. Fields of all value types here are only ever
    added."""

    token_budget: int  # most tokens computed in a step
    max_num_seqs: int  # most requests in a step
    total_pages: int  # of the KV pool; how many a request takes: `Step.pages_at`
    block_size: int  # tokens of the smallest block
    seed: int


class Step(Protocol):
    """The step being planned. It is closed once `schedule` returns: later use raises `PolicyError`.
    A decode isn't always one token.

    `waiting` (no pages), `running` (pages) and `decoding` (running, prefill done or in flight)
    are ordered by (arrival_time, order added), including preempted requests. Each access returns a
    tuple that later calls don't change. A request with its last allowed token in flight is in none
    of them. Neither is a sample of n > 1 while a sibling computes their prompt, or a request whose
    LoRA adapter could get no slot when the step began; these are in `held_back`.
    """

    @property
    def index(self) -> int:
        """Number of the step, from 0."""

    @property
    def now(self) -> float:
        """Time of planning; with overlap the previous step is still in flight."""

    @property
    def tokens_left(self) -> int:
        """Remaining token budget of this step."""

    @property
    def seqs_left(self) -> int:
        """Number of requests that can still be granted tokens in this step. A request that holds
        pages but gets no grant doesn't count."""

    @property
    def free_pages(self) -> int:
        """Number of pages that grants can still take: `PageCounts.empty`, and `cached` ones, which
        no request holds."""

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Requests that hold no pages."""

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that hold pages."""

    @property
    def decoding(self) -> tuple[Request, ...]:
        """Running requests whose prefill is done or in flight."""

    @property
    def held_back(self) -> tuple[Request, ...]:
        """Samples of n > 1 that have arrived and wait for a sibling to compute their prompt, and
        requests that wait for a slot for their adapter, by arrival. They can be rejected, but not
        granted."""

    @property
    def in_flight_until(self) -> float:
        """Estimated time at which the steps in flight end; never before `now`, and `now` if there
        are none."""

    @property
    def fit(self) -> Fit:
        """Number of steps behind `estimate_s`, and its error."""

    def shared_tokens(self, one: Request, other: Request) -> int:
        """Return how many prompt tokens one of the two could reuse from the other: the whole blocks
        that both prompts begin with, without the last token of the shorter one, which is always
        computed. 0 if their `cache_keys` differ or the manager shares nothing. O(prompt)."""

    def cost(self, request: Request) -> Cost:
        """Return the cost of granting the request. Changes nothing; O(cached pages). Any grant may
        change the cost of other requests."""

    def pages_at(self, request: Request, tokens: int) -> int:
        """Return how many pages `request` will hold once it has `tokens` tokens and decodes: those
        of blocks that have left a sliding window are released by then. Pages that it shares with
        others count in full. Raises `PolicyError` if `tokens` is negative."""

    def estimate_s(
        self, prefill_tokens: int = 0, decodes: int = 0, context_tokens: int = 0
    ) -> float:
        """Estimate the device time of such a step from the core's running fit to finished steps
        (also in simulation); 0.0 before the first.

        `context_tokens`: tokens whose K and V are read, summed over the requests.
        """

    def grant(
        self,
        request: Request,
        max_tokens: int | None = None,
        *,
        min_tokens: int = 1,
        reserve: bool = False,
        evict: Iterable[Request] = (),
    ) -> Grant:
        """Let n = min(cost.tokens, max_tokens, tokens_left) of its tokens run, with pages for all
        n; or refuse, with nothing changed.

        A prompt that can't be divided (`Request.indivisible`) is granted whole or refused with
        BUDGET, whatever `max_tokens` says.

        While answers are streamed, the engine's `prefill_limit` also caps the prompt tokens of a
        step, unless the policy isn't `prefill_limited`. Fewer than n may run then, with pages for
        all n nevertheless, but at least `min_tokens`, and the first prompt of a step always gets
        those. `reserve` allocates the pages of its whole prefill now. A grant is refused if n <
        min(min_tokens, cost.tokens), or if `seqs_left` is 0 or too little memory is left. If only
        memory is short, requests of `evict` are preempted, in that order, until it fits; none if
        evicting all of them wouldn't free enough. `evict` is read up to `request` itself: requests
        after it keep their pages. Skipped are requests without pages, and those with tokens of this
        very step that `request` would find in the cache, or with pages that it would fork. The
        iterable `evict` must not act on the step. Raises `PolicyError` on misuse (a finished
        request, one of another engine, invalid numbers).
        """

    def grant_each(self, requests: Iterable[Request]) -> list[Request]:
        """Call `grant(r)` for each request in order; fast path for all running decodes. Returns the
        refused ones, in order."""

    def preempt(self, request: Request) -> None:
        """Free its pages and revoke its grant. Its tokens are kept and prefilled again later.
        Requests admitted in this step that reuse tokens which it was to compute are preempted too.
        Does nothing if it has been preempted already, or if its last token is in flight."""

    def reject(self, request: Request, reason: str) -> None:
        """Finish a waiting or running request as "rejected"; its client gets the reason. Its grant
        is revoked at once, and its pages become free after this step. Does nothing if its last
        token is in flight."""

    def wake_at(self, time: float) -> None:
        """Request planning by `time` (finite, > now; the earliest counts). Arrivals and results
        trigger planning anyway."""

    def note(self, request: Request, reason: str) -> None:
        """Add the policy's reason to the decision log. The core logs grants, refusals, preemptions
        and rejections itself."""


class Scheduler(ABC):
    """Base class of policies. All calls come from one thread, never re-entrantly; no other method
    is called during `schedule`.

    The order of calls doesn't depend on the device's speed: arrivals and results of N-1, then
    schedule(N+1) with N in flight (without overlap: results of N, then schedule(N+1)).

    A policy may keep requests, and values by their ids, until `on_finished`, after which an id may
    be reused; values by client indefinitely; and `random.Random(context.seed)`. It may not read
    another clock, block, or modify a request. An exception from a policy ends the engine; the
    message names the policy."""

    capabilities = SchedulerCapabilities()
    options: BaseModel  # a subclass narrows it: `options: MyOptions`

    def __init__(self, options: BaseModel, context: SchedulerContext) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    def schedule(self, step: Step) -> None:
        """Plan one step: grant, preempt and reject, in any order and any number of times. If this
        would let the engine wait forever, it plans a step itself, first come, first served."""

    def on_arrived(self, request: Request) -> None:
        """Called once for each request, in order of (arrival_time, order added), at or after its
        arrival time and before a step shows it."""

    def on_step(self, done: StepDone) -> None:
        """Called when a step has finished. The next step may already be planned: charge on grant,
        settle here."""

    def on_preempted(self, request: Request) -> None:
        """Called after the `schedule` that preempted the request; its grant in that step never
        runs."""

    def on_finished(self, request: Request) -> None:
        """Called once for each `on_arrived`, for any finish_reason, after the request's last
        `on_step`."""
