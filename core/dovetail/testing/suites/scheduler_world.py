"""Runs a policy in the real engine core over a fake executor and a small pool, driven by acts that
are values, so that any run can be repeated.

`World.play` performs the acts and then steps until everything has ended. `Watch` wraps the policy:
it records the plans, and checks the rules whose violation the core can't see.
"""

from __future__ import annotations

import copy
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from dovetail.api.clock import VirtualClock
from dovetail.api.component import NoOptions
from dovetail.api.drafter import DrafterContext, ModelDrafter
from dovetail.api.executor import ExecutorConfig, ExecutorContext
from dovetail.api.kv_cache import KVCacheManager, KVContext
from dovetail.api.observer import Observer, ObserverCapabilities, ObserverContext
from dovetail.api.sampler import RowSampling
from dovetail.api.scheduler import Scheduler, SchedulerContext, Step, StepDone
from dovetail.end_reason import EndReason
from dovetail.engine.core import CoreSettings, EngineCore
from dovetail.engine.features import features_of
from dovetail.engine.finish import Finish
from dovetail.engine.live_request import LiveRequest, Status
from dovetail.engine.siblings import make_siblings
from dovetail.engine.speculation import Speculation
from dovetail.engine.stats import ObserverHub
from dovetail.engine.step import PlannedStep
from dovetail.engine.step_times import PlanTiming
from dovetail.errors import DovetailError
from dovetail.request import Request
from dovetail.request.sampling_params import SamplingParams
from dovetail.testing.binding import installed
from dovetail.testing.checks import CheckFailed
from dovetail.testing.fake_executor import FakeExecutor, FakeExecutorOptions
from dovetail.testing.fake_kv import FakeKVCache

# a run is abandoned after this many steps per token to compute, without recomputation
STEPS_A_TOKEN = 20

GIVEN = (  # attributes of a request that only the engine may change
    *(
        "id",
        "prompt_array",
        "prompt_tokens",
        "params",
        "max_tokens",
        "arrival_time",
        "client",
        "priority",
        "deadline",
        "predicted_tokens",
    ),
    *(
        "parent",
        "ttft_deadline",
        "tbt_s",
        "cache_keys",
        "extra",
        "sampling",
        "stop_ids",
        "indivisible",
    ),
)


SLOT_WAIT_S = 0.2  # on the engine's clock
DRAFTING_S = 1.0  # time limit of a drafter, of which the executor's has no need


@dataclass(frozen=True, slots=True)
class Shape:
    """Constants of the engine. `reuse`: with a prefix cache. `groups`: cache groups (block_tokens,
    window, pages_per_block), instead of one without a window whose blocks have `block_size`
    tokens."""

    num_pages: int = 24
    block_size: int = 2
    groups: tuple[tuple[int, int | None, int], ...] = ()
    state_pages: int = 0
    token_budget: int = 12  # of a step
    max_num_seqs: int = 4
    max_model_len: int = 32
    overlap: bool = True
    max_in_flight: int = 2
    reuse: bool = False
    prefill_limit: float | None = None
    adapters: int = 0  # slots
    drafts: int = 0  # most that a request checks in a step; 0: none
    seed: int = 0
    seconds_per_step: float = 0.01
    seconds_per_token: float = 0.001


@dataclass(frozen=True, slots=True)
class Arrive:
    """A user's request; times are seconds from now. `n` samples of one prompt. `stops_after`: it
    ends by itself, unpredictably for policies, for `stop_reason`. `id`: a reused one, of a request
    that has ended. `as_array`: its prompt is an array that its user could write to. `indivisible`:
    its prompt is computed in one step."""

    prompt: tuple[int, ...]
    max_tokens: int = 8
    delay: float = 0.0
    client: str | None = None
    priority: int = 0
    deadline: float | None = None
    predicted_tokens: int | None = None
    ttft_deadline: float | None = None
    tbt_s: float | None = None
    n: int = 1
    stops_after: int | None = None
    stop_reason: int | str | None = "enough"
    id: str | None = None
    cache_keys: tuple[str, ...] = ()
    as_array: bool = False
    adapter: str | None = None  # its digest
    indivisible: bool = False


@dataclass(frozen=True, slots=True)
class Abort:
    """The client of the `index`-th request disconnects."""

    index: int


@dataclass(frozen=True, slots=True)
class Run:
    """The engine runs this many steps."""

    steps: int


Act = Arrive | Abort | Run


@dataclass(frozen=True, slots=True)
class Scenario:
    shape: Shape
    acts: tuple[Act, ...]


@dataclass(frozen=True, slots=True)
class Planned:
    """Decisions of a policy in one step."""

    index: int
    now: float
    granted: tuple[tuple[str, int], ...]
    preempted: tuple[str, ...]
    rejected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shown:
    """State that a policy saw in one step, and the step after its decisions."""

    waiting: tuple[LiveRequest, ...]  # before it acted
    step: PlannedStep  # after


class Watch(Scheduler):
    """Wraps the policy for the core. `inspect` is called after each `schedule`, while the step is
    open."""

    def __init__(
        self, policy: Scheduler, context: SchedulerContext, inspect: Callable[[Shown], None] | None
    ) -> None:
        super().__init__(NoOptions(), context)
        self.policy = policy
        self._inspect = inspect
        self.capabilities = policy.capabilities
        self.planned: list[Planned] = []
        self.most_tokens = self.most_seqs = 0  # in any step
        self.own_s = 0.0  # spent in the policy
        self.broken: CheckFailed | None = None  # what `inspect` found

    def schedule(self, step: Step) -> None:
        assert isinstance(step, PlannedStep)
        waiting = step.waiting
        self._timed(self.policy.schedule, step)
        granted = tuple((request.id, tokens) for request, tokens in step.granted.items())
        preempted = tuple(r.id for r in step.preempted)
        rejected = tuple(r.id for r in step.rejected)
        self.planned.append(Planned(step.index, step.now, granted, preempted, rejected))
        self.most_tokens = max(self.most_tokens, sum(step.granted.values()))
        self.most_seqs = max(self.most_seqs, len(step.granted))
        if self._inspect is not None and self.broken is None:
            try:
                self._inspect(Shown(waiting, step))
            except CheckFailed as error:  # belongs to the check, not to the engine
                self.broken = error

    def on_arrived(self, request: Request) -> None:
        self._timed(self.policy.on_arrived, request)

    def on_step(self, done: StepDone) -> None:
        self._timed(self.policy.on_step, done)

    def on_preempted(self, request: Request) -> None:
        self._timed(self.policy.on_preempted, request)

    def on_finished(self, request: Request) -> None:
        self._timed(self.policy.on_finished, request)

    def _timed(self, method: Callable[[Any], None], argument: Any) -> None:
        begun = time.perf_counter()
        method(argument)
        self.own_s += time.perf_counter() - begun


class _WantsDecisions(Observer):
    capabilities = ObserverCapabilities(decisions=True)


@dataclass(slots=True)
class _Loaded:
    """An adapter that is ready."""

    digest: str
    name: str = ""
    path: str = ""

    def closed(self) -> bool:
        return False

    def failed(self) -> None:
        return None


@dataclass(slots=True)
class _Stop:
    """A `TokenWatcher` that ends a request after a number of tokens."""

    left: int
    reason: int | str | None

    def see(self, token: int) -> Finish | None:
        self.left -= 1
        return Finish(EndReason.STOP, self.reason) if self.left <= 0 else None


class Guarded(LiveRequest):
    """A request that records writes to what only the engine may change, also those that a later one
    takes back."""

    __slots__ = ("written",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.written: list[str] = []
        super().__init__(*args, **kwargs)
        self.written.clear()


def _guarded(name: str) -> property:
    slot: Any = getattr(LiveRequest, name)

    def write(request: Guarded, value: Any) -> None:
        request.written.append(name)
        slot.__set__(request, value)

    return property(slot.__get__, write)


for _name in GIVEN:
    setattr(Guarded, _name, _guarded(_name))


class World:
    """One run of one policy."""

    def __init__(
        self,
        make: Callable[[SchedulerContext], Scheduler],
        shape: Shape,
        *,
        inspect: Callable[[Shown], None] | None = None,
        decisions: bool = False,
        check_books: bool = False,
        guarded: bool = False,
    ) -> None:
        """`decisions`: each step keeps them. `check_books`: after each step the KV-cache manager
        checks itself. `guarded`: requests are `Guarded`."""
        self.clock = VirtualClock()
        executor = _executor(shape, self.clock)
        capacity = executor.start()
        self.kv = _kv_cache(shape, KVContext(capacity.layout, capacity.num_pages))
        context = SchedulerContext(
            shape.token_budget,
            shape.max_num_seqs,
            capacity.num_pages,
            capacity.layout.block_size,
            shape.seed,
        )
        self.watch = Watch(make(context), context, inspect)
        hub = ObserverHub(
            [("decisions", _WantsDecisions(NoOptions(), ObserverContext(1, 1)))]
            if decisions
            else []
        )
        name = type(self.watch.policy).__name__
        settings = CoreSettings(
            shape.max_num_seqs,
            shape.token_budget,
            shape.overlap,
            name,
            shape.prefill_limit,
            strict=True,
        )
        self.core = EngineCore(
            self.watch,
            self.kv,
            executor,
            capacity,
            self.clock,
            settings,
            hub,
            features_of(capacity, SLOT_WAIT_S),
            partial(_timing, shape.drafts),
        )
        self.requests: list[LiveRequest] = []
        self.given: dict[Guarded, dict[str, Any]] = {}  # attributes that no policy may change
        self.told: list[str] = []  # as recorded by an observer
        # in the order of ending, without aborted ones
        self.finished: dict[LiveRequest, Finish] = {}
        self.steps = 0
        self._most_steps = 100
        self._check_books = check_books
        self._request_class = Guarded if guarded else LiveRequest

    @property
    def policy(self) -> Scheduler:
        return self.watch.policy

    @property
    def dead(self) -> BaseException | None:
        """The error that ended the engine, or None."""
        return self.core.dead

    def play(self, acts: Iterable[Act]) -> World:
        """Perform the acts, then step until everything has ended, or up to a limit. Raises errors
        of `inspect`."""
        self.perform(acts)
        self.run()
        return self

    def perform(self, acts: Iterable[Act]) -> None:
        for act in acts:
            match act:
                case Arrive():
                    self._add(act)
                case Abort(index):
                    with _silence():
                        self.core.abort(self.requests[index % len(self.requests)])
                case Run(steps):
                    for _ in range(steps):
                        self._step()

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while self.core.has_unfinished() and self.steps < self._most_steps and not until():
            self._step()

    @property
    def unfinished(self) -> list[LiveRequest]:
        return [request for request in self.requests if request.status is not Status.FINISHED]

    def changed(self, request: LiveRequest) -> list[str]:
        """Return the names of the attributes that only the engine may change and that a component
        has changed, for a while or for good. Needs `guarded`."""
        assert isinstance(request, Guarded)
        different = [
            name
            for name, value in self.given[request].items()
            if _plain(getattr(request, name)) != value
        ]
        return sorted({*different, *request.written})

    def _step(self) -> None:
        if self.dead is not None and not self.core.has_unfinished():
            return
        self.steps += 1
        with _silence():
            self.finished |= self.core.step().finished
        if self.watch.broken is not None:
            raise self.watch.broken
        if self._check_books and self.dead is None:
            self.kv.check_integrity()
            counts = self.kv.counts
            if counts.empty + counts.held + counts.cached != self.kv.context.num_pages:
                raise DovetailError(
                    f"pages were lost or made: {counts} of {self.kv.context.num_pages}"
                )

    def _add(self, arrive: Arrive) -> None:
        now = self.clock.now()
        name = arrive.id or f"r{len(self.requests)}"
        samples = [
            self._request(arrive, name if arrive.n == 1 else f"{name}.{index}", now, index)
            for index in range(arrive.n)
        ]
        if arrive.n > 1:
            make_siblings(samples)
        for request in samples:
            self.requests.append(request)
            self._most_steps += STEPS_A_TOKEN * (request.prompt_tokens + request.max_tokens)
            if isinstance(request, Guarded):
                self.given[request] = {
                    name: copy.deepcopy(_plain(getattr(request, name))) for name in GIVEN
                }
            if self.dead is None:
                self.core.add(request)

    def _request(self, arrive: Arrive, id: str, now: float, index: int) -> LiveRequest:
        return self._request_class(
            id,
            np.array(arrive.prompt) if arrive.as_array else arrive.prompt,
            SamplingParams(max_tokens=arrive.max_tokens),
            max_tokens=arrive.max_tokens,
            arrival_time=now + arrive.delay,
            client=arrive.client,
            priority=arrive.priority,
            deadline=None if arrive.deadline is None else now + arrive.delay + arrive.deadline,
            predicted_tokens=arrive.predicted_tokens,
            ttft_deadline=None
            if arrive.ttft_deadline is None
            else now + arrive.delay + arrive.ttft_deadline,
            tbt_s=arrive.tbt_s,
            parent=id.partition(".")[0] if arrive.n > 1 else None,
            cache_keys=arrive.cache_keys,
            indivisible=arrive.indivisible,
            sampling=RowSampling(seed=index),
            adapter=None if arrive.adapter is None else _Loaded(arrive.adapter),
            watchers=()
            if arrive.stops_after is None
            else (_Stop(arrive.stops_after, arrive.stop_reason),),
        )


def _plain(value: Any) -> Any:
    """Return a value that can be copied and compared."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return dict(value) if isinstance(value, MappingProxyType) else value


@contextmanager
def _silence() -> Iterator[None]:
    """Silence the log of an engine's end, which checks report more precisely."""
    logger = logging.getLogger("dovetail")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


class _OfTheExecutor(ModelDrafter):
    """Leaves all drafts to the executor: of the fake one, four of five are right."""

    model = ""


def _timing(drafts: int, *arguments: Any) -> PlanTiming:
    """Make the strategy of planning, with that many drafts. `arguments`: those of `PlanTiming`."""
    if not drafts:
        return PlanTiming(*arguments)
    context = DrafterContext(max_drafts=drafts, vocab_size=None, max_model_len=None)
    drafter = _OfTheExecutor(NoOptions(), context)
    return Speculation(drafter, "the executor's", drafts, DRAFTING_S, *arguments)


def _executor(shape: Shape, clock: VirtualClock) -> FakeExecutor:
    options = FakeExecutorOptions(
        num_pages=shape.num_pages,
        block_size=shape.block_size,
        groups=shape.groups,
        state_pages=shape.state_pages,
        vocab_size=97,
        max_in_flight=shape.max_in_flight,
        max_model_len=shape.max_model_len,
        seconds_per_step=shape.seconds_per_step,
        seconds_per_token=shape.seconds_per_token,
        max_lines=shape.max_num_seqs * (1 + shape.drafts) if shape.drafts else 0,
    )
    limits = shape.max_num_seqs, shape.token_budget
    config = ExecutorConfig(
        "",
        "auto",
        "dummy",
        None,
        *limits,
        0.9,
        None,
        None,
        False,
        shape.overlap,
        0,
        max_adapters=shape.adapters,
        max_drafts=shape.drafts,
    )
    return FakeExecutor(options, ExecutorContext(config, clock))


def _kv_cache(shape: Shape, context: KVContext) -> KVCacheManager:
    if not shape.reuse:
        return FakeKVCache(NoOptions(), context)
    manager: KVCacheManager = (
        installed(tuple(sys.path)).resolve("kv_cache", "dovetail:prefix").make(context)
    )
    return manager
