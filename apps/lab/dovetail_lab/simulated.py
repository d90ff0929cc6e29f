"""Executor `simulated`: runs the real engine, policy and KV-cache manager, but no model. A step
takes as long as a step-time model predicts, on a virtual clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from dovetail.api.clock import VirtualClock
from dovetail.api.executor import (
    AdapterRows,
    Batch,
    Capacity,
    Drafts,
    Executor,
    ExecutorCapabilities,
    ExecutorContext,
    Masks,
    NewRow,
    Pooled,
    PoolingCapacity,
    PoolingRows,
    Result,
)
from dovetail.api.kv_cache import KVLayout
from dovetail.api.kv_layout import PlannedLayout
from dovetail.api.kv_transfers import WORD
from dovetail.api.media import MediaCapacity, MediaRows
from dovetail.api.token_sizes import most_lines
from dovetail.errors import ConfigError, DovetailError, UnsupportedError
from dovetail.testing.fake_executor import next_allowed
from dovetail.testing.timed_transfers import TimedTransfers
from dovetail_lab.adapters import SimulatedAdapters
from dovetail_lab.cache_layout import layout_of, pool_tokens, windows_of
from dovetail_lab.grammars import SimulatedGrammars
from dovetail_lab.host_times import HOSTS, FrontEnd, HostTimes, host_times
from dovetail_lab.model_sizes import ModelSizes
from dovetail_lab.roofline import RooflineStepTime
from dovetail_lab.step_profile import StepTimeProfile, chance
from dovetail_lab.step_time import PiecewiseStepTime, Seconds, StepShape, Windows, ascending
from dovetail_lab.traces.request import stream_of

DEFAULT_BLOCK_SIZE = 16
OVERLAPPED = 2  # default number of steps in flight
# of random numbers
CORE_STREAM = 1
LAUNCH_STREAM = 2
# options that replace a profile's times of features
FEATURES = (
    "image_s",
    "image_row_s",
    "adapter_load_s",
    "adapter_step_s",
    "adapter_token_s",
    "pooled_s",
)
POOLING = PoolingCapacity(("embed",), "last", 1)
VECTOR = np.zeros(1, np.float32)  # what every prompt pools
FILLER = np.ones(1, np.int32)  # a request's answer if none was set


class SimulatedOptions(BaseModel):
    """Options of the executor `simulated`: the device to simulate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step_time: str | dict[str, Any] = Field(
        "a10g-llama-2-7b",
        description="A profile's .json file, the name of a shipped one, or an inline model: {kind: "
        "linear, base_s: 0.01, …}.",
    )
    engine: str | HostTimes | None = Field(
        None,
        description=f"The engine whose host times are added: {', '.join(HOSTS)}, or the times "
        "themselves. Those of its core only if the step times don't state them. Unset: none.",
    )
    step_time_factor: float = Field(
        1.0,
        gt=0,
        le=1e3,
        description="Multiplies the device time of every step, to test the effect of errors.",
    )
    num_pages: int | None = Field(
        None,
        ge=1,
        description="Pages in the KV pool. Unset: as in the measured engine; for a "
        "roofline, as many as fit on the device.",
    )
    model: str | dict[str, Any] | None = Field(
        None,
        description="A config.json, its folder, or its content: which layers have sliding windows, "
        "and release blocks. "
        "Unset: the roofline's model, or as in the measured engine.",
    )
    max_in_flight: int | None = Field(
        None,
        ge=1,
        le=8,
        description="Steps submitted before the oldest is collected; 1 if overlap is off. Unset: "
        "as measured, or 2.",
    )
    plans_late: bool | None = Field(
        None,
        description="False: plan each step as soon as another may be in flight, as other engines "
        "do. Unset: as `engine` does, or True.",
    )
    core_s: float | None = Field(
        None,
        ge=0,
        description="The core's time per step, hidden if it overlaps. Unset: the profile's.",
    )
    core_per_row_s: float | None = Field(
        None,
        ge=0,
        description="Additional core time per request in the step. Unset: the profile's.",
    )
    vocab_size: int = Field(32_000, ge=2, description="Size of the vocabulary.")
    compile_s: float = Field(
        2.5e-3, ge=0, allow_inf_nan=False, description="Median time to compile a grammar."
    )
    compile_sigma: float = Field(
        0.157,
        ge=0,
        le=10,
        description="Variation of compile_s: exp(compile_sigma z), z standard normal.",
    )
    mask_row_s: float = Field(
        1e-4,
        ge=0,
        allow_inf_nan=False,
        description="Time of a CPU core to fill a row's mask, with all cores busy.",
    )
    mask_cores: int = Field(16, ge=1, description="CPU cores that fill masks.")
    image_s: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="Time of a step for each image that it encodes. Unset: the profile's.",
    )
    image_row_s: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="Additional time for each row of these images. Unset: the profile's.",
    )
    adapter_read_s: float = Field(
        0.1,
        ge=0,
        allow_inf_nan=False,
        description="Time to read an adapter to the host, when a request first names it.",
    )
    adapter_load_s: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="Time of a step for each adapter that it loads to a slot. Unset: the "
        "profile's.",
    )
    adapter_step_s: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="Additional time of a step in which a request has an adapter. Unset: the "
        "profile's.",
    )
    adapter_token_s: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="Additional time for each token of such requests. Unset: the profile's.",
    )
    pooled_s: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="Time of a step for each prompt that it pools, besides computing it. Unset: "
        "the profile's.",
    )
    accept_s: float = Field(
        2.2e-6, ge=0, allow_inf_nan=False, description="Time to pass a token to a row's grammar."
    )
    acceptance: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(
        (0.8,),
        min_length=1,
        description="Probability that a draft of the drafter `simulated` is accepted if those "
        "before it are: a number, or a list by place in the "
        "step, the last of which holds for all further places. A request of the trace with "
        "`acceptance` has its own.",
    )
    line_costs: Annotated[tuple[tuple[int, Seconds], ...], AfterValidator(ascending)] = Field(
        (),
        description="(lines, seconds) by which the engine chooses how many drafts to check, "
        "however long such steps take. If all seconds are "
        "equal, it checks as many as it may. Unset: as the step times have them.",
    )
    draft_s: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="Device time of the drafter `simulated` for each draft of the row with most. "
        "Unset: the profile's.",
    )
    max_lines: int | None = Field(
        None,
        ge=1,
        description="Tokens that a step with drafts can sample. Unset: as executor `local`.",
    )
    transfer_gbps: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="10^9 bytes per second that are saved to host memory, and as many that are "
        "restored. Nothing is copied: every restore is right. Unset: no transfers.",
    )
    page_bytes: int | None = Field(
        None,
        ge=8,
        multiple_of=8,
        description="Bytes that a transfer copies for each page. Unset: as in the model's layout.",
    )
    late_sampling_s: float = Field(
        3.5e-4,
        ge=0,
        allow_inf_nan=False,
        description="Time to submit the sampling of a step with grammars.",
    )

    @field_validator("acceptance", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, int | float) else value


@dataclass(slots=True)
class _Pending:
    step: int
    token_ids: NDArray[np.int64]  # [rows], -1 for none; with drafts [lines]
    shape: StepShape
    ready: float  # when the core started to submit it
    launched: float  # when it had submitted it
    seconds: float  # computing time on the device
    results_s: float  # until they are delivered
    late_s: float  # delay of its submission by grammars
    # when its sampling was submitted, with masks; None: not yet; -inf if the step isn't late
    sampled: float | None
    rows: NDArray[np.int32]
    lines: NDArray[np.intp]  # index in the batch of the row of each line
    drafts: Drafts | None
    pooled: Pooled | None = None  # what rows pooled
    masked: int = 0  # number of lines with tokens to pass to grammars


class SimulatedExecutor(Executor):
    """Keeps the number of computed tokens and the answer of each row. Steps run one after the
    other, as soon as they are submitted."""

    capabilities = ExecutorCapabilities(virtual_clock=True, masks=True)
    options: SimulatedOptions

    def __init__(self, options: SimulatedOptions, context: ExecutorContext) -> None:
        super().__init__(options, context)
        if not isinstance(context.clock, VirtualClock):
            raise UnsupportedError(
                f"executor simulated needs a VirtualClock, got a {type(context.clock).__name__}"
            )
        self.clock = context.clock
        self.profile = StepTimeProfile.load(options.step_time)
        self.profile = self.profile.model_copy(update=_given(options, *FEATURES))
        self.host = None if options.engine is None else host_times(options.engine)
        if self.host is not None and not self.profile.states_core:
            self.profile = self.profile.model_copy(update=_core_of(self.host))
        self.front_end = FrontEnd() if self.host is None else self.host.front_end
        given = _given(options, "core_s", "core_per_row_s")
        if given:  # the measured variation doesn't apply to given times
            self.profile = self.profile.model_copy(update={**given, "core_spread": None})
        self._step_time, self._launch, self._rule = (
            self.profile.make(),
            self.profile.make_launch(),
            self.profile.rule,
        )
        # running mean of the time for planning and submitting, as in a real engine's core
        self.plan_s = 0.0
        seed = context.config.seed
        self.grammars = SimulatedGrammars(
            context.clock, options.vocab_size, options.compile_s, options.compile_sigma, seed
        )
        self.adapters = SimulatedAdapters(
            context.clock, options.adapter_read_s, context.config.max_num_seqs
        )
        self.masks_s = 0.0  # total delay of the device by grammars
        # sums over all steps
        self.device_s = 0.0
        self.device_rows = self.device_steps = 0
        # images that steps encoded, and by how long that prolonged them
        self.encoded_images = self.encoded_rows = 0
        self.encoding_s = 0.0
        self._accepting_s = 0.0  # core time still to be spent on passing tokens to grammars
        # current delays of core and device by grammars
        self._core_late_s = self._device_late_s = 0.0
        self._left = 0.0  # when the core last returned from here
        # for devices in lockstep: (ready, seconds) -> (start, seconds)
        self.together: Callable[[float, float], tuple[float, float]] | None = None
        self._expected: dict[str, tuple[NDArray[np.int32], tuple[float, ...]]] = {}
        self._pending: deque[_Pending] = deque()
        self._last_ended = -np.inf
        rows = context.config.max_num_seqs
        self._computed = np.zeros(rows, np.int64)
        self._position = np.zeros(rows, np.int64)  # of the next answer
        self._last = np.zeros(rows, np.int64)  # position of the last token of the answer
        self._answers = np.zeros((rows, 1), np.int64)
        self._streams: dict[int, int] = {}  # row -> the stream of random numbers for its drafts
        # row -> probability that a draft is accepted, by place
        self._odds: dict[int, tuple[float, ...]] = {}
        self._line_time = (
            PiecewiseStepTime(points=self.profile.line_costs) if self.profile.line_costs else None
        )
        self._windows: Windows = ()

    @property
    def plans_late(self) -> bool:
        """Whether the core plans as late as the device allows."""
        if self.options.plans_late is not None:
            return self.options.plans_late
        return self.host is None or self.host.plans_late

    def host_notes(self) -> Iterator[str]:
        """Yield a note if a roofline's steps take the device less than they take a host, which it
        doesn't include."""
        is_roofline = isinstance(self._step_time, RooflineStepTime)
        if not is_roofline or not self.device_steps or self._launch is not None:
            return
        if self.profile.core_s or self.profile.core_per_row_s:
            return
        device_s = self.device_s / self.device_steps
        rows = round(self.device_rows / self.device_steps)
        hosts = {name: host.core_seconds(rows) for name, host in HOSTS.items()}
        if longer := [f"{name} {1e3 * s:.2f} ms" for name, s in hosts.items() if s > device_s]:
            yield (
                f"a step takes the device {1e3 * device_s:.2f} ms on average, less than the host, "
                f"whose time isn't included: {', '.join(longer)}: set executor.engine"
            )

    def expect(
        self, request_id: str, answer: NDArray[np.int32], acceptance: float | None = None
    ) -> None:
        """Set a request's answer: ids [at least 1], the last of which is repeated as needed, and
        the probability that a simulated draft of it is accepted; None: as the options say. No other
        component sees them."""
        self._expected[request_id] = (
            answer,
            self.options.acceptance if acceptance is None else (acceptance,),
        )

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._expected.pop(request_id, None)

    def take_in(self) -> bool:
        """Advance the clock by the core's time for accepting a request. Returns False if nothing is
        in flight: then the request was created in advance, while the core was idle, and costs
        nothing."""
        if self._pending:
            now = self._entered()
            self.clock.wait_until(now + self.profile.request_s)
            self._left = self.clock.now()
        return bool(self._pending)

    def start(self) -> Capacity:
        config = self.context.config
        planned = self._planned_layout()
        layout = (
            layout_of(self.profile.cache_groups, self._block_size, config.max_model_len)
            if planned is None
            else planned.layout
        )
        drafts = config.max_drafts
        max_lines = self.options.max_lines or most_lines(
            config.max_num_seqs, drafts, config.max_num_batched_tokens
        )
        num_pages = self.options.num_pages or self._measured_pages(layout)
        self._windows = windows_of(layout)
        return Capacity(
            num_pages=num_pages,
            max_in_flight=self.options.max_in_flight or self.profile.max_in_flight or OVERLAPPED,
            layout=layout,
            vocab_size=self.options.vocab_size,
            max_model_len=config.max_model_len or pool_tokens(layout, num_pages),
            max_lines=max_lines if drafts else 0,
            line_costs=self._told_costs(max_lines) if drafts else (),
            draft_costs=self._told_draft_costs() if drafts else (),
            media=MediaCapacity(config.media_cache_rows, config.media_step_rows)
            if config.media_cache_rows
            else None,
            pooling=POOLING,
            adapters=SimulatedAdapters.capacity(config.max_adapters, config.max_adapter_rank),
            details={"step times": self.profile.name}
            | (
                {}
                if planned is None or len(layout.groups) == 1
                else {"kv_groups": planned.describe()}
            ),
        )

    @property
    def _block_size(self) -> int:
        return self.context.config.block_size or DEFAULT_BLOCK_SIZE

    def _planned_layout(self) -> PlannedLayout | None:
        """Return the layout of the model that the options or a roofline name; None if there is
        none. Raises `ConfigError` if both do, or if the step times were measured on other
        layers."""
        model = self.options.model
        roofline = self._step_time if isinstance(self._step_time, RooflineStepTime) else None
        if model is not None and (roofline is not None or self.profile.cache_groups):
            raise ConfigError(
                f"executor simulated: step times {self.profile.name!r} state their model's layers: "
                f"leave executor.model out"
            )
        sizes = (
            roofline.sizes
            if roofline is not None
            else None
            if model is None
            else ModelSizes.of(model)
        )
        if sizes is None:
            return None
        return sizes.cache_layout(
            self._block_size,
            2.0 if roofline is None else roofline.kv_bytes,
            self.context.config.max_model_len,
        )

    def _measured_pages(self, layout: KVLayout) -> int:
        """Return the number of pages in the pool, as measured, or by the data sheet. Raises
        `UnsupportedError` if neither is known."""
        if self.options.model is None and (
            measured := (self.profile.kv_tokens or 0) // self._block_size
        ):
            return measured
        if isinstance(self._step_time, RooflineStepTime):
            return self._step_time.num_pages(layout, self.context.config.gpu_memory_utilization)
        why = (
            "don't state the size of the KV pool"
            if self.options.model is None
            else "don't state the size of this model's KV pool"
        )
        raise UnsupportedError(
            f"executor simulated: step times {self.profile.name!r} {why}: set executor.num_pages"
        )

    def submit(self, batch: Batch) -> int:
        free = self._entered() - self._core_late_s
        if self._accepting_s:
            self.clock.wait_until(self._accepted())
            self._accepting_s = 0.0
        self._core_late_s = self.clock.now() - free
        for new in batch.added:
            self._begin(new)
            self.adapters.begin(new.row)
        rows = batch.rows
        new_tokens = batch.num_tokens
        context = self._computed[rows]
        drafts = batch.drafts
        if drafts is None:
            lines, token_ids = self._next_tokens(batch)
            self._computed[rows] = context + new_tokens
        else:
            lines = np.repeat(np.arange(len(rows)), batch.num_lines)
            # the device computes each line as a decode of its own; what is accepted is known when
            # the results are
            token_ids = self._answers_at(rows[lines], _ahead(batch.num_lines))
            repeats = 1 + drafts.counts
            new_tokens = np.repeat(np.where(drafts.counts > 0, 1, new_tokens), repeats).astype(
                np.int32
            )
            context = np.repeat(context, repeats) + _ahead(repeats)
            self._computed[rows] += np.where(drafts.counts > 0, 0, batch.num_tokens)
        shape, seconds = self._seconds(new_tokens, context)
        if drafts is not None and self._line_time is not None and not shape.prefill_rows:
            seconds += self._line_seconds(shape.tokens) - self._short_seconds(shape.tokens)
        if drafts is not None and (drafts.token_ids < 0).any():
            seconds += self._draft_s(len(rows)) * int(drafts.counts.max())
        seconds += self._features_s(batch)
        self.device_s += seconds
        self.device_rows += shape.rows
        self.device_steps += 1
        regime = self._rule.regime(shape)
        core_s = self.profile.planning_s(shape.rows, len(batch.added))
        if self.profile.core_spread is not None:
            core_s *= self.profile.core_spread.drawn(
                regime, chance(self.context.config.seed, batch.step, CORE_STREAM)
            )
        launch_s = self.profile.launching_s(self._launch, shape, joins=bool(batch.added))
        if self.profile.launch_spread is not None:
            launch_s *= self.profile.launch_spread.drawn(
                regime, chance(self.context.config.seed, batch.step, LAUNCH_STREAM)
            )
        self.plan_s += 0.1 * (core_s + launch_s - self.plan_s)
        results_s = self.profile.delivering_s(shape.rows)
        ready = self.clock.now() + core_s
        sampled = None if batch.late else -np.inf
        times = ready, ready + launch_s, seconds, results_s, self._core_late_s, sampled
        pending = _Pending(batch.step, token_ids, shape, *times, rows, lines, drafts)
        if (pooling := batch.part(PoolingRows)) is not None:
            pending.pooled = Pooled(dict.fromkeys(pooling.due.tolist(), VECTOR))
        self._pending.append(pending)
        if launch_s:  # the core is busy meanwhile, and sees the previous step's end late
            self.clock.wait_until(ready + launch_s)
        self._left = self.clock.now()
        return batch.step

    def _next_tokens(self, batch: Batch) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Return the rows of a batch without drafts that yield a token, by their index in it, and
        the tokens of all rows, -1 for none. Advances these rows."""
        rows = batch.rows
        lines = batch.yields_token.nonzero()[0]
        if len(lines) == len(rows):
            token_ids = self._answers_at(rows)
            self._position[rows] += 1
            return lines, token_ids
        token_ids = np.full(len(rows), -1, np.int64)
        token_ids[lines] = self._answers_at(rows[lines])
        self._position[rows[lines]] += 1
        return lines, token_ids

    def _answers_at(
        self, rows: NDArray[np.int32], ahead: NDArray[np.int64] | int = 0
    ) -> NDArray[np.int64]:
        """Return the tokens of the answers of `rows`, `ahead` of their next one."""
        at = np.minimum(self._position[rows] + ahead, self._last[rows])
        tokens: NDArray[np.int64] = self._answers[rows, at]
        return tokens

    def sample(self, handle: int, masks: Masks) -> None:
        """Pass the previous step's tokens to grammars, fill masks, and submit sampling, while the
        device runs the model."""
        pending = self._oldest(handle)
        if pending.sampled is not None:
            raise DovetailError(f"executor simulated: step {handle} has been sampled already")
        count = len(masks.lines)
        options = self.options
        places = slice(None) if pending.drafts is not None else pending.lines
        pending.token_ids[places] = _allowed(masks, pending.token_ids[places], options.vocab_size)
        filling_s = options.mask_row_s * -(-count // options.mask_cores)
        free = self._entered() - self._core_late_s
        pending.sampled = (
            max(self._accepted(), pending.launched) + filling_s + options.late_sampling_s
        )
        pending.masked = count
        self._accepting_s = 0.0
        self.clock.wait_until(pending.sampled)
        self._left = self.clock.now()
        self._core_late_s = self._left - free

    def collect(self, handle: int) -> Result:
        pending = self._oldest(handle)
        if pending.sampled is None:
            raise DovetailError(
                f"executor simulated: step {handle} is late, and was collected before it was "
                f"sampled"
            )
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
        is_late = pending.late_s or self._core_late_s or self._device_late_s
        if pending.masked or is_late or waits:
            free_core = now - self._core_late_s
            free = sum(
                self._computing(pending, pending.late_s, self._last_ended - self._device_late_s)
            )
            self.masks_s += max(last_ended - free - self._device_late_s, 0.0)
            self._device_late_s = last_ended - free
            self._core_late_s = self._left - max(
                free_core, self._seen(free, free_core) + pending.results_s
            )
            self._accepting_s += pending.masked * self.options.accept_s
        self._last_ended = last_ended
        token_ids, counts = self._yielded(pending)
        parts = () if pending.pooled is None else (pending.pooled,)
        return Result(pending.step, token_ids, ended - seconds, ended, counts=counts, parts=parts)

    def transfers(self) -> TimedTransfers | None:
        """Raises `ConfigError` if the size of a page is unknown."""
        rate = self.options.transfer_gbps
        if rate is None:
            return None
        size = self.options.page_bytes
        planned = self._planned_layout()
        if size is None and planned is not None:
            size = -(-planned.layout.page_bytes // WORD) * WORD
        if size is None:
            raise ConfigError(
                f"executor simulated: step times {self.profile.name!r} don't state the size of a "
                f"page: set executor.page_bytes"
            )
        return TimedTransfers(self.clock, "simulated", size, 1e9 * rate)

    def check(self) -> None:
        """No-op: there is no device to lose."""

    def stop(self) -> None:
        self._pending.clear()
        self._expected.clear()

    def _seconds(
        self, new_tokens: NDArray[np.int32] | NDArray[np.int64], context: NDArray[np.int64]
    ) -> tuple[StepShape, float]:
        """Return the shape of a step, and its time on the device. Raises `DovetailError` for an
        impossible time."""
        shape = StepShape.of(new_tokens, context, self._windows)
        seconds = self.options.step_time_factor * self._step_time.seconds(shape)
        if not 0.0 < seconds < np.inf:
            raise DovetailError(
                f"step times {self.profile.name!r}: step time must be positive and finite, got "
                f"{seconds} for {shape}"
            )
        return shape, seconds

    def _features_s(self, batch: Batch) -> float:
        """Return by how long images, adapters and pooling prolong a step."""
        seconds = 0.0
        if (images := batch.part(MediaRows)) is not None:
            seconds += self._encoding_s(images)
        if self.context.config.max_adapters:
            factor = self.options.step_time_factor
            costs = self.profile.adapter_costs(factor)
            part = batch.part(AdapterRows)
            seconds += self.adapters.step_seconds(part, costs, batch.rows, batch.num_tokens)
        if (pooling := batch.part(PoolingRows)) is not None:
            seconds += self.options.step_time_factor * self.profile.pooled_s * len(pooling.due)
        return seconds

    def _encoding_s(self, images: MediaRows) -> float:
        """Return the time of a step for the images that it encodes, and count them."""
        count = len(images.encode)
        rows = sum(one.item.rows for one in images.encode)
        seconds = self.options.step_time_factor * self.profile.encoding_s(count, rows)
        self.encoded_images += count
        self.encoded_rows += rows
        self.encoding_s += seconds
        return seconds

    def _short_seconds(self, lines: int) -> float:
        """Return the time of a step of as many decodes without context, by the model of step
        times."""
        return self._seconds(np.ones(lines, np.int64), np.zeros(lines, np.int64))[1]

    def _line_seconds(self, lines: int) -> float:
        """Return the measured time of a step of `lines` lines with short contexts; by the model if
        there is none."""
        if self._line_time is None:
            return self._short_seconds(lines)
        return self.options.step_time_factor * self._line_time.seconds(
            StepShape(lines, lines, 0, 0, lines, 0)
        )

    def _told_costs(self, max_lines: int) -> tuple[tuple[int, float], ...]:
        """Return `Capacity.line_costs`."""
        return self.options.line_costs or tuple(
            (lines, self._line_seconds(lines)) for lines in _sizes(max_lines)
        )

    def _draft_s(self, rows: int) -> float:
        """Return the device time of a draft of each of `rows` rows."""
        if self.options.draft_s is not None or not self.profile.draft_costs:
            return self.options.step_time_factor * (self.options.draft_s or 0.0)
        model = PiecewiseStepTime(points=self.profile.draft_costs)
        return self.options.step_time_factor * model.seconds(StepShape(rows, rows, 0, 0, rows, 0))

    def _told_draft_costs(self) -> tuple[tuple[int, float], ...]:
        """Return `Capacity.draft_costs`; none if drafts are free."""
        rows = [count for count, _ in self.profile.draft_costs]
        if self.options.draft_s is not None:
            rows = [1, self.context.config.max_num_seqs]
        costs = tuple((count, self._draft_s(count)) for count in sorted({*rows}))
        return costs if any(seconds for _, seconds in costs) else ()

    def _yielded(self, pending: _Pending) -> tuple[NDArray[np.int64], NDArray[np.int32] | None]:
        """Return the tokens of a step, and how many each row yields if it has drafts, whose rows
        advance now."""
        if pending.drafts is None:
            return pending.token_ids, None
        tokens = iter(pending.token_ids.tolist())
        ids = iter(pending.drafts.token_ids.tolist())
        lines = np.bincount(pending.lines, minlength=len(pending.rows)).tolist()
        yielded: list[int] = []
        counts: list[int] = []
        for row, drafts, num_lines in zip(
            pending.rows.tolist(), pending.drafts.counts.tolist(), lines, strict=True
        ):
            of_row = [next(tokens) for _ in range(num_lines)]
            guesses = [next(ids) for _ in range(drafts)]
            accepted = next(
                (
                    place
                    for place, guess in enumerate(guesses)
                    if not self._accepts(row, place, guess, of_row[place])
                ),
                drafts,
            )
            kept = of_row[: 1 + accepted]
            yielded += kept
            counts.append(len(kept))
            self._position[row] += len(kept)
            self._computed[row] += len(kept) if drafts else 0
        return np.array(yielded, np.int64), np.array(counts, np.int32)

    def _accepts(self, row: int, place: int, draft: int, token: int) -> bool:
        """Return True if a draft is right: by chance if it is the simulated drafter's, which
        depends on its position in the answer."""
        if draft >= 0:
            return draft == token
        odds = self._odds[row]
        return (
            chance(self.context.config.seed, int(self._position[row]) + place, self._streams[row])
            < odds[min(place, len(odds) - 1)]
        )

    def _oldest(self, handle: int) -> _Pending:
        if not self._pending or self._pending[0].step != handle:
            raise DovetailError(
                f"executor simulated: step {handle} was collected, but isn't the oldest one "
                f"submitted"
            )
        return self._pending[0]

    def _entered(self) -> float:
        """Return the time. If the core has slept since the last call, for lack of work or until
        planning was due, reduce its delay."""
        now = self.clock.now()
        if now != self._left:
            if not self._pending:
                self._device_late_s = 0.0
            self._core_late_s = min(self._core_late_s, self._device_late_s)
        return now

    def _computing(
        self, pending: _Pending, earlier_s: float, last_ended: float
    ) -> tuple[float, float]:
        """Return when the device, free since `last_ended`, starts a step's model, and how long that
        occupies it, had the step been submitted `earlier_s` earlier."""
        ready = pending.ready - earlier_s
        launched = pending.launched - earlier_s
        seconds = pending.seconds
        started = max(ready, last_ended)
        if self._launch is not None:
            seconds = self._rule.occupied_s(
                pending.shape, seconds, launched - started, launched - ready
            )
        return started, seconds

    def _seen(self, ended: float, now: float) -> float:
        """Return when a core that polls `now` sees the end of a step: a real executor sees it on
        polling."""
        return ended if self._launch is None else max(ended, now)

    def _accepted(self) -> float:
        """Return when all tokens have been passed to grammars, if the core starts now."""
        return self.clock.now() + self._accepting_s

    def _begin(self, new: NewRow) -> None:
        answer, self._odds[new.row] = self._expected.get(
            new.request_id, (FILLER, self.options.acceptance)
        )
        if len(answer) > self._answers.shape[1]:
            more = len(answer) - self._answers.shape[1]
            self._answers = np.pad(self._answers, ((0, 0), (0, more)))
        self._answers[new.row, : len(answer)] = answer
        self._last[new.row] = len(answer) - 1
        self._position[new.row] = len(new.token_ids) - new.prompt_len
        self._computed[new.row] = new.computed
        self._streams[new.row] = stream_of("drafts", self.context.config.seed, new.request_id)


def _core_of(host: HostTimes) -> dict[str, Any]:
    """Return the fields of a profile that are the core's times."""
    return {
        "launch": host.launch.model_dump(),
        "joining_s": host.joining_s,
        "max_in_flight": host.max_in_flight,
    }


def _given(options: SimulatedOptions, *names: str) -> dict[str, float]:
    """Return the options of these names that are set."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def _ahead(counts: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return 0, 1, … for each of `counts`, one after the other."""
    return np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(
        np.cumsum(counts) - counts, counts
    )


def _sizes(most: int) -> list[int]:
    """Return powers of two below `most`, and `most`."""
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


def _allowed(masks: Masks, tokens: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    """Return the tokens of all lines; the next allowed id for one that its mask forbids."""
    allowed = tokens.copy()
    masked = tokens[masks.lines]
    bits = masks.words[np.arange(len(masked)), masked >> 5] >> (masked & 31).astype(
        np.uint32
    ) & np.uint32(1)
    for index in np.flatnonzero(bits == 0).tolist():
        allowed[masks.lines[index]] = next_allowed(
            int(masked[index]), masks.words[index], vocab_size
        )
    return allowed
