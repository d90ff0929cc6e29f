"""Observer: receives engine events and can't change anything. One that raises is logged once, and
dropped after repeated errors.

Events are frozen values; without observers the engine creates none. Times are seconds on the
engine's clock. Requests, and everything they refer to, are read-only. An id may be reused once its
request has ended.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel

from dovetail.api.kv_cache import CacheGroup, PageCounts
from dovetail.end_reason import FinishReason
from dovetail.request import Request


@dataclass(frozen=True, slots=True)
class EngineStarted:
    time: float
    scheduler: str  # qualified name, as in the next fields
    kv_cache: str
    executor: str
    total_pages: int  # of the KV pool
    block_size: int  # tokens of the smallest block
    max_in_flight: int
    details: Mapping[str, str]
    # of the KV pool, in the order of `PageCounts.held_by_group`
    cache_groups: tuple[CacheGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestArrived:
    time: float
    request: Request


@dataclass(frozen=True, slots=True)
class RequestAdmitted:
    """A request received its first pages, or pages again after a preemption."""

    time: float
    request: Request
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class RequestPreempted:
    time: float
    request: Request


@dataclass(frozen=True, slots=True)
class RequestFinished:
    time: float
    request: Request
    finish_reason: FinishReason
    stop_reason: int | str | None
    more_steps: bool = False  # a `StepFinished` that includes it is still to come


class Act(StrEnum):
    """Kind of a `Decision`. Members may be added in a later minor version."""

    GRANTED = "granted"
    REFUSED = "refused"
    PREEMPTED = "preempted"
    REJECTED = "rejected"
    NOTED = "noted"


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision of the policy in a step. `tokens`: those granted. `reason`: the name of the
    `Refusal`, or what the policy gave for a rejection or a note."""

    request: Request
    act: Act
    tokens: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StepFinished:
    """A step has finished. Requests are counted after the step."""

    index: int
    planned: float  # when it was planned
    started: float  # when the device started it
    ended: float
    prefill_tokens: int
    decode_tokens: int
    generated_tokens: int  # tokens delivered
    cached_tokens: int  # prefix-cache hits of the requests admitted in it
    waiting: int
    running: int
    preempted: int  # requests preempted while it was planned
    recomputed_tokens: int  # prefill tokens that had been computed before a preemption
    pages: PageCounts
    core_s: float  # wall time spent by the core: planning, batch, results
    # empty unless an observer had requested them when the step was planned
    decisions: tuple[Decision, ...] = ()
    draft_rows: int = 0  # rows that checked drafts: see `dovetail.api.drafter`
    draft_tokens: int = 0  # drafts that they checked
    accepted_drafts: tuple[int, ...] = ()  # of each of these rows
    # kinds of the recorded graphs that the device replayed, in order, such as "decode": see
    # `Result.graphs`
    graphs: tuple[str, ...] = ()
    # pages copied within the KV pool before the step: forks of samples, states of prefix hits
    page_copies: int = 0
    checkpoints: int = 0  # states of recurrent layers copied to checkpoints
    adapter_loads: int = 0  # LoRA adapters copied from the host to a slot


@dataclass(frozen=True, slots=True)
class EngineStopped:
    time: float
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class ObserverContext:
    """Constants passed to an observer's constructor."""

    max_num_seqs: int
    total_pages: int  # of the KV pool


@dataclass(frozen=True, slots=True)
class ObserverCapabilities:
    """Optional data that an observer requests. `decisions`: fill `StepFinished.decisions`."""

    decisions: bool = False


class Observer(ABC):
    """Override the methods for the events you need; a later minor version may have more of them.
    They are called from the engine's thread and
    should return quickly. An observer may keep a request, and values by its id, until
    `on_finished`, or until the next `on_step` if `RequestFinished.more_steps` is true."""

    capabilities = ObserverCapabilities()
    options: BaseModel

    def __init__(self, options: BaseModel, context: ObserverContext) -> None:
        self.options = options
        self.context = context

    def on_started(self, event: EngineStarted) -> None:
        """Called first. May raise `ConfigError` if the options can't be satisfied: then the engine
        doesn't start."""

    def on_arrived(self, event: RequestArrived) -> None: ...

    def on_admitted(self, event: RequestAdmitted) -> None: ...

    def on_preempted(self, event: RequestPreempted) -> None: ...

    def on_finished(self, event: RequestFinished) -> None: ...

    def on_step(self, event: StepFinished) -> None: ...

    def on_stopped(self, event: EngineStopped) -> None: ...
