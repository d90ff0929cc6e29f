"""Executor `simulated`: runs the real engine, policy and KV-cache manager, but no model. A step
takes as long as a step-time model predicts, on a virtual clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.api.clock import VirtualClock
from dovetail.api.executor import (
    Batch,
    Capacity,
    Drafts,
    Executor,
    ExecutorCapabilities,
    ExecutorContext,
    Masks,
    Pooled,
    PoolingCapacity,
    PoolingRows,
    Result,
)
from dovetail.api.media import MediaCapacity
from dovetail.api.token_sizes import most_lines
from dovetail.errors import DovetailError, UnsupportedError
from dovetail.testing.timed_transfers import TimedTransfers
from dovetail_lab.adapters import SimulatedAdapters
from dovetail_lab.cache_layout import pool_tokens, windows_of
from dovetail_lab.grammars import SimulatedGrammars
from dovetail_lab.simulated_device import SimulatedDevice
from dovetail_lab.simulated_host import SimulatedHost
from dovetail_lab.simulated_options import SimulatedOptions
from dovetail_lab.simulated_pool import SimulatedPool
from dovetail_lab.simulated_rows import SimulatedRows, allowed
from dovetail_lab.step_time import StepShape

OVERLAPPED = 2  # default number of steps in flight
POOLING = PoolingCapacity(("embed",), "last", 1)
VECTOR = np.zeros(1, np.float32)  # what every prompt pools


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
    """The timeline of core and device: steps run one after the other, as soon as they are
    submitted. What a step yields, and how long it takes, is up to its parts."""

    capabilities = ExecutorCapabilities(virtual_clock=True, masks=True)
    options: SimulatedOptions

    def __init__(self, options: SimulatedOptions, context: ExecutorContext) -> None:
        super().__init__(options, context)
        if not isinstance(context.clock, VirtualClock):
            raise UnsupportedError(
                f"executor simulated needs a VirtualClock, got a {type(context.clock).__name__}"
            )
        self.clock = context.clock
        config = context.config
        self.profile = options.profile()
        self.adapters = SimulatedAdapters(
            context.clock, options.adapter_read_s, config.max_num_seqs
        )
        self.device = SimulatedDevice(options, self.profile, config, self.adapters)
        self.host = SimulatedHost(options, self.profile, config.seed)
        self.grammars = SimulatedGrammars(
            context.clock,
            options.vocab_size,
            options.compile_s,
            options.compile_sigma,
            config.seed,
        )
        self.rows = SimulatedRows(config.max_num_seqs, config.seed, options.acceptance)
        self.pool = SimulatedPool(options, self.profile, self.device.model, config)
        # running mean of the time for planning and submitting, as in a real engine's core
        self.plan_s = 0.0
        self.masks_s = 0.0  # total delay of the device by grammars
        self._accepting_s = 0.0  # core time still to be spent on passing tokens to grammars
        # current delays of core and device by grammars
        self._core_late_s = 0.0
        self._device_late_s = 0.0
        self._left = 0.0  # when the core last returned from here
        # for devices in lockstep: (ready, seconds) -> (start, seconds)
        self.together: Callable[[float, float], tuple[float, float]] | None = None
        self._pending: deque[_Pending] = deque()
        self._last_ended = -np.inf

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
        pool = self.pool
        layout = pool.layout
        drafts = config.max_drafts
        max_lines = self.options.max_lines or most_lines(
            config.max_num_seqs, drafts, config.max_num_batched_tokens
        )
        num_pages = pool.num_pages
        self.device.windows = windows_of(layout)
        return Capacity(
            num_pages=num_pages,
            max_in_flight=self.options.max_in_flight or self.profile.max_in_flight or OVERLAPPED,
            layout=layout,
            vocab_size=self.options.vocab_size,
            max_model_len=config.max_model_len or pool_tokens(layout, num_pages),
            max_lines=max_lines if drafts else 0,
            line_costs=self.device.line_costs(max_lines) if drafts else (),
            draft_costs=self.device.draft_costs() if drafts else (),
            media=MediaCapacity(config.media_cache_rows, config.media_step_rows)
            if config.media_cache_rows
            else None,
            pooling=POOLING,
            adapters=SimulatedAdapters.capacity(config.max_adapters, config.max_adapter_rank),
            details={"step times": self.profile.name, **pool.details},
        )

    def submit(self, batch: Batch) -> int:
        free = self._entered() - self._core_late_s
        if self._accepting_s:
            self.clock.wait_until(self._accepted())
            self._accepting_s = 0.0
        self._core_late_s = self.clock.now() - free
        for new in batch.added:
            self.rows.begin(new)
            self.adapters.begin(new.row)
        work = self.rows.advance(batch)
        shape, seconds = self.device.step(batch, work)
        core_s, launch_s = self.host.submitting(batch.step, shape, len(batch.added))
        self.plan_s += 0.1 * (core_s + launch_s - self.plan_s)
        ready = self.clock.now() + core_s
        pending = _Pending(
            batch.step,
            work.token_ids,
            shape,
            ready,
            ready + launch_s,
            seconds,
            self.profile.delivering_s(shape.rows),
            self._core_late_s,
            None if batch.late else -np.inf,
            batch.rows,
            work.lines,
            batch.drafts,
        )
        if (pooling := batch.part(PoolingRows)) is not None:
            pending.pooled = Pooled(dict.fromkeys(pooling.due.tolist(), VECTOR))
        self._pending.append(pending)
        if launch_s:  # the core is busy meanwhile, and sees the previous step's end late
            self.clock.wait_until(ready + launch_s)
        self._left = self.clock.now()
        return batch.step

    def sample(self, handle: int, masks: Masks) -> None:
        """Pass the previous step's tokens to grammars, fill masks, and submit sampling, while the
        device runs the model."""
        pending = self._oldest(handle)
        if pending.sampled is not None:
            raise DovetailError(f"executor simulated: step {handle} has been sampled already")
        count = len(masks.lines)
        options = self.options
        places = slice(None) if pending.drafts is not None else pending.lines
        pending.token_ids[places] = allowed(masks, pending.token_ids[places], options.vocab_size)
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
        token_ids, counts = pending.token_ids, None
        if pending.drafts is not None:
            token_ids, counts = self.rows.yielded(
                pending.rows, pending.lines, token_ids, pending.drafts
            )
        parts = () if pending.pooled is None else (pending.pooled,)
        return Result(pending.step, token_ids, ended - seconds, ended, counts=counts, parts=parts)

    def transfers(self) -> TimedTransfers | None:
        """Raises `ConfigError` if the size of a page is unknown."""
        rate = self.options.transfer_gbps
        if rate is None:
            return None
        return TimedTransfers(self.clock, "simulated", self.pool.page_bytes, 1e9 * rate)

    def check(self) -> None:
        """No-op: there is no device to lose."""

    def stop(self) -> None:
        self._pending.clear()
        self.rows.clear()

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
        started = max(ready, last_ended)
        seconds = self.host.occupied_s(
            pending.shape, pending.seconds, launched - started, launched - ready
        )
        return started, seconds

    def _seen(self, ended: float, now: float) -> float:
        """Return when a core that polls `now` sees the end of a step: a real executor sees it on
        polling."""
        return max(ended, now) if self.host.polls else ended

    def _accepted(self) -> float:
        """Return when all tokens have been passed to grammars, if the core starts now."""
        return self.clock.now() + self._accepting_s
