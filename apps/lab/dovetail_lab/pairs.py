"""`Pairs`: one metric of the same requests under two policies; and `Statistic`s of it. `compare`
creates them, `statistics` reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Statistic:
    """A mean, or a quantile with 0 < q < 1 by linear interpolation (numpy's default, and that of
    vLLM's `bench serve`)."""

    q: float | None = None

    @property
    def name(self) -> str:
        return "mean" if self.q is None else f"p{100 * self.q:g}"

    def of(self, values: Floats) -> float:
        """Return the statistic of the values; NaN if there are none."""
        if not len(values):
            return math.nan
        return float(np.mean(values) if self.q is None else np.quantile(values, self.q))

    def influence(self, values: Floats) -> Floats:
        """Return each value's influence (by the influence function), up to a constant factor; on
        average 0. There must be values."""
        if self.q is None:
            mean = float(np.mean(values))
            return values / mean - 1 if mean else values
        above = (values > np.quantile(values, self.q)).astype(np.float64)
        return np.asarray(above - above.mean(), np.float64)


MEAN = Statistic()
P50 = Statistic(0.5)
P90 = Statistic(0.9)
P99 = Statistic(0.99)


@dataclass(frozen=True, slots=True)
class Values:
    """Values of a metric in one run under one policy. `numbers[i]` belongs to the request with
    index `request[i]`, in order of arrival."""

    numbers: Floats
    request: Ints

    def by_request(self, numbers: Floats, requests: int) -> Floats:
        """Return [requests]: the sum of `numbers`, one for each value, over each request's
        values."""
        return np.asarray(np.bincount(self.request, numbers, minlength=requests), np.float64)


@dataclass(frozen=True, slots=True)
class Pairs:
    """One metric of the same requests under two policies, `a` and `b`, in one run of `requests`
    requests. Requests without a value under one of them are excluded from both."""

    a: Values
    b: Values
    requests: int

    @classmethod
    def of(cls, a: Floats, b: Floats) -> Pairs:
        """Pair a metric with one value per request: `a[i]` and `b[i]` belong to the same request,
        NaN without a value. Raises `ValueError`."""
        if a.shape != b.shape or a.ndim != 1:
            raise ValueError(
                f"pairs need two arrays [requests] of one length, got {a.shape} and {b.shape}"
            )
        both = np.flatnonzero(np.isfinite(a) & np.isfinite(b))
        return cls(Values(a[both], both), Values(b[both], both), len(a))

    @classmethod
    def pooled(cls, a: Sequence[Floats], b: Sequence[Floats]) -> Pairs:
        """Pair a metric with any number of values per request, all pooled: `a[i]` and `b[i]` belong
        to the same request, empty without values. Raises `ValueError`."""
        if len(a) != len(b):
            raise ValueError(
                f"pairs need equally many requests under both policies, got {len(a)} and {len(b)}"
            )
        both = [
            index
            for index, (one, other) in enumerate(zip(a, b, strict=True))
            if len(one) and len(other)
        ]
        return cls(_pool(a, both), _pool(b, both), len(a))

    @property
    def present(self) -> Ints:
        """Indices of the requests that have values, in order of arrival."""
        return np.unique(self.a.request)

    def reversed(self) -> Pairs:
        return Pairs(self.b, self.a, self.requests)


def _pool(values: Sequence[Floats], chosen: Sequence[int]) -> Values:
    numbers = np.concatenate([np.empty(0), *(values[index] for index in chosen)])
    return Values(
        numbers, np.repeat(np.array(chosen, np.intp), [len(values[index]) for index in chosen])
    )
