"""Distributions of token counts, turns and times."""

from __future__ import annotations

from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat, model_validator

from dovetail_lab.calls import Value
from dovetail_lab.traces import load_trace


class Distribution(Value):
    """Distribution of numbers. The caller rounds the draws [count] and limits them to valid
    values."""

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        raise NotImplementedError


class Fixed(Distribution):
    value: float = Field(ge=0)

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        return np.full(count, self.value)


class Uniform(Distribution):
    """Uniform lengths from `low` to `high`, inclusive."""

    low: float = Field(ge=0)
    high: float = Field(ge=0)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.high < self.low:
            raise ValueError(f"high must be at least low ({self.low:g})")
        return self

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        if self.low.is_integer() and self.high.is_integer():
            return rng.integers(int(self.low), int(self.high), size=count, endpoint=True).astype(
                np.float64
            )
        return rng.uniform(self.low, self.high, size=count)


class Lognormal(Distribution):
    """Median times exp(sigma z), z standard normal; at most `most`."""

    median: PositiveFloat
    sigma: float = Field(ge=0, le=10)
    most: PositiveFloat = 1e6

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        return np.minimum(self.median * np.exp(self.sigma * rng.standard_normal(count)), self.most)


class Empirical(Distribution):
    """Lengths of a trace, drawn with replacement: `column` is prompt or output. For joint pairs,
    see `lengths` of a workload."""

    path: str
    column: str = Field(pattern="^(prompt|output)$")

    @cached_property
    def _values(self) -> NDArray[np.float64]:
        return np.array(
            [getattr(request, f"{self.column}_tokens") for request in load_trace(self.path)],
            np.float64,
        )

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        return rng.choice(self._values, size=count)


DISTRIBUTIONS: dict[str, type[Distribution]] = {
    "fixed": Fixed,
    "uniform": Uniform,
    "lognormal": Lognormal,
    "trace": Empirical,
}
