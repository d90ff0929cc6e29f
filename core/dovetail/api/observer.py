"""What an observer is: it is told what the engine does. It can change nothing; one that raises is named once, and dropped after a few more.

Events are frozen values; without observers none is made. Times are seconds on the engine's clock.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from dovetail.api.kv_cache import BlockCounts
from dovetail.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class EngineStarted:
    time: float
    scheduler: str  # qualified names
    kv_cache: str
    executor: str
    num_blocks: int
    block_size: int
    max_in_flight: int
    details: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RequestArrived:
    time: float
    request: Request


@dataclass(frozen=True, slots=True)
class RequestAdmitted:
    """It got its first blocks, or got some again after a preemption."""

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
    more_steps: bool = False  # a `StepFinished` is still to come of a step that was planned before it ended


@dataclass(frozen=True, slots=True)
class Decision:
    """What the policy did, was refused or noted, in a step: "granted", "refused", "preempted", "rejected", "noted"."""

    request: Request
    act: str
    tokens: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class StepFinished:
    """A step whose results are in. Counts of requests are taken after it."""

    index: int
    planned: float  # when
    started: float  # on the device
    ended: float
    prefill_tokens: int
    decode_tokens: int
    generated_tokens: int  # delivered
    cached_tokens: int  # found in the prefix cache by requests admitted in it
    waiting: int
    running: int
    preempted: int  # requests, in its planning
    recomputed_tokens: int  # of prefill_tokens: computed before, lost by preemption
    blocks: BlockCounts
    core_s: float  # the core's own time on it: planning, batch, results; wall time
    decisions: tuple[Decision, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStopped:
    time: float
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class ObserverContext:
    """Constants that an observer is made with."""

    max_num_seqs: int
    total_blocks: int


@dataclass(frozen=True, slots=True)
class ObserverCapabilities:
    """`decisions`: wants `StepFinished.decisions` filled."""

    decisions: bool = False


class Observer(ABC):
    """Overrides what it wants to hear of. Called from the engine's thread; should return quickly."""

    capabilities = ObserverCapabilities()
    options: BaseModel

    def __init__(self, options: BaseModel, context: ObserverContext) -> None:
        self.options, self.context = options, context

    def on_started(self, event: EngineStarted) -> None:
        """The first call. May raise `ConfigError` if it can't do what its options say: then the engine doesn't start."""

    def on_arrived(self, event: RequestArrived) -> None: ...

    def on_admitted(self, event: RequestAdmitted) -> None: ...

    def on_preempted(self, event: RequestPreempted) -> None: ...

    def on_finished(self, event: RequestFinished) -> None: ...

    def on_step(self, event: StepFinished) -> None: ...

    def on_stopped(self, event: EngineStopped) -> None: ...
