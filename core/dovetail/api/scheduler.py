"""The interface of a scheduling policy. The policy decides which requests run; the step (`dovetail.engine.step`) keeps the books.

A policy subclasses `Scheduler` and grants tokens in `schedule`. Prefill, decode, chunked prefill and re-prefill after a preemption are all the
same here: a number of tokens. The core overlaps planning and computing without any policy's help. All times are seconds on the engine's clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, Protocol

from pydantic import BaseModel

from dovetail.request import Request


class Refusal(Enum):
    """The reason why a grant was refused."""

    BUDGET = "fewer than min_tokens left in this step's token budget"
    PACE = "more prompt tokens would let streamed answers wait too long for their next token"
    SEATS = "max_num_seqs requests run in this step already"
    MEMORY = "not enough KV blocks, even by evicting everyone offered"
    NOT_NOW = "granted, evicted or rejected in this step already, or tokens in flight must come back first"


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to `Step.grant`. `tokens` are computed and charged to the budget (cached ones are neither). False in a condition if refused."""

    tokens: int = 0
    refused: Refusal | None = None

    def __bool__(self) -> bool:
        return self.tokens > 0


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of finishing the prefill, or of one decode: tokens to compute, blocks to take from `free_blocks`, tokens cached now."""

    tokens: int
    blocks: int
    cached: int


class Fit(NamedTuple):
    """The grounds of `Step.estimate_s`. `steps`: number of finished steps that it has seen. `error`: by how much it is off for them, as a share of
    the time that each took (root mean square; newer steps count more); infinity until there are more of them than terms to fit."""

    steps: int
    error: float


class Ran(NamedTuple):
    """The tokens of one request in a finished step. `computed`: tokens whose K and V were computed. `generated`: tokens given to the client; 0 for a
    chunk that doesn't end a prefill. Results that are thrown away don't count."""

    request: Request
    computed: int
    generated: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step whose results are in. Times are seconds on the engine's clock, both on the device."""

    index: int
    started: float
    ended: float
    ran: tuple[Ran, ...]


@dataclass(frozen=True, slots=True)
class Claims:
    """The capabilities of the kind: what a policy promises. The conformance suite checks `order`. The next four are exemptions, which its verdict
    prints: the policy may leave room unused, pass a request over while others arrive, reject requests, or compute prompts in steps without the
    decodes. `paced`: whether the engine's `pace` bounds the prompt tokens of its steps."""

    order: Literal["arrival", "priority", "deadline"] | None = None
    idles: bool = False
    starves: bool = False
    rejects: bool = False
    stalls: bool = False
    paced: bool | None = None  # None: unless it stalls

    @property
    def is_paced(self) -> bool:
        """Return `paced`, resolved."""
        return not self.stalls if self.paced is None else self.paced


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    """Constants that a policy receives when it is made. As in every value type here, fields are only ever added."""

    max_tokens: int  # token budget of a step
    max_seqs: int
    total_blocks: int
    block_size: int  # tokens
    seed: int


class Step(Protocol):
    """A step being planned. It is closed once `schedule` returns: later use raises `PolicyError`. A decode isn't always one token.

    `waiting` (no blocks), `running` (blocks) and `decoding` (running, prefill done or in flight) are ordered by (arrival_time, order added),
    preempted requests too. Each access gives a tuple that later calls don't change. A request whose last allowed token is in flight is in
    none of them; nor is a sample of n > 1 while a sibling computes their prompt, which is in `held_back`.
    """

    @property
    def index(self) -> int:
        """The step's number, from 0."""

    @property
    def now(self) -> float:
        """The time of planning; under overlap the previous step is still in flight."""

    @property
    def tokens_left(self) -> int:
        """The rest of this step's token budget."""

    @property
    def seqs_left(self) -> int:
        """Number of requests that can still be granted tokens in this step. A request that holds blocks but gets no grant doesn't count."""

    @property
    def free_blocks(self) -> int:
        """Number of blocks that grants can still take: empty ones, and cached ones that nobody holds."""

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Requests that hold no blocks."""

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that hold blocks."""

    @property
    def decoding(self) -> tuple[Request, ...]:
        """Running requests whose prefill is done or in flight."""

    @property
    def held_back(self) -> tuple[Request, ...]:
        """Samples of n > 1 that have arrived and wait for a sibling to compute their prompt, by arrival. They can be rejected, but not granted."""

    @property
    def in_flight_until(self) -> float:
        """The time by which the steps in flight will have ended, by the core's estimate; never before `now`, and `now` if there are none."""

    @property
    def fit(self) -> Fit:
        """The measurements on which `estimate_s` rests, and how far off it is."""

    def shared_tokens(self, one: Request, other: Request) -> int:
        """Return how many prompt tokens one of the two could take over from the other: the whole blocks with which both prompts begin, without the
        last token of the shorter one, which is always computed. 0 if their `cache_keys` differ or the manager shares nothing. O(prompt)."""

    def cost(self, request: Request) -> Cost:
        """Return what granting the request would cost. Changes nothing; O(cached blocks). Any grant may change the answer for other requests."""

    def estimate_s(self, prefill_tokens: int = 0, decodes: int = 0, context_tokens: int = 0) -> float:
        """Estimate the device time of such a step from the core's running fit to finished steps (also in simulation); 0.0 before the first.

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
        """Let n = min(cost.tokens, max_tokens, tokens_left) of its tokens run, with blocks for all n; or refuse, with nothing changed.

        While answers are streamed, the engine's `pace` bounds the prompt tokens of a step too, for all policies but those that claim not to be
        `paced`. Fewer of n run then, with blocks for all n nevertheless: never fewer than `min_tokens`, which the first prompt of a step gets in any
        case. `reserve` takes the blocks of its whole prefill now. A grant is refused if n < min(min_tokens, cost.tokens), or if no seat or too little
        memory is left. If only memory is short, requests of `evict` are preempted, in that order, until it fits; none, if all of them wouldn't
        free enough. `evict` is read up to `request` itself: those after it keep their blocks. Requests without blocks are skipped, and
        those whose tokens of this very step `request` would find in the cache, or whose blocks it would fork. The iterable
        `evict` must not act on the step. Raises `PolicyError` on misuse (a finished request, one of another engine, meaningless numbers).
        """

    def grant_each(self, requests: Iterable[Request]) -> list[Request]:
        """Call `grant(r)` for each request in order, quickly (the common case: all running decodes). Returns the refused ones, in order."""

    def preempt(self, request: Request) -> None:
        """Free its blocks and take back its grant. Its tokens stay and are prefilled again later. Requests admitted in this step that build on
        tokens which it was to compute are preempted too. Does nothing if that has happened to it, or if its last token is in flight."""

    def reject(self, request: Request, reason: str) -> None:
        """Finish a waiting or running request as "rejected"; its client sees the reason. Its grant is taken back at once, and its blocks come free
        after this step. Does nothing if its last token is in flight."""

    def wake_at(self, time: float) -> None:
        """Ask to plan again by `time` (finite, > now; the earliest counts). Arrivals and results lead to planning anyway."""

    def note(self, request: Request, why: str) -> None:
        """Put a policy's reason into the decision log. The core itself logs grants, refusals, preemptions and rejections."""


class Scheduler(ABC):
    """A scheduling policy. One thread calls it, never re-entrantly, and calls no other method during `schedule`.

    The order of calls doesn't depend on the device's speed: arrivals and results of N-1, then schedule(N+1) with N in flight (overlap off:
    results of N, then schedule(N+1)).

    A policy may keep Requests, and numbers by their ids, until `on_finished`, after which an id may come again; numbers by client as long as it
    likes; and `random.Random(context.seed)`. It may not read another clock, block, or write to a Request. An error that it raises ends the engine;
    the message names the policy."""

    claims = Claims()
    options: BaseModel  # a subclass narrows it: `options: MyOptions`

    def __init__(self, options: BaseModel, context: SchedulerContext) -> None:
        self.options, self.context = options, context

    @abstractmethod
    def schedule(self, step: Step) -> None:
        """Plan one step: grant, preempt and reject, in any order and any number of times."""

    def on_arrival(self, request: Request) -> None:
        """Called once for each request, in order of (arrival_time, order added), before a step shows it and never before its arrival time."""

    def on_step(self, done: StepDone) -> None:
        """Called when a step's results are in. The next step may already be planned: charge at the grant, settle here."""

    def on_preempted(self, request: Request) -> None:
        """Called after the `schedule` that preempted it; its grant in that step never runs."""

    def on_finished(self, request: Request) -> None:
        """Called once for each `on_arrival`, whatever the finish_reason, after its last `on_step`."""
