"""The time of a step on the device: `StepTimeModel`, and the built-in models whose numbers are measured. `step_profile` reads them from files.

A model sees the shape of a batch, never a request. Its answer is a function of integers by plain float arithmetic in a fixed order, so that it is
the same on every machine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

Integers = NDArray[np.int64] | NDArray[np.int32]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class StepShape(NamedTuple):
    """The work of a batch. A row with more than one new token is a prefill, or a chunk of one; a row with one is a decode."""

    rows: int
    tokens: int  # new ones, of all rows
    prefill_rows: int
    prefill_tokens: int  # new ones, of prefill rows
    context_tokens: int  # whose K and V are read: of each row those it had and its new ones
    prefill_pairs: int  # of a query and a key it sees, in prefill rows: the work of causal attention
    prefill_length: int = 0  # tokens of the longest prefill row, those it had and its new ones: how long one query may take

    @classmethod
    def of(cls, new_tokens: Integers, context: Integers) -> StepShape:
        """Make a shape from the tokens that each row computes [rows], and had computed before [rows]."""
        rows, tokens = len(new_tokens), int(np.add.reduce(new_tokens))  # `sum` would take twice as long
        read = int(np.add.reduce(context)) + tokens
        if tokens == rows:
            return cls(rows, tokens, 0, 0, read, 0)
        prefills = np.flatnonzero(new_tokens > 1)
        new, had = new_tokens[prefills].astype(np.int64), context[prefills]
        pairs = int((new * had + new * (new + 1) // 2).sum())
        return cls(rows, tokens, len(prefills), int(new.sum()), read, pairs, int((new + had).max()))

    @property
    def decodes(self) -> int:
        return self.rows - self.prefill_rows


class StepTimeModel(Protocol):
    """A model of the time that a batch takes."""

    def seconds(self, shape: StepShape) -> float:
        """Return the time on the device, from its first kernel to its sampled ids; more than 0 and finite."""


class Described(BaseModel):
    """A part of a profile: read from JSON, never changed, no key that it doesn't know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Regime(Enum):
    """The way in which a step is launched."""

    DECODE = "decode"  # decodes alone: one recorded graph
    RECORDED = "recorded"  # with prefills, one recorded graph as well
    LAUNCHED = "launched"  # with prefills, kernel by kernel


@dataclass(frozen=True, slots=True)
class LaunchRule:
    """The rule by which a step is computed after its launching, or meanwhile.

    decodes:           | launching .... | copying too |
                                        | computing .............. |
    one graph:         | launching .... | sampling too |
                                        | computing .............. |
    kernel by kernel:  | launching ................... | after |
                         computing, now and then waiting ..... |
    """

    recorded_tokens: int = 0  # a step with prefills of up to so many tokens is one graph
    sampling_share: float = 0.0  # of launching such a step: what is left to do when the graph begins
    after_launch_s: float = 0.0
    copying_share: float = 0.0  # of launching a step of decodes: what is left to do when its graph begins
    setup_s: float = 0.0  # what the device does for a step with prefills before its graph begins, unless that is late anyway

    def regime(self, shape: StepShape) -> Regime:
        if not shape.prefill_rows:
            return Regime.DECODE
        return Regime.RECORDED if shape.tokens <= self.recorded_tokens else Regime.LAUNCHED

    def occupied_s(self, shape: StepShape, seconds: float, late_s: float, launch_s: float) -> float:
        """Return how long a step that takes `seconds` to compute occupies the device, if its launching took `launch_s` and ended `late_s` after the
        device was free for it (negative: before)."""
        regime = self.regime(shape)
        if regime is Regime.DECODE:
            return max(seconds + max(late_s - self.copying_share * launch_s, 0.0), late_s)
        if regime is Regime.RECORDED:
            seconds += max(late_s - self.sampling_share * launch_s, self.setup_s)
        return max(seconds, late_s + self.after_launch_s)

    def computed_s(self, shape: StepShape, occupied_s: float, late_s: float, launch_s: float) -> float:
        """The other way round: what a step computes that kept the device for `occupied_s`; at most, if that was until its launching had ended."""
        regime = self.regime(shape)
        if regime is Regime.LAUNCHED:
            return occupied_s
        if regime is Regime.RECORDED:
            return occupied_s - max(late_s - self.sampling_share * launch_s, self.setup_s)
        return occupied_s - max(late_s - self.copying_share * launch_s, 0.0)


class LinearStepTime(Described):
    """A sum of terms: weights are read once (`base_s`), every token runs through them, K and V are read, prefills attend, rows are sampled. Of a
    mixture of experts only those are read that some token of the batch has chosen: few by a few tokens, nearly all by a hundred."""

    kind: Literal["linear"] = "linear"
    base_s: Seconds
    per_token_s: Seconds = 0.0
    per_context_s: Seconds = 0.0
    per_pair_s: Seconds = 0.0
    per_row_s: Seconds = 0.0
    experts_s: Seconds = Field(default=0.0, description="What reading the weights of all experts takes.")
    expert_share: float = Field(default=0.0, ge=0, le=1, description="The share of the experts that a token chooses: k of E.")

    def seconds(self, shape: StepShape) -> float:
        experts_s = self.experts_s * share_touched(self.expert_share, shape.tokens) if self.experts_s else 0.0
        return (
            self.base_s
            + experts_s
            + self.per_token_s * shape.tokens
            + self.per_context_s * shape.context_tokens
            + self.per_pair_s * shape.prefill_pairs
            + self.per_row_s * shape.rows
        )


def share_touched(share: float, tokens: int) -> float:
    """Return 1 - (1 - share)^tokens: the share of experts that some token chooses, if each token chooses `share` of them, any set as likely as any
    other. The power is one of squarings in a fixed order: the same on every machine."""
    power, factor = 1.0, 1.0 - share
    while tokens:
        if tokens & 1:
            power *= factor
        factor *= factor
        tokens >>= 1
    return 1.0 - power


class PiecewiseStepTime(Described):
    """A linear model except that the time for the batch's size follows measured points: flat while reading the weights takes longest, steep where
    computing does, with the steps of tile sizes and captured graphs between them. Where a graph is recorded for each of some `sizes`, what counts is
    the next size: a staircase. While rows, or a prefill's queries, are few, how long a row is counts beside how much K and V is read in all: parts of
    the device alone read it."""

    kind: Literal["piecewise"] = "piecewise"
    points: tuple[tuple[int, Seconds], ...] = Field(min_length=2, description="(tokens in the batch, seconds), by tokens; extended beyond both ends.")
    per_context_s: Seconds = 0.0
    per_pair_s: Seconds = 0.0
    per_row_s: Seconds = 0.0
    least_s: Seconds = Field(default=0.0, description="What launching the step takes: it is never shorter.")
    sizes: tuple[int, ...] = Field(default=(), description="Tokens are padded to the next of these, rising; more than the last are not.")
    per_length_s: Seconds = Field(
        default=0.0,
        description="What each token adds of the longest prefill row, or of the mean context of decodes alone, however many rows there are.",
    )
    beside_s: Seconds = Field(default=0.0, description="What it adds that prefills have decodes beside them.")
    corrections: tuple[tuple[int, tuple[tuple[int, float], ...]], ...] = Field(
        default=(),
        description="For decodes alone, by rows, padding included: (context tokens, what was measured over all of the above), by context. "
        "Between rows, and between contexts, the ratio is interpolated; beyond them it stays.",
    )

    @model_validator(mode="after")
    def _in_order(self) -> PiecewiseStepTime:
        tokens = [point[0] for point in self.points]
        if tokens != sorted(set(tokens)) or tokens[0] < 0:
            raise ValueError(f"points must be ordered by tokens, each count once, got {tokens}")
        if list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"sizes must rise, got {list(self.sizes)}")
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
        attention = self.per_context_s * shape.context_tokens + self.per_pair_s * shape.prefill_pairs
        if self.per_length_s:
            attention += self.per_length_s * (shape.prefill_length if shape.prefill_rows else shape.context_tokens / shape.rows)
        if shape.prefill_rows and shape.decodes:
            attention += self.beside_s
        seconds = max(own, 0.0) + attention + self.per_row_s * shape.rows
        if self.corrections and not shape.prefill_rows:
            seconds *= self._correction(tokens, shape.context_tokens)
        return max(seconds, self.least_s)

    def _correction(self, rows: int, context: int) -> float:
        at = bisect_left(self._corrected_rows, rows)
        around = self.corrections[max(at - 1, 0) : at + 1]  # one of the two, beyond an end
        ratios = [_interpolated(ratios, context) for _, ratios in around]
        return _interpolated(tuple(zip((rows for rows, _ in around), ratios, strict=True)), rows)

    def scaled(self, factor: float) -> PiecewiseStepTime:
        """Return the model with all its seconds multiplied by `factor`."""
        points = tuple((tokens, factor * seconds) for tokens, seconds in self.points)
        return self.model_copy(update={"points": points, **{name: factor * value for name, value in self if name.endswith("_s")}})


def _interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """Between (x, y) of rising x; beyond them as at the end."""
    for (low, low_y), (high, high_y) in pairwise(points):
        if x < high:
            return low_y + (high_y - low_y) * max(x - low, 0.0) / (high - low)
    return points[-1][1]


def padded(tokens: int, sizes: Sequence[int]) -> int:
    """The next of rising `sizes`, or `tokens` themselves above the last."""
    at = bisect_left(sizes, tokens)
    return sizes[at] if at < len(sizes) else tokens


class RegimeStepTime(Described):
    """Decodes alone, steps with prefills, and large ones of these, each piecewise: engines replay recorded graphs where they can, and launch the
    rest kernel by kernel."""

    kind: Literal["regimes"] = "regimes"
    decode: PiecewiseStepTime
    mixed: PiecewiseStepTime = Field(description="A step with prefills, alone or beside decodes.")
    large: PiecewiseStepTime | None = Field(default=None, description="The same, of more than `large_above` tokens.")
    large_above: int = Field(default=0, ge=0)

    def seconds(self, shape: StepShape) -> float:
        if not shape.prefill_rows:
            return self.decode.seconds(shape)
        if self.large is not None and shape.tokens > self.large_above:
            return self.large.seconds(shape)
        return self.mixed.seconds(shape)


class Grid(Described):
    """Seconds over two numbers, bilinear between the measured points and beyond them."""

    across: tuple[int, ...] = Field(min_length=2, description="Tokens or rows, rising.")
    down: tuple[int, ...] = Field(min_length=2, description="Mean context of a row, in tokens, rising.")
    seconds: tuple[tuple[Seconds, ...], ...] = Field(description="One row for each of `down`, one entry for each of `across`.")

    @model_validator(mode="after")
    def _whole(self) -> Grid:
        for name, axis in (("across", self.across), ("down", self.down)):
            if list(axis) != sorted(set(axis)):
                raise ValueError(f"{name} must rise, got {list(axis)}")
        if len(self.seconds) != len(self.down) or any(len(row) != len(self.across) for row in self.seconds):
            raise ValueError(f"seconds must be {len(self.down)} rows of {len(self.across)} entries, as `down` and `across` say")
        return self

    def at(self, x: float, y: float) -> float:
        column, right = _place(self.across, x)
        row, below = _place(self.down, y)
        upper, lower = self.seconds[row], self.seconds[row + 1]
        top = upper[column] + (upper[column + 1] - upper[column]) * right
        bottom = lower[column] + (lower[column + 1] - lower[column]) * right
        return max(top + (bottom - top) * below, 0.0)


class TableStepTime(Described):
    """Measured tables, one of pure decodes and one of pure prefills. A mixed batch takes the sum, less what both have in common: the smallest
    step, which is the reading of the weights."""

    kind: Literal["table"] = "table"
    decode: Grid = Field(description="Across: rows. Down: tokens that a row has.")
    prefill: Grid = Field(description="Across: new tokens of all rows. Down: tokens that a row had before.")

    @cached_property
    def _common_s(self) -> float:
        return min(self.decode.seconds[0][0], self.prefill.seconds[0][0])

    def seconds(self, shape: StepShape) -> float:
        decode = prefill = 0.0
        prefill_context = 0.0
        if shape.prefill_tokens:
            new = shape.prefill_tokens
            within = new * (new / shape.prefill_rows + 1) / 2  # pairs among the new tokens of prefills of equal length
            prefill_context = max(0.0, (shape.prefill_pairs - within) / new)
            prefill = self.prefill.at(new, prefill_context)
        if shape.decodes:
            others = shape.prefill_tokens + prefill_context * shape.prefill_rows
            decode = self.decode.at(shape.decodes, max(0.0, shape.context_tokens - others) / shape.decodes)
        both = self._common_s if shape.prefill_tokens and shape.decodes else 0.0
        return max(prefill + decode - both, self._common_s)


def _place(axis: Sequence[int], value: float) -> tuple[int, float]:
    """The interval of a rising axis, and where in it: below 0 or above 1 beyond the ends."""
    at = min(max(bisect_left(axis, value), 1), len(axis) - 1)
    return at - 1, (value - axis[at - 1]) / (axis[at] - axis[at - 1])
