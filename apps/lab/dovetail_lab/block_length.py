"""`block_length`: number of consecutive requests to resample together, so that blocks cover a run's
autocorrelation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dovetail_lab.pairs import Floats, Pairs, Statistic

MIN_BLOCKS = 7  # a run has at least this many blocks
_ROUNDING = 1e-9  # influences are relative; below this share they are rounding errors


@dataclass(frozen=True, slots=True)
class BlockLength:
    """Block length of a comparison. `capped`: the autocorrelation is too long for `MIN_BLOCKS`
    blocks, so block intervals are too narrow."""

    requests: int
    capped: bool


def block_length(runs: Sequence[Pairs], statistic: Statistic) -> BlockLength:
    """Return a length sufficient for the statistic in every run: twice the largest of their optimal
    lengths. Those are optimal for a variance; for an interval their bias weighs more, and doubling
    brings the coverage nearer to the stated level (`tests/lab/test_statistics.py` simulates it)."""
    longest = 1
    shortest_run = min((run.requests for run in runs), default=1)
    for run in runs:
        present = run.present
        if len(present):
            influences = (
                side.by_request(statistic.influence(side.numbers), run.requests)
                for side in (run.b, run.a)
            )
            optimal = optimal_block(np.subtract(*influences)[present])
            longest = max(longest, 2 * optimal if optimal > 1 else 1)
    limit = max(1, shortest_run // MIN_BLOCKS)
    return BlockLength(min(longest, limit), longest > limit)


def optimal_block(series: Floats) -> int:
    """Return the block length that minimizes the error of the circular block bootstrap's variance
    of a mean: Politis and White 2004, "Automatic block-length selection for the dependent
    bootstrap", as corrected by Patton, Politis and White 2009; m is their smallest lag after which
    the autocorrelations stay insignificant, and lambda their flat-top window."""
    n = len(series)
    covariance = _autocovariance(series)
    if n < 8 or covariance[0] <= _ROUNDING**2:
        return 1
    run_of_small = max(5, math.ceil(math.sqrt(math.log10(n))))
    small = np.abs(covariance[1:] / covariance[0]) < 2 * math.sqrt(math.log10(n) / n)
    m = next(
        (lag for lag in range(len(small) - run_of_small) if small[lag : lag + run_of_small].all()),
        len(small) // 2,
    )
    lags = np.arange(-min(2 * max(m, 1), n - 1), min(2 * max(m, 1), n - 1) + 1)
    window = np.clip(2 * (1 - np.abs(lags) / (2 * max(m, 1))), 0, 1)
    near = covariance[np.abs(lags)]
    spectrum = float(window @ near)
    slope = float(window @ (np.abs(lags) * near))
    if spectrum <= 0:
        return 1
    return max(1, math.ceil(math.cbrt(2 * slope**2 / (4 / 3 * spectrum**2) * n)))


def _autocovariance(series: Floats) -> Floats:
    """Return the autocovariance at lags 0 .. n - 1, by the Fourier transform."""
    n = len(series)
    if n == 0:
        return np.zeros(1)
    spectrum = np.fft.rfft(series - series.mean(), 2 * n)
    return np.asarray(np.fft.irfft(spectrum * spectrum.conj(), 2 * n)[:n] / n, np.float64)
