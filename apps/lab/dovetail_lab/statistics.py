"""Confidence intervals for comparisons of two policies: paired bootstrap of means and quantiles, on
plain arrays.

`draws` defines the resampling. Changes are logarithms of ratios internally, so that exchanging the
two policies negates them exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special  # type: ignore[import-untyped]

from dovetail_lab.draws import Draws, SeedDraws, log_ratio, per_run
from dovetail_lab.pairs import Floats, Pairs, Statistic


@dataclass(frozen=True, slots=True)
class Change:
    """Change from `a` to `b`, each the mean over runs of a run's statistic; `relative`, `low` and
    `high` are shares: -0.31 is 31 % less. `low` and `high` are NaN if no interval is available."""

    a: float
    b: float
    relative: float
    low: float
    high: float

    @property
    def measurable(self) -> bool:
        """True if the interval excludes zero."""
        return self.low > 0 or self.high < 0


def changes(
    runs: Sequence[Pairs], statistics: Sequence[Statistic], draws: Draws, confidence: float = 0.95
) -> list[Change]:
    """Return the change of each statistic from a to b over all runs, with its interval."""
    logs = draws.logs(runs, statistics)
    return [
        _change(*per_run(runs, statistic), logs[index], draws.units, confidence)
        for index, statistic in enumerate(statistics)
    ]


def scalar_change(a: Floats, b: Floats, draws: Draws, confidence: float = 0.95) -> Change:
    """Return the change of a metric with one number per run. It has an interval only if whole runs
    are drawn."""
    logs = draws.of_scalars(a, b) if isinstance(draws, SeedDraws) else np.full(1, math.nan)
    return _change(a, b, logs, draws.units, confidence)


def half_of(deviation: float, count: int, confidence: float) -> float:
    """Return half the width of Student's interval of the mean of `count` values with this sample
    standard deviation."""
    quantile = special.stdtrit(count - 1, (1 + confidence) / 2)
    return float(quantile) * deviation / math.sqrt(count)


def _change(
    a_of_runs: Floats, b_of_runs: Floats, logs: Floats, units: int, confidence: float
) -> Change:
    a = float(np.mean(a_of_runs))
    b = float(np.mean(b_of_runs))
    centre = float(log_ratio(np.array([a]), np.array([b]))[0])
    relative = math.expm1(centre) if math.isfinite(centre) else math.nan
    if not np.isfinite(logs).all() or units < 2:
        return Change(a, b, relative, math.nan, math.nan)
    tail = (1 - confidence) / 2
    low, high = np.expm1(
        centre + _widening(confidence, units) * (np.quantile(logs, [tail, 1 - tail]) - centre)
    )
    return Change(a, b, relative, float(low), float(high))


def _widening(confidence: float, units: int) -> float:
    """Return the factor by which intervals are widened: a percentile bootstrap of n units is too
    narrow by sqrt((n - 1) / n), and by using the quantile of the normal instead of Student's t
    (Hesterberg 2015, "What teachers should know about the bootstrap", section 5.3)."""
    level = (1 + confidence) / 2
    return math.sqrt(units / (units - 1)) * float(
        special.stdtrit(units - 1, level) / special.ndtri(level)
    )
