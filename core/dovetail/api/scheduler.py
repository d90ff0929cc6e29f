"""What a scheduling policy sees and may do. The policy says who runs; the step (`dovetail.engine.step`) keeps the books.

A policy subclasses `Scheduler` and grants tokens in `schedule`. Prefill, decode, chunked prefill and re-prefill after a preemption are one
thing here: a number of tokens. Overlap of planning and computing belongs to the core; no policy sees it, so none can lose it. All times are
seconds on the engine's clock.
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
    """Why a grant was refused."""

    BUDGET = "fewer than min_tokens left in this step's token budget"
    SEATS = "max_num_seqs requests run in this step already"
    MEMORY = "not enough KV blocks, even by evicting everyone offered"
    NOT_NOW = "granted, evicted or rejected in this step already, or tokens in flight must come back first"


@dataclass(frozen=True, slots=True)
class Grant:
    """`tokens` are computed and charged to the budget (cached ones are neither). False when refused."""

    tokens: int = 0
    refused: Refusal | None = None

    def __bool__(self) -> bool:
        return self.tokens > 0


@dataclass(frozen=True, slots=True)
class Cost:
    """To finish the prefill, or to decode once: tokens to compute, blocks to take from `free_blocks`, tokens cached now."""

    tokens: int
    blocks: int
    cached: int


class Ran(NamedTuple):
    """`computed`: K and V made. `generated`: given to the client, 0 for a chunk that doesn't end a prefill. Wasted slots never show."""

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
    """What a policy promises. `order` is checked by the conformance suite. The rest are exemptions that its verdict prints: leaves room
    unused, passes a request over while others arrive, rejects. These are the capabilities of the kind."""

    order: Literal["arrival", "priority", "deadline"] | None = None
    idles: bool = False
    starves: bool = False
    rejects: bool = False


@dataclass(frozen=True, slots=True)
class Context:
    """The engine's constants. As in every value type here, fields are only ever added."""

    max_tokens: int  # budget of a step
    max_seqs: int
    total_blocks: int
    block_size: int  # tokens
    seed: int


class Step(Protocol):
    """One iteration being planned. Dead once `schedule` returns: later use raises `PolicyError`. A decode is not promised to be one token.

    `waiting` (no blocks), `running` (blocks) and `decoding` (running, prefill done or in flight) are ordered by (arrival_time, order added),
    the preempted at their own arrival. Each access gives a tuple that later acts don't change. A request whose last allowed token is in
    flight is in none; nor is a sample of n > 1 while a sibling computes their prompt.
    """

    @property
    def index(self) -> int:
        """The step's number, from 0."""

    @property
    def now(self) -> float:
        """The moment of planning; under overlap the previous step is still in flight."""

    @property
    def tokens_left(self) -> int:
        """What is left of this step's token budget."""

    @property
    def seqs_left(self) -> int:
        """Seats left in this step: a request that holds blocks but gets no grant takes none."""

    @property
    def free_blocks(self) -> int:
        """What grants can still take: empty blocks, and cached ones that nobody holds."""

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Requests that hold no blocks."""

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that hold blocks."""

    @property
    def decoding(self) -> tuple[Request, ...]:
        """Running requests whose prefill is done or in flight."""

    def cost(self, request: Request) -> Cost:
        """Pure, O(cached blocks). Any grant may change the answer for others."""

    def blocks_of(self, request: Request) -> int:
        """Blocks that come free if it is preempted."""

    def estimate_s(self, prefill_tokens: int = 0, decodes: int = 0, context_tokens: int = 0) -> float:
        """Device time of such a step by the core's own running fit to finished steps (the same code in simulation); 0.0 before the first.

        `context_tokens`: K and V read, summed over the requests.
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
        """Run n = min(cost.tokens, max_tokens, tokens_left) of its tokens: blocks for all n, or nothing.

        `reserve` takes the blocks of its whole prefill now. Refused, with nothing changed, if n < min(min_tokens, cost.tokens) or a seat or
        memory lacks. If only memory lacks, preempts from `evict`, in that order, until it fits; nobody, if all of them would not do.
        Reads `evict` up to `request` itself, so nobody is evicted for a request that stands behind it; skips those without blocks, and those
        whose tokens of this very step `request` would find in the cache or whose blocks it would fork. `evict` must not act on the step.
        Raises `PolicyError` on misuse (a finished request, one of another engine, nonsense numbers).
        """

    def grant_each(self, requests: Iterable[Request]) -> list[Request]:
        """grant(r) in order, quickly (the common case: all running decodes). Returns the refused, in order."""

    def preempt(self, request: Request) -> None:
        """Free its blocks and take back its grant. Its tokens stay and are prefilled again later. With it goes who was admitted in this step
        on the strength of tokens that it was to compute. Nothing, if it went so already, or if its last token is in flight."""

    def reject(self, request: Request, reason: str) -> None:
        """Waiting or running: finish it as "rejected"; its client sees the reason. Its grant is taken back at once, its blocks come free after
        this step. Nothing, if its last token is in flight."""

    def wake_at(self, time: float) -> None:
        """Plan again by then (finite, > now; the earliest counts). Arrivals and results wake anyway."""

    def note(self, request: Request, why: str) -> None:
        """A policy's reason, for the decision log. The core itself logs what was done and refused."""


class Scheduler(ABC):
    """A policy. One thread, no re-entry, no callback inside `schedule`.

    The order is fixed, however fast the device: arrivals and results of N-1, then schedule(N+1) with N in flight (overlap off: results of N,
    then schedule(N+1)).

    May keep numbers by request id or client, Requests until `on_finished`, `random.Random(context.seed)`. May not read another clock, block,
    or write to a Request. What it raises ends the engine, with the policy's name.
    """

    claims = Claims()
    options: BaseModel  # a subclass narrows it: `options: MyOptions`

    def __init__(self, options: BaseModel, context: Context) -> None:
        self.options, self.context = options, context

    @abstractmethod
    def schedule(self, step: Step) -> None:
        """Plan one step: grant, preempt, reject; in whatever order and as often as it likes."""

    def on_arrival(self, request: Request) -> None:
        """Once, in (arrival_time, order added), before a Step shows it; never before its time."""

    def on_step(self, done: StepDone) -> None:
        """Results are in; the next step may be planned already: charge at grant, settle here."""

    def on_preempted(self, request: Request) -> None:
        """After the schedule() that evicted it; its grant in that step never runs."""

    def on_finished(self, request: Request) -> None:
        """Once per on_arrival, whatever the finish_reason, after its last on_step."""
