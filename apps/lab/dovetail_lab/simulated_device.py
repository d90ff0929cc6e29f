"""Time that a step of the executor `simulated` occupies the device: its tokens, by the step-time
model, and what drafts, images, adapters and pooling add."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dovetail.api.executor import AdapterRows, Batch, Drafts, ExecutorConfig, PoolingRows
from dovetail.api.media import MediaRows
from dovetail.errors import DovetailError
from dovetail_lab.adapters import SimulatedAdapters
from dovetail_lab.simulated_options import SimulatedOptions
from dovetail_lab.simulated_rows import StepWork
from dovetail_lab.step_profile import StepTimeProfile
from dovetail_lab.step_time import PiecewiseStepTime, StepShape, Windows


class SimulatedDevice:
    """The device's times, with sums over all steps."""

    def __init__(
        self,
        options: SimulatedOptions,
        profile: StepTimeProfile,
        config: ExecutorConfig,
        adapters: SimulatedAdapters,
    ) -> None:
        """Raises `ConfigError` if the profile's step-time model is invalid."""
        self.model = profile.make()
        self.windows: Windows = ()  # of the model's layers, set when these are known
        self.seconds = 0.0
        self.rows = 0
        self.steps = 0
        # images that steps encoded, and by how long that prolonged them
        self.encoded_images = 0
        self.encoded_rows = 0
        self.encoding_s = 0.0
        self._profile = profile
        self._options = options
        self._config = config
        self._adapters = adapters
        self._factor = options.step_time_factor
        self._line_time = (
            PiecewiseStepTime(points=profile.line_costs) if profile.line_costs else None
        )

    def step(self, batch: Batch, work: StepWork) -> tuple[StepShape, float]:
        """Return the shape of a step, and its time on the device; count it. Raises `DovetailError`
        for an impossible time."""
        shape, seconds = self._seconds(work.new_tokens, work.context)
        if batch.drafts is not None:
            seconds = self._with_drafts(seconds, shape, batch.drafts, len(batch.rows))
        seconds += self._features_s(batch)
        self.seconds += seconds
        self.rows += shape.rows
        self.steps += 1
        return shape, seconds

    def line_costs(self, max_lines: int) -> tuple[tuple[int, float], ...]:
        """Return `Capacity.line_costs`."""
        return self._options.line_costs or tuple(
            (lines, self._line_seconds(lines)) for lines in _sizes(max_lines)
        )

    def draft_costs(self) -> tuple[tuple[int, float], ...]:
        """Return `Capacity.draft_costs`; none if drafts are free."""
        rows = [count for count, _ in self._profile.draft_costs]
        if self._options.draft_s is not None:
            rows = [1, self._config.max_num_seqs]
        costs = tuple((count, self._draft_s(count)) for count in sorted({*rows}))
        return costs if any(seconds for _, seconds in costs) else ()

    def _seconds(
        self, new_tokens: NDArray[np.int32] | NDArray[np.int64], context: NDArray[np.int64]
    ) -> tuple[StepShape, float]:
        """Return the shape of a step, and its time by the model of step times. Raises
        `DovetailError` for an impossible time."""
        shape = StepShape.of(new_tokens, context, self.windows)
        seconds = self._factor * self.model.seconds(shape)
        if not 0.0 < seconds < np.inf:
            raise DovetailError(
                f"step times {self._profile.name!r}: step time must be positive and finite, got "
                f"{seconds} for {shape}"
            )
        return shape, seconds

    def _with_drafts(self, seconds: float, shape: StepShape, drafts: Drafts, rows: int) -> float:
        """Return the time of a step of `seconds` if its lines take as long as measured, and its
        simulated drafts are proposed in it."""
        if self._line_time is not None and not shape.prefill_rows:
            seconds += self._line_seconds(shape.tokens) - self._short_seconds(shape.tokens)
        if (drafts.token_ids < 0).any():
            seconds += self._draft_s(rows) * int(drafts.counts.max())
        return seconds

    def _features_s(self, batch: Batch) -> float:
        """Return by how long images, adapters and pooling prolong a step."""
        seconds = 0.0
        if (images := batch.part(MediaRows)) is not None:
            seconds += self._encoding_s(images)
        if self._config.max_adapters:
            costs = self._profile.adapter_costs(self._factor)
            part = batch.part(AdapterRows)
            seconds += self._adapters.step_seconds(part, costs, batch.rows, batch.num_tokens)
        if (pooling := batch.part(PoolingRows)) is not None:
            seconds += self._factor * self._profile.pooled_s * len(pooling.due)
        return seconds

    def _encoding_s(self, images: MediaRows) -> float:
        """Return the time of a step for the images that it encodes, and count them."""
        count = len(images.encode)
        rows = sum(one.item.rows for one in images.encode)
        seconds = self._factor * self._profile.encoding_s(count, rows)
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
        return self._factor * self._line_time.seconds(StepShape(lines, lines, 0, 0, lines, 0))

    def _draft_s(self, rows: int) -> float:
        """Return the device time of a draft of each of `rows` rows."""
        if self._options.draft_s is not None or not self._profile.draft_costs:
            return self._factor * (self._options.draft_s or 0.0)
        model = PiecewiseStepTime(points=self._profile.draft_costs)
        return self._factor * model.seconds(StepShape(rows, rows, 0, 0, rows, 0))


def _sizes(most: int) -> list[int]:
    """Return powers of two below `most`, and `most`."""
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]
