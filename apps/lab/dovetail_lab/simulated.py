"""Executor `simulated`: runs the real engine, policy and KV-cache manager, but no model. A step takes as long as a step-time model predicts, on a
virtual clock."""

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
from dovetail.api.kv_cache import KVLayout
from dovetail.errors import ConfigError, DovetailError, UnsupportedError
from dovetail.kv_layout import PlannedLayout
from dovetail.testing.fake_executor import next_allowed
from dovetail_lab.cache_layout import layout_of, pool_tokens, windows_of
from dovetail_lab.grammars import SimulatedGrammars
from dovetail_lab.model_sizes import ModelSizes
from dovetail_lab.roofline import RooflineStepTime
from dovetail_lab.step_profile import StepTimeProfile, chance
from dovetail_lab.step_time import StepShape, Windows

DEFAULT_BLOCK_SIZE = 16
OVERLAPPED = 2  # default number of steps in flight
CORE_STREAM, LAUNCH_STREAM = 1, 2  # of random numbers
FILLER_ID = 1  # token id that a request repeats if no answer was set


class SimulatedOptions(BaseModel):
    """Options of the executor `simulated`: the device to simulate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step_time: str | dict[str, Any] = Field(
        "a10g-llama-2-7b", description="A profile's .json file, the name of a shipped one, or an inline model: {kind: linear, base_s: 0.01, …}."
    )
    step_time_factor: float = Field(1.0, gt=0, le=1e3, description="Multiplies the device time of every step, to test the effect of errors.")
    num_blocks: int | None = Field(
        None,
        ge=1,
        description="Blocks (pages) in the KV pool. Unset: as in the measured engine; for a roofline, as many as fit on the device.",
    )
    model: str | dict[str, Any] | None = Field(
        None,
        description="A config.json, its folder, or its content: which layers have sliding windows, and release blocks. "
        "Unset: the roofline's model, or as in the measured engine.",
    )
    max_in_flight: int | None = Field(
        None, ge=1, le=8, description="Steps submitted before the oldest is collected; 1 if overlap is off. Unset: as measured, or 2."
    )
    plans_late: bool = Field(True, description="False: plan each step as soon as another may be in flight, as other engines do.")
    core_s: float | None = Field(None, ge=0, description="The core's time per step, hidden if it overlaps. Unset: the profile's.")
    core_per_row_s: float | None = Field(None, ge=0, description="Additional core time per request in the step. Unset: the profile's.")
    vocab_size: int = Field(32_000, ge=2, description="Size of the vocabulary.")
    compile_s: float = Field(2.5e-3, ge=0, allow_inf_nan=False, description="Median time to compile a grammar.")
    compile_sigma: float = Field(0.157, ge=0, le=10, description="Variation of compile_s: exp(compile_sigma z), z standard normal.")
    mask_row_s: float = Field(1e-4, ge=0, allow_inf_nan=False, description="Time of a CPU core to fill a row's mask, with all cores busy.")
    mask_cores: int = Field(16, ge=1, description="CPU cores that fill masks.")
    accept_s: float = Field(2.2e-6, ge=0, allow_inf_nan=False, description="Time to pass a token to a row's grammar.")
    late_sampling_s: float = Field(3.5e-4, ge=0, allow_inf_nan=False, description="Time to submit the sampling of a step with grammars.")


@dataclass(slots=True)
class _Pending:
    step: int
    token_ids: NDArray[np.int64]
    shape: StepShape
    ready: float  # when the core started to submit it
    launched: float  # when it had submitted it
    seconds: float  # computing time on the device
    results_s: float  # until they are delivered
    late_s: float  # delay of its submission by grammars
    sampled: float | None  # when its sampling was submitted, with masks; None: not yet; -inf if the step isn't late
    masked: int = 0  # number of rows with tokens to pass to grammars


class SimulatedExecutor(Executor):
    """Keeps the number of computed tokens and the answer of each row. Steps run one after the other, as soon as they are submitted."""

    capabilities = ExecutorCapabilities(virtual_clock=True, logprobs=False, masks=True, samples=False)
    options: SimulatedOptions

    def __init__(self, options: SimulatedOptions, context: ExecutorContext) -> None:
        super().__init__(options, context)
        if not isinstance(context.clock, VirtualClock):
            raise UnsupportedError(f"executor simulated needs a VirtualClock, got a {type(context.clock).__name__}")
        self.clock = context.clock
        self.profile = StepTimeProfile.load(options.step_time)
        given = {name: value for name in ("core_s", "core_per_row_s") if (value := getattr(options, name)) is not None}
        if given:  # the measured variation doesn't apply to given times
            self.profile = self.profile.model_copy(update={**given, "core_spread": None})
        self._step_time, self._launch, self._rule = self.profile.make(), self.profile.make_launch(), self.profile.rule
        self.plan_s = 0.0  # running mean of the time for planning and submitting, as in a real engine's core
        seed = context.config.seed
        self.grammars = SimulatedGrammars(context.clock, options.vocab_size, options.compile_s, options.compile_sigma, seed)
        self.masks_s = 0.0  # total delay of the device by grammars
        self._accepting_s = 0.0  # core time still to be spent on passing tokens to grammars
        self._core_late_s = self._device_late_s = 0.0  # current delays of core and device by grammars
        self._left = 0.0  # when the core last returned from here
        self.together: Callable[[float, float], tuple[float, float]] | None = None  # for devices in lockstep: (ready, seconds) -> (start, seconds)
        self._expected: dict[str, NDArray[np.int32]] = {}
        self._pending: deque[_Pending] = deque()
        self._last_ended = -np.inf
        rows = context.config.max_num_seqs
        self._computed = np.zeros(rows, np.int64)
        self._position = np.zeros(rows, np.int64)  # of the next answer
        self._last = np.zeros(rows, np.int64)  # position of the last token of the answer
        self._answers = np.zeros((rows, 1), np.int64)
        self._windows: Windows = ()

    def expect(self, request_id: str, answer: NDArray[np.int32]) -> None:
        """Set a request's answer: ids [at least 1], the last of which is repeated as needed. No other component sees it."""
        self._expected[request_id] = answer

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._expected.pop(request_id, None)

    def take_in(self) -> bool:
        """Advance the clock by the core's time for accepting a request. Returns False if nothing is in flight: then the request was created in
        advance, while the core was idle, and costs nothing."""
        if self._pending:
            now = self._entered()
            self.clock.wait_until(now + self.profile.request_s)
            self._left = self.clock.now()
        return bool(self._pending)

    def start(self) -> Capacity:
        config = self.context.config
        planned = self._planned_layout()
        layout = layout_of(self.profile.cache_groups, self._block_size, config.max_model_len) if planned is None else planned.layout
        num_pages = self.options.num_blocks or self._measured_pages(layout)
        self._windows = windows_of(layout)
        return Capacity(
            num_pages=num_pages,
            max_in_flight=self.options.max_in_flight or self.profile.max_in_flight or OVERLAPPED,
            layout=layout,
            vocab_size=self.options.vocab_size,
            max_model_len=config.max_model_len or pool_tokens(layout, num_pages),
            details={"step times": self.profile.name} | ({} if planned is None or len(layout.groups) == 1 else {"kv_groups": planned.describe()}),
        )

    @property
    def _block_size(self) -> int:
        return self.context.config.block_size or DEFAULT_BLOCK_SIZE

    def _planned_layout(self) -> PlannedLayout | None:
        """Return the layout of the model that the options or a roofline name; None if there is none. Raises `ConfigError` if both do, or if the step
        times were measured on other layers."""
        model, roofline = self.options.model, self._step_time if isinstance(self._step_time, RooflineStepTime) else None
        if model is not None and (roofline is not None or self.profile.cache_groups):
            raise ConfigError(f"executor simulated: step times {self.profile.name!r} state their model's layers: leave executor.model out")
        sizes = roofline.sizes if roofline is not None else None if model is None else ModelSizes.of(model)
        if sizes is None:
            return None
        return sizes.cache_layout(self._block_size, 2.0 if roofline is None else roofline.kv_bytes, self.context.config.max_model_len)

    def _measured_pages(self, layout: KVLayout) -> int:
        """Return the number of pages in the pool, as measured, or by the data sheet. Raises `UnsupportedError` if neither is known."""
        if self.options.model is None and (measured := (self.profile.kv_tokens or 0) // self._block_size):
            return measured
        if isinstance(self._step_time, RooflineStepTime):
            return self._step_time.num_pages(layout, self.context.config.gpu_memory_utilization)
        why = "don't state the size of the KV pool" if self.options.model is None else "don't state the size of this model's KV pool"
        raise UnsupportedError(f"executor simulated: step times {self.profile.name!r} {why}: set executor.num_blocks")

    def submit(self, batch: Batch) -> int:
        free = self._entered() - self._core_late_s
        if self._accepting_s:
            self.clock.wait_until(self._accepted())
            self._accepting_s = 0.0
        self._core_late_s = self.clock.now() - free
        for new in batch.added:
            self._begin(new)
        rows = batch.rows
        shape = StepShape.of(batch.num_tokens, self._computed[rows], self._windows)
        self._computed[rows] += batch.num_tokens
        token_ids = self._answers[rows, np.minimum(self._position[rows], self._last[rows])]
        token_ids[~batch.yields_token] = -1
        self._position[rows] += batch.yields_token
        seconds = self.options.step_time_factor * self._step_time.seconds(shape)
        if not 0.0 < seconds < np.inf:
            raise DovetailError(f"step times {self.profile.name!r}: step time must be positive and finite, got {seconds} for {shape}")
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
        if launch_s:  # the core is busy meanwhile, and sees the previous step's end late
            self.clock.wait_until(ready + launch_s)
        self._left = self.clock.now()
        return batch.step

    def sample(self, handle: int, masks: Masks) -> None:
        """Pass the previous step's tokens to grammars, fill masks, and submit sampling, while the device runs the model."""
        pending = self._oldest(handle)
        if pending.sampled is not None:
            raise DovetailError(f"executor simulated: step {handle} has been sampled already")
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
            raise DovetailError(f"executor simulated: step {handle} is late, and was collected before it was sampled")
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
        """No-op: there is no device to lose."""

    def stop(self) -> None:
        self._pending.clear()
        self._expected.clear()

    def _oldest(self, handle: int) -> _Pending:
        if not self._pending or self._pending[0].step != handle:
            raise DovetailError(f"executor simulated: step {handle} was collected, but isn't the oldest one submitted")
        return self._pending[0]

    def _entered(self) -> float:
        """Return the time. If the core has slept since the last call, for lack of work or until planning was due, reduce its delay."""
        now = self.clock.now()
        if now != self._left:
            if not self._pending:
                self._device_late_s = 0.0
            self._core_late_s = min(self._core_late_s, self._device_late_s)
        return now

    def _computing(self, pending: _Pending, earlier_s: float, last_ended: float) -> tuple[float, float]:
        """Return when the device, free since `last_ended`, starts a step's model, and how long that occupies it, had the step been submitted
        `earlier_s` earlier."""
        ready, launched, seconds = pending.ready - earlier_s, pending.launched - earlier_s, pending.seconds
        started = max(ready, last_ended)
        if self._launch is not None:
            seconds = self._rule.occupied_s(pending.shape, seconds, launched - started, launched - ready)
        return started, seconds

    def _seen(self, ended: float, now: float) -> float:
        """Return when a core that polls `now` sees the end of a step: a real executor sees it on polling."""
        return ended if self._launch is None else max(ended, now)

    def _accepted(self) -> float:
        """Return when all tokens have been passed to grammars, if the core starts now."""
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
    """Replace tokens [b] that are forbidden by their mask with the next allowed ids."""
    tokens = token_ids[masks.indices]
    bits = masks.words[np.arange(len(tokens)), tokens >> 5] >> (tokens & 31).astype(np.uint32) & np.uint32(1)
    for line in np.flatnonzero(bits == 0).tolist():
        token_ids[masks.indices[line]] = next_allowed(int(tokens[line]), masks.words[line], vocab_size)
