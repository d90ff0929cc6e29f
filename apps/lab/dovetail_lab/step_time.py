"""Time of a step on the device: `StepTimeModel`, and the built-in models with measured
coefficients. `step_profile` reads them from files.

A model sees the shape of a batch, never a request. Its result is a function of integers by plain
float arithmetic in a fixed order, so that it is the same on every machine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

Integers = NDArray[np.int64] | NDArray[np.int32]
# (window, number of layers with it); None: full attention
Windows = Sequence[tuple[int | None, int]]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class StepShape(NamedTuple):
    """Work of a batch. A row with more than one new token is a prefill, or a chunk of one; a row
    with one is a decode. In a model with sliding windows, `context_tokens` and `prefill_pairs` are
    means over its layers, rounded down."""

    rows: int
    tokens: int  # new tokens of all rows
    prefill_rows: int
    prefill_tokens: int  # new tokens of prefill rows
    context_tokens: int  # tokens with K and V to read: old and new ones of all rows
    prefill_pairs: int  # (query, key) pairs in prefill rows: the work of causal attention
    # old and new tokens of the longest prefill row: bounds the time of one query
    prefill_length: int = 0

    @classmethod
    def of(cls, new_tokens: Integers, context: Integers, windows: Windows = ()) -> StepShape:
        """Create a shape from the number of tokens that each row computes [rows], and has computed
        before [rows]. `windows`: of the layers; empty: all have full attention."""
        # `sum` would take twice as long
        rows = len(new_tokens)
        tokens = int(np.add.reduce(new_tokens))
        read = (
            _mean(windows, lambda window: _visible(context, window))
            if windows
            else int(np.add.reduce(context))
        ) + tokens
        if tokens == rows:
            return cls(rows, tokens, 0, 0, read, 0)
        prefills = np.flatnonzero(new_tokens > 1)
        new = new_tokens[prefills].astype(np.int64)
        had = context[prefills]
        pairs = (
            _mean(windows, lambda window: _pairs(new, had, window))
            if windows
            else _pairs(new, had, None)
        )
        return cls(rows, tokens, len(prefills), int(new.sum()), read, pairs, int((new + had).max()))

    @property
    def decodes(self) -> int:
        return self.rows - self.prefill_rows


def _mean(windows: Windows, of_window: Callable[[int | None], int]) -> int:
    """Return the mean over all layers of a number that depends on a layer's window."""
    return sum(layers * of_window(window) for window, layers in windows) // sum(
        layers for _, layers in windows
    )


def _visible(context: Integers, window: int | None) -> int:
    """Return the number of earlier tokens that the first new token of each row sees, summed over
    the rows."""
    return int(np.add.reduce(context if window is None else np.minimum(context, window - 1)))


def _pairs(new: NDArray[np.int64], had: Integers, window: int | None) -> int:
    """Return the number of (query, key) pairs of rows with `had` tokens that compute `new` more."""
    pairs = new * had + new * (new + 1) // 2
    if window is not None:  # less those of keys before each query's window: 0, 0, 1, 2, 3 …
        last = np.maximum(had + new - window, 0)
        before = np.maximum(had - window, 0)
        pairs = pairs - last * (last + 1) // 2 + before * (before + 1) // 2
    return int(pairs.sum())


def ascending(points: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    """Return measured (lines, seconds). Raises `ValueError` unless there are two or none, lines are
    ascending and positive, and so are seconds."""
    lines = [count for count, _ in points]
    ascends = len(points) != 1 and lines == sorted(set(lines))
    if not ascends or any(count < 1 or seconds <= 0 for count, seconds in points):
        raise ValueError(
            f"expected two or more (lines, seconds) above 0, with ascending lines, got "
            f"{[*map(list, points)]}"
        )
    return points


class StepTimeModel(Protocol):
    """Predicts the time of a batch."""

    def seconds(self, shape: StepShape) -> float:
        """Return the time on the device, from its first kernel to its sampled ids; more than 0 and
        finite."""


class Described(BaseModel):
    """Base of a profile's parts: read from JSON, immutable, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Regime(Enum):
    """How a step is launched."""

    DECODE = "decode"  # only decodes: one recorded graph
    RECORDED = "recorded"  # with prefills, one recorded graph as well
    LAUNCHED = "launched"  # with prefills, kernel by kernel


@dataclass(frozen=True, slots=True)
class LaunchRule:
    """Whether a step is computed after its launch, or during it.

    decodes:           | launching .... | copying too |
                                        | computing .............. |
    one graph:         | launching .... | sampling too |
                                        | computing .............. |
    kernel by kernel:  | launching ................... | after |
                         computing, now and then waiting ..... |
    """

    recorded_tokens: int = 0  # steps with prefills of up to this many tokens are one graph
    sampling_share: float = 0.0  # share of the launch of such a step after its graph has started
    after_launch_s: float = 0.0
    copying_share: float = 0.0  # share of the launch of a decode step after its graph has started
    # device time of a step with prefills before its graph, unless that is late anyway
    setup_s: float = 0.0

    def regime(self, shape: StepShape) -> Regime:
        if not shape.prefill_rows:
            return Regime.DECODE
        return Regime.RECORDED if shape.tokens <= self.recorded_tokens else Regime.LAUNCHED

    def occupied_s(self, shape: StepShape, seconds: float, late_s: float, launch_s: float) -> float:
        """Return how long a step with `seconds` of computation occupies the device, if its launch
        took `launch_s` and ended `late_s` after the device was free (negative: before)."""
        regime = self.regime(shape)
        if regime is Regime.DECODE:
            return max(seconds + max(late_s - self.copying_share * launch_s, 0.0), late_s)
        if regime is Regime.RECORDED:
            seconds += max(late_s - self.sampling_share * launch_s, self.setup_s)
        return max(seconds, late_s + self.after_launch_s)

    def computed_s(
        self, shape: StepShape, occupied_s: float, late_s: float, launch_s: float
    ) -> float:
        """Inverse of `occupied_s`: return the computing time of a step that occupied the device for
        `occupied_s`; an upper bound if it was busy until its launch had ended."""
        regime = self.regime(shape)
        if regime is Regime.LAUNCHED:
            return occupied_s
        if regime is Regime.RECORDED:
            return occupied_s - max(late_s - self.sampling_share * launch_s, self.setup_s)
        return occupied_s - max(late_s - self.copying_share * launch_s, 0.0)


class LinearStepTime(Described):
    """Sum of terms: weights are read once (`base_s`), every token is multiplied by them, K and V
    are read, prefills attend, rows are sampled. Of a mixture of experts, only the experts chosen by
    some token of the batch are read: few by a few tokens, nearly all by a hundred."""

    kind: Literal["linear"] = "linear"
    base_s: Seconds
    per_token_s: Seconds = 0.0
    per_context_s: Seconds = 0.0
    per_pair_s: Seconds = 0.0
    per_row_s: Seconds = 0.0
    experts_s: Seconds = Field(default=0.0, description="Time to read the weights of all experts.")
    expert_share: float = Field(
        default=0.0, ge=0, le=1, description="Share of the experts that a token chooses: k / E."
    )

    def seconds(self, shape: StepShape) -> float:
        experts_s = (
            self.experts_s * share_touched(self.expert_share, shape.tokens)
            if self.experts_s
            else 0.0
        )
        return (
            self.base_s
            + experts_s
            + self.per_token_s * shape.tokens
            + self.per_context_s * shape.context_tokens
            + self.per_pair_s * shape.prefill_pairs
            + self.per_row_s * shape.rows
        )


def share_touched(share: float, tokens: int) -> float:
    """Return 1 - (1 - share)^tokens: the share of experts chosen by some token, if each token
    chooses a share `share` of them uniformly. The power is computed by squarings in a fixed order:
    the same on every machine."""
    power = 1.0
    factor = 1.0 - share
    while tokens:
        if tokens & 1:
            power *= factor
        factor *= factor
        tokens >>= 1
    return 1.0 - power


class PiecewiseStepTime(Described):
    """Linear model with a piecewise-linear term for the batch's size through measured points: flat
    while reading the weights dominates, steep where computing does, with steps at tile sizes and
    captured graphs in between. If graphs are recorded for `sizes`, the next size counts: a
    staircase. With few rows, or few queries of a prefill, the length of a row matters besides the
    total K and V read: only parts of the device read it."""

    kind: Literal["piecewise"] = "piecewise"
    points: tuple[tuple[int, Seconds], ...] = Field(
        min_length=2,
        description="(tokens in the batch, seconds), ascending; extrapolated beyond both ends.",
    )
    per_context_s: Seconds = 0.0
    per_pair_s: Seconds = 0.0
    per_row_s: Seconds = 0.0
    least_s: Seconds = Field(default=0.0, description="Lower bound: the time to launch the step.")
    sizes: tuple[int, ...] = Field(
        default=(),
        description="Ascending sizes that tokens are padded to; not padded above the last.",
    )
    per_length_s: Seconds = Field(
        default=0.0,
        description="Time per token of the longest prefill row, or of the mean context in "
        "decode-only steps, independent of the number of rows.",
    )
    beside_s: Seconds = Field(
        default=0.0, description="Additional time of prefills with decodes beside them."
    )
    corrections: tuple[tuple[int, tuple[tuple[int, float], ...]], ...] = Field(
        default=(),
        description="For decode-only steps, by rows including padding: (context tokens, measured / "
        "modeled time), by context. "
        "The ratio is interpolated between rows and contexts, and constant beyond them.",
    )

    @model_validator(mode="after")
    def _in_order(self) -> PiecewiseStepTime:
        tokens = [point[0] for point in self.points]
        if tokens != sorted(set(tokens)) or tokens[0] < 0:
            raise ValueError(f"points must be ordered by tokens, each count once, got {tokens}")
        if list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"sizes must be ascending, got {list(self.sizes)}")
        return self

    @cached_property
    def _tokens(self) -> list[int]:
        return [tokens for tokens, _ in self.points]

    @cached_property
    def _corrected_rows(self) -> list[int]:
        return [rows for rows, _ in self.corrections]

    def seconds(self, shape: StepShape) -> float:
        tokens = padded(shape.tokens, self.sizes) if self.sizes else shape.tokens
        at = min(max(bisect_left(self._tokens, tokens), 1), len(self.points) - 1)
        (low, low_s), (high, high_s) = self.points[at - 1], self.points[at]
        own = low_s + (high_s - low_s) * (tokens - low) / (high - low)
        attention = (
            self.per_context_s * shape.context_tokens + self.per_pair_s * shape.prefill_pairs
        )
        if self.per_length_s:
            attention += self.per_length_s * (
                shape.prefill_length if shape.prefill_rows else shape.context_tokens / shape.rows
            )
        if shape.prefill_rows and shape.decodes:
            attention += self.beside_s
        seconds = max(own, 0.0) + attention + self.per_row_s * shape.rows
        if self.corrections and not shape.prefill_rows:
            seconds *= self._correction(tokens, shape.context_tokens)
        return max(seconds, self.least_s)

    def _correction(self, rows: int, context: int) -> float:
        at = bisect_left(self._corrected_rows, rows)
        around = self.corrections[max(at - 1, 0) : at + 1]  # only one of the two beyond an end
        ratios = [_interpolated(ratios, context) for _, ratios in around]
        return _interpolated(tuple(zip((rows for rows, _ in around), ratios, strict=True)), rows)

    def scaled(self, factor: float) -> PiecewiseStepTime:
        """Return the model with all times multiplied by `factor`."""
        points = tuple((tokens, factor * seconds) for tokens, seconds in self.points)
        return self.model_copy(
            update={
                "points": points,
                **{name: factor * value for name, value in self if name.endswith("_s")},
            }
        )


def _interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate between points (x, y) with ascending x; constant beyond them."""
    for (low, low_y), (high, high_y) in pairwise(points):
        if x < high:
            return low_y + (high_y - low_y) * max(x - low, 0.0) / (high - low)
    return points[-1][1]


def padded(tokens: int, sizes: Sequence[int]) -> int:
    """Return the next of ascending `sizes`, or `tokens` above the last."""
    at = bisect_left(sizes, tokens)
    return sizes[at] if at < len(sizes) else tokens


class RegimeStepTime(Described):
    """Piecewise models for decode-only steps, steps with prefills, and large steps with prefills:
    engines replay recorded graphs where they can, and launch the rest kernel by kernel."""

    kind: Literal["regimes"] = "regimes"
    decode: PiecewiseStepTime
    mixed: PiecewiseStepTime = Field(description="Steps with prefills, with or without decodes.")
    large: PiecewiseStepTime | None = Field(
        default=None, description="The same, with more than `large_above` tokens."
    )
    large_above: int = Field(default=0, ge=0)

    def seconds(self, shape: StepShape) -> float:
        if not shape.prefill_rows:
            return self.decode.seconds(shape)
        if self.large is not None and shape.tokens > self.large_above:
            return self.large.seconds(shape)
        return self.mixed.seconds(shape)


class Grid(Described):
    """Seconds as a function of two numbers, bilinear between the measured points and beyond
    them."""

    across: tuple[int, ...] = Field(min_length=2, description="Tokens or rows, ascending.")
    down: tuple[int, ...] = Field(
        min_length=2, description="Mean context per row in tokens, ascending."
    )
    seconds: tuple[tuple[Seconds, ...], ...] = Field(
        description="One row per entry of `down`, one value per entry of `across`."
    )

    @model_validator(mode="after")
    def _whole(self) -> Grid:
        for name, axis in (("across", self.across), ("down", self.down)):
            if list(axis) != sorted(set(axis)):
                raise ValueError(f"{name} must be ascending, got {list(axis)}")
        if len(self.seconds) != len(self.down) or any(
            len(row) != len(self.across) for row in self.seconds
        ):
            raise ValueError(
                f"seconds must be {len(self.down)} rows of {len(self.across)} entries, to match "
                f"`down` and `across`"
            )
        return self

    def at(self, x: float, y: float) -> float:
        column, right = _place(self.across, x)
        row, below = _place(self.down, y)
        upper = self.seconds[row]
        lower = self.seconds[row + 1]
        top = upper[column] + (upper[column + 1] - upper[column]) * right
        bottom = lower[column] + (lower[column + 1] - lower[column]) * right
        return max(top + (bottom - top) * below, 0.0)


class TableStepTime(Described):
    """Measured tables of decode-only and prefill-only steps. A mixed batch takes the sum, minus the
    common part: the smallest step, which reads the weights."""

    kind: Literal["table"] = "table"
    decode: Grid = Field(description="Across: rows. Down: tokens per row.")
    prefill: Grid = Field(
        description="Across: new tokens of all rows. Down: previous tokens per row."
    )

    @cached_property
    def _common_s(self) -> float:
        return min(self.decode.seconds[0][0], self.prefill.seconds[0][0])

    def seconds(self, shape: StepShape) -> float:
        decode = prefill = 0.0
        prefill_context = 0.0
        if shape.prefill_tokens:
            new = shape.prefill_tokens
            # pairs among the new tokens, for prefills of equal length
            within = new * (new / shape.prefill_rows + 1) / 2
            prefill_context = max(0.0, (shape.prefill_pairs - within) / new)
            prefill = self.prefill.at(new, prefill_context)
        if shape.decodes:
            others = shape.prefill_tokens + prefill_context * shape.prefill_rows
            decode = self.decode.at(
                shape.decodes, max(0.0, shape.context_tokens - others) / shape.decodes
            )
        both = self._common_s if shape.prefill_tokens and shape.decodes else 0.0
        return max(prefill + decode - both, self._common_s)


def _place(axis: Sequence[int], value: float) -> tuple[int, float]:
    """Return the interval of an ascending axis, and the position in it: below 0 or above 1 beyond
    the ends."""
    at = min(max(bisect_left(axis, value), 1), len(axis) - 1)
    return at - 1, (value - axis[at - 1]) / (axis[at] - axis[at - 1])
