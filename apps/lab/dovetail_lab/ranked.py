"""`Ranked`: exact means and quantiles of many weighted draws of one set of values. `draws` needs
thousands of them.

A draw gives each request a weight: the number of times it was drawn. A request may have one value
(its TTFT) or many (its inter-token latencies); summing millions of values for thousands of draws
would be too slow. So sorted values are grouped into bins: one matrix product counts how much of
each bin every draw holds, and only the bin with the quantile is searched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dovetail_lab.pairs import Floats, Ints, Statistic, Values

MIN_BIN = 64
_BIN_COST = 256  # cost of searching one value, in products of the matrix: measured, not critical


@dataclass(frozen=True, slots=True)
class Ranked:
    """Sorted values of one run, and their assignment to requests."""

    values: Floats  # ascending
    request: Ints  # request of each value: a column of the weights
    sums: Floats  # [requests]
    counts: Floats  # [requests, bins]: number of a request's values in a bin
    bin: int  # values in each bin; fewer in the last

    @classmethod
    def of(cls, values: Values, requests: int, bin: int | None = None) -> Ranked:
        """`requests`: number of requests in a run, with or without values. `bin`: None chooses the
        fastest size."""
        order = np.argsort(values.numbers, kind="stable")
        request = values.request[order]
        count = len(order)
        size = bin or max(MIN_BIN, math.isqrt(requests * count // _BIN_COST))
        bins = max(1, -(-count // size))
        counts = np.bincount(
            request * bins + np.arange(count) // size, minlength=requests * bins
        ).astype(np.float64)
        return cls(
            values.numbers[order],
            request,
            values.by_request(values.numbers, requests),
            counts.reshape(requests, bins),
            size,
        )

    def statistics(self, weights: npt.NDArray[np.int32], statistics: Sequence[Statistic]) -> Floats:
        """Return [statistics, draws]: each `Statistic.of` the values, with those of request i
        repeated `weights[draw, i]` times. NaN if no value was drawn. `weights`: [draws,
        requests]."""
        exact = weights.astype(np.float64)  # integers below 2**53: products and sums are exact
        reached = np.cumsum(exact @ self.counts, axis=1)
        total = reached[:, -1]
        if not len(self.values):
            return np.full((len(statistics), len(weights)), math.nan)
        found = [
            exact @ self.sums / np.maximum(total, 1)
            if s.q is None
            else self._quantile(exact, reached, total, s.q)
            for s in statistics
        ]
        return np.where(total > 0, np.stack(found), math.nan)

    def _quantile(self, weights: Floats, reached: Floats, total: Floats, q: float) -> Floats:
        position = q * np.maximum(total - 1, 0)
        below = np.floor(position)
        low = self._at(weights, reached, below)
        high = self._at(weights, reached, np.minimum(below + 1, np.maximum(total - 1, 0)))
        return np.asarray(low + (position - below) * (high - low), np.float64)

    def _at(self, weights: Floats, reached: Floats, position: Floats) -> Floats:
        """Return [draws]: the value at a position, from 0, among the sorted drawn values. `reached`
        [draws, bins]: number of values drawn up to the end of each bin."""
        draw = np.arange(len(weights))
        bins = np.minimum((reached <= position[:, None]).sum(axis=1), reached.shape[1] - 1)
        before = np.where(bins > 0, reached[draw, bins - 1], 0.0)
        # [draws, values of the bin]
        at = bins[:, None] * self.bin + np.arange(min(self.bin, len(self.values)))
        inside = at < len(self.values)
        own = np.where(inside, weights[draw[:, None], self.request[np.where(inside, at, 0)]], 0.0)
        passed = (np.cumsum(own, axis=1) <= (position - before)[:, None]).sum(axis=1)
        return np.asarray(
            self.values[np.minimum(bins * self.bin + passed, len(self.values) - 1)], np.float64
        )
