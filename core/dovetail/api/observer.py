"""The observer: it is told what the engine does, and can change nothing. One that raises is named in the log once, and dropped after a few more.

Events are frozen values; without observers the engine makes none. Times are seconds on the engine's clock. Requests are read-only, and so is what
they lead to. An id may come again once its request has ended.
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
    scheduler: str  # this and the next ones: qualified names
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
    """A request got its first blocks, or got blocks again after a preemption."""

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
    """One act of the policy in a step; `act` is "granted", "refused", "preempted", "rejected" or "noted"."""

    request: Request
    act: str
    tokens: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class StepFinished:
    """A step whose results are in. Requests are counted after it."""

    index: int
    planned: float  # when it was planned
    started: float  # when the device began it
    ended: float
    prefill_tokens: int
    decode_tokens: int
    generated_tokens: int  # tokens delivered
    cached_tokens: int  # tokens that requests admitted in it found in the prefix cache
    waiting: int
    running: int
    preempted: int  # requests preempted while it was planned
    recomputed_tokens: int  # how many of prefill_tokens had been computed before and lost by preemption
    blocks: BlockCounts
    core_s: float  # wall time that the core itself spent on it: planning, batch, results
    decisions: tuple[Decision, ...] = ()  # empty unless an observer wanted them when the step was planned


@dataclass(frozen=True, slots=True)
class EngineStopped:
    time: float
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class ObserverContext:
    """Constants that an observer receives when it is made."""

    max_num_seqs: int
    total_blocks: int


@dataclass(frozen=True, slots=True)
class ObserverCapabilities:
    """The features that an observer declares. `decisions`: it wants `StepFinished.decisions` filled."""

    decisions: bool = False


class Observer(ABC):
    """An observer overrides the methods for the events that it wants. They are called from the engine's thread and should return quickly. It may keep
    a request, and numbers by its id, until `on_finished`, or until the next `on_step` if `RequestFinished.more_steps` is true."""

    capabilities = ObserverCapabilities()
    options: BaseModel

    def __init__(self, options: BaseModel, context: ObserverContext) -> None:
        self.options, self.context = options, context

    def on_started(self, event: EngineStarted) -> None:
        """Called first. May raise `ConfigError` if the observer can't do what its options say: then the engine doesn't start."""

    def on_arrived(self, event: RequestArrived) -> None: ...

    def on_admitted(self, event: RequestAdmitted) -> None: ...

    def on_preempted(self, event: RequestPreempted) -> None: ...

    def on_finished(self, event: RequestFinished) -> None: ...

    def on_step(self, event: StepFinished) -> None: ...

    def on_stopped(self, event: EngineStopped) -> None: ...
