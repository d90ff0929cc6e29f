"""The executor `simulated`: the engine, the policy and the KV-cache manager are the real ones, but no model runs. A step takes as long as a
step-time model says, on a virtual clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from dovetail.api.clock import VirtualClock
from dovetail.api.executor import Batch, Capacity, Executor, ExecutorCapabilities, ExecutorContext, Masks, NewRow, Result
from dovetail.api.kv_cache import KVGroup, KVLayout
from dovetail.errors import DovetailError, UnsupportedError
from dovetail.testing.fake_executor import next_allowed
from dovetail_lab.grammars import SimulatedGrammars
from dovetail_lab.roofline import RooflineStepTime
from dovetail_lab.step_profile import StepTimeProfile, chance
from dovetail_lab.step_time import StepShape

DEFAULT_BLOCK_SIZE = 16
OVERLAPPED = 2  # steps in flight, where nobody says how many
CORE_STREAM, LAUNCH_STREAM = 1, 2  # of chance
FILLER_ID = 1  # what a request answers, again and again, if nobody said what


class SimulatedOptions(BaseModel):
    """Options of the executor `simulated`: the device that it pretends to be."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step_time: str | dict[str, Any] = Field(
        "a10g-llama-2-7b", description="A profile's .json file, the name of a shipped one, or a model in place: {kind: linear, base_s: 0.01, …}."
    )
    step_time_factor: float = Field(1.0, gt=0, le=1e3, description="Multiplies the device's time of every step, to try what an error of it does.")
    num_blocks: int | None = Field(
        None,
        ge=1,
        description="Blocks in the KV pool. Unset: as many as the engine that was measured had; for a roofline, as the device has room for.",
    )
    max_in_flight: int | None = Field(
        None, ge=1, le=8, description="Steps submitted before the oldest is collected; 1 if overlap is off. Unset: as was measured, or 2."
    )
    plans_late: bool = Field(True, description="False: each step is planned as soon as there is room for it in flight, as in other engines.")
    core_s: float | None = Field(None, ge=0, description="The core's own time a step, hidden where it overlaps. Unset: as the profile says.")
    core_per_row_s: float | None = Field(None, ge=0, description="What each request in the step adds to it. Unset: as the profile says.")
    vocab_size: int = Field(32_000, ge=2, description="Token ids are below it.")
    compile_s: float = Field(2.5e-3, ge=0, allow_inf_nan=False, description="How long a grammar is compiled: the median.")
    compile_sigma: float = Field(0.157, ge=0, le=10, description="It varies by exp(compile_sigma z), z normal.")
    mask_row_s: float = Field(1e-4, ge=0, allow_inf_nan=False, description="What a core takes to fill a row's mask, when all cores do.")
    mask_cores: int = Field(16, ge=1, description="Cores that fill masks.")
    accept_s: float = Field(2.2e-6, ge=0, allow_inf_nan=False, description="What a row's grammar takes to see a token.")
    late_sampling_s: float = Field(3.5e-4, ge=0, allow_inf_nan=False, description="What handing over the sampling of a step with grammars takes.")


@dataclass(slots=True)
class _Pending:
    step: int
    token_ids: NDArray[np.int64]
    shape: StepShape
    ready: float  # when the core began to hand it over
    launched: float  # and had done so
    seconds: float  # that the device computes
    results_s: float  # until they are delivered
    late_s: float  # by which it would have been handed over earlier had grammars cost nothing
    sampled: float | None  # when its masks were there and its sampling was handed over; None: not yet. Of a step that isn't late: -inf
    masked: int = 0  # rows whose grammars are to see their tokens


class SimulatedExecutor(Executor):
    """The executor. It keeps, for each row, how many tokens are computed, and its answer. Steps run one after the other, as soon as submitted."""

    capabilities = ExecutorCapabilities(virtual_clock=True, logprobs=False, masks=True, samples=False)
    options: SimulatedOptions

    def __init__(self, options: SimulatedOptions, context: ExecutorContext) -> None:
        super().__init__(options, context)
        if not isinstance(context.clock, VirtualClock):
            raise UnsupportedError(f"executor simulated moves a VirtualClock, and was given a {type(context.clock).__name__}")
        self.clock = context.clock
        self.profile = StepTimeProfile.load(options.step_time)
        given = {name: value for name in ("core_s", "core_per_row_s") if (value := getattr(options, name)) is not None}
        if given:  # how a core's times vary that was measured says nothing of one that was made up
            self.profile = self.profile.model_copy(update={**given, "core_spread": None})
        self._step_time, self._launch, self._rule = self.profile.make(), self.profile.make_launch(), self.profile.rule
        self.plan_s = 0.0  # a running mean of what planning and submitting take, as the core of a real engine keeps it
        seed = context.config.seed
        self.grammars = SimulatedGrammars(context.clock, options.vocab_size, options.compile_s, options.compile_sigma, seed)
        self.masks_s = 0.0  # by which grammars have delayed the device so far
        self._accepting_s = 0.0  # the core has yet to spend on showing grammars their tokens
        self._core_late_s = self._device_late_s = 0.0  # how much earlier core and device would be had grammars cost nothing
        self._left = 0.0  # when the core was here last
        self.together: Callable[[float, float], tuple[float, float]] | None = (
            None  # devices in step with others: (ready, seconds) -> (start, seconds)
        )
        self._expected: dict[str, NDArray[np.int32]] = {}
        self._pending: deque[_Pending] = deque()
        self._last_ended = -np.inf
        rows = context.config.max_num_seqs
        self._computed = np.zeros(rows, np.int64)
        self._position = np.zeros(rows, np.int64)  # of the next answer
        self._last = np.zeros(rows, np.int64)  # position of the last answer there is
        self._answers = np.zeros((rows, 1), np.int64)

    def expect(self, request_id: str, answer: NDArray[np.int32]) -> None:
        """Set a request's answer: ids [1 or more tokens], of which the last is repeated if more are asked for. No other component sees it."""
        self._expected[request_id] = answer

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._expected.pop(request_id, None)

    def take_in(self) -> bool:
        """Let the time pass that the core takes for a request. False if nothing is under way: then it was made before it was due, while there was
        time, and costs nothing."""
        if self._pending:
            now = self._entered()
            self.clock.wait_until(now + self.profile.request_s)
            self._left = self.clock.now()
        return bool(self._pending)

    def start(self) -> Capacity:
        config = self.context.config
        block_size = config.block_size or DEFAULT_BLOCK_SIZE
        num_blocks = self.options.num_blocks or self._kv_tokens() // block_size
        if not num_blocks:
            raise UnsupportedError(
                f"executor simulated: step times {self.profile.name!r} don't say how large the KV pool was: set executor.num_blocks"
            )
        return Capacity(
            num_blocks=num_blocks,
            max_in_flight=self.options.max_in_flight or self.profile.max_in_flight or OVERLAPPED,
            layout=KVLayout((KVGroup((0,), None, 1),), block_size, "none"),
            vocab_size=self.options.vocab_size,
            max_model_len=config.max_model_len or num_blocks * block_size,
            details={"step times": self.profile.name},
        )

    def _kv_tokens(self) -> int:
        """Return how many tokens the pool has room for, as it was measured, or by the data sheet; 0 if neither says."""
        if self.profile.kv_tokens is None and isinstance(self._step_time, RooflineStepTime):
            return self._step_time.kv_tokens(self.context.config.gpu_memory_utilization)
        return self.profile.kv_tokens or 0

    def submit(self, batch: Batch) -> int:
        free = self._entered() - self._core_late_s
        if self._accepting_s:
            self.clock.wait_until(self._accepted())
            self._accepting_s = 0.0
        self._core_late_s = self.clock.now() - free
        for new in batch.added:
            self._begin(new)
        rows = batch.rows
        shape = StepShape.of(batch.num_tokens, self._computed[rows])
        self._computed[rows] += batch.num_tokens
        token_ids = self._answers[rows, np.minimum(self._position[rows], self._last[rows])]
        token_ids[~batch.yields_token] = -1
        self._position[rows] += batch.yields_token
        seconds = self.options.step_time_factor * self._step_time.seconds(shape)
        if not 0.0 < seconds < np.inf:
            raise DovetailError(f"step times {self.profile.name!r}: {seconds} seconds for {shape}; a step takes more than 0 and less than for ever")
        regime = self._rule.regime(shape)
        core_s = self.profile.planning_s(shape.rows, len(batch.added))
        if self.profile.core_spread is not None:
            core_s *= self.profile.core_spread.drawn(regime, chance(self.context.config.seed, batch.step, CORE_STREAM))
        launch_s = self.profile.launching_s(self._launch, shape, joins=bool(batch.added))
        if self.profile.launch_spread is not None:
            launch_s *= self.profile.launch_spread.drawn(regime, chance(self.context.config.seed, batch.step, LAUNCH_STREAM))
        self.plan_s += 0.1 * (core_s + launch_s - self.plan_s)
        results_s = self.profile.delivering_s(shape.rows)
        ready = self.clock.now() + core_s
        sampled = None if batch.late else -np.inf
        self._pending.append(_Pending(batch.step, token_ids, shape, ready, ready + launch_s, seconds, results_s, self._core_late_s, sampled))
        if launch_s:  # the core does nothing else meanwhile: it learns late of the step before
            self.clock.wait_until(ready + launch_s)
        self._left = self.clock.now()
        return batch.step

    def sample(self, handle: int, masks: Masks) -> None:
        """The core's grammars see the tokens of the step before, masks are filled, and sampling is handed over, while the device runs the model."""
        pending = self._oldest(handle)
        if pending.sampled is not None:
            raise DovetailError(f"executor simulated: step {handle} was to be sampled, and has been")
        count, options = len(masks.indices), self.options
        _apply(masks, pending.token_ids, options.vocab_size)
        filling_s = options.mask_row_s * -(-count // options.mask_cores)
        free = self._entered() - self._core_late_s
        pending.sampled = max(self._accepted(), pending.launched) + filling_s + options.late_sampling_s
        pending.masked, self._accepting_s = count, 0.0
        self.clock.wait_until(pending.sampled)
        self._left = self.clock.now()
        self._core_late_s = self._left - free

    def collect(self, handle: int) -> Result:
        pending = self._oldest(handle)
        if pending.sampled is None:
            raise DovetailError(f"executor simulated: step {handle} was asked for before it was sampled, which is late")
        self._pending.popleft()
        now = self._entered()
        started, seconds = self._computing(pending, 0.0, self._last_ended)
        if self.together is not None:
            started, seconds = self.together(started, seconds)
        waits = pending.sampled > started + seconds
        if waits:
            seconds = pending.sampled - started
        last_ended = started + seconds
        ended = self._seen(last_ended, now)
        self.clock.wait_until(ended + pending.results_s)
        self._left = self.clock.now()
        if pending.masked or pending.late_s or self._core_late_s or self._device_late_s or waits:
            free_core = now - self._core_late_s
            free = sum(self._computing(pending, pending.late_s, self._last_ended - self._device_late_s))
            self.masks_s += max(last_ended - free - self._device_late_s, 0.0)
            self._device_late_s = last_ended - free
            self._core_late_s = self._left - max(free_core, self._seen(free, free_core) + pending.results_s)
            self._accepting_s += pending.masked * self.options.accept_s
        self._last_ended = last_ended
        return Result(pending.step, pending.token_ids, ended - seconds, ended)

    def check(self) -> None:
        """Do nothing: there is no device to lose."""

    def stop(self) -> None:
        self._pending.clear()
        self._expected.clear()

    def _oldest(self, handle: int) -> _Pending:
        if not self._pending or self._pending[0].step != handle:
            raise DovetailError(f"executor simulated: step {handle} was asked for, and isn't the oldest of those submitted")
        return self._pending[0]

    def _entered(self) -> float:
        """Return the time. If the core has slept since it was here last, for lack of work or until it was due to plan, it isn't as late as it was."""
        now = self.clock.now()
        if now != self._left:
            if not self._pending:
                self._device_late_s = 0.0
            self._core_late_s = min(self._core_late_s, self._device_late_s)
        return now

    def _computing(self, pending: _Pending, earlier_s: float, last_ended: float) -> tuple[float, float]:
        """Return when the device, free since `last_ended`, begins with a step's model, and how long that occupies it, had the step been handed over
        so much earlier."""
        ready, launched, seconds = pending.ready - earlier_s, pending.launched - earlier_s, pending.seconds
        started = max(ready, last_ended)
        if self._launch is not None:
            seconds = self._rule.occupied_s(pending.shape, seconds, launched - started, launched - ready)
        return started, seconds

    def _seen(self, ended: float, now: float) -> float:
        """Return when a core that looks `now` sees the end of a step: a real executor sees it when it looks."""
        return ended if self._launch is None else max(ended, now)

    def _accepted(self) -> float:
        """Return when grammars have seen all tokens, if the core turns to that now."""
        return self.clock.now() + self._accepting_s

    def _begin(self, new: NewRow) -> None:
        answer = self._expected.get(new.request_id)
        if answer is None:
            answer = np.array([FILLER_ID], np.int32)
        if len(answer) > self._answers.shape[1]:
            more = len(answer) - self._answers.shape[1]
            self._answers = np.pad(self._answers, ((0, 0), (0, more)))
        self._answers[new.row, : len(answer)] = answer
        self._last[new.row] = len(answer) - 1
        self._position[new.row] = len(new.token_ids) - new.prompt_len
        self._computed[new.row] = new.computed


def _apply(masks: Masks, token_ids: NDArray[np.int64], vocab_size: int) -> None:
    """Replace those of the tokens [b] that their mask forbids by the next that it allows."""
    tokens = token_ids[masks.indices]
    bits = masks.words[np.arange(len(tokens)), tokens >> 5] >> (tokens & 31).astype(np.uint32) & np.uint32(1)
    for line in np.flatnonzero(bits == 0).tolist():
        token_ids[masks.indices[line]] = next_allowed(int(tokens[line]), masks.words[line], vocab_size)
