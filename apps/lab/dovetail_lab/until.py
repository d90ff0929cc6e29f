"""`--until 5%`: adds seeds to a comparison until the interval of one figure is narrow enough. The
interval is valid however often one looks (`power.anytime_half`)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dovetail.errors import ConfigError, shown
from dovetail_lab.compare import paired
from dovetail_lab.draws import log_ratio, per_run
from dovetail_lab.metrics import measure
from dovetail_lab.pairs import Floats, Statistic
from dovetail_lab.power import anytime_count, anytime_half
from dovetail_lab.records import RunResult
from dovetail_lab.verdict import LATENCIES, RATES, STATISTICS

FIGURES = (
    *(f"{metric}_{statistic.name}" for metric in LATENCIES for statistic in STATISTICS),
    *RATES,
)
DEFAULT = "ttft_mean"
FEWEST = 5  # seeds from which their spread estimates how many more are needed


def parts_of(figure: str) -> tuple[str, Statistic]:
    """Return the metric and the statistic of a latency of `FIGURES`."""
    metric, _, name = figure.partition("_")
    return metric, next(one for one in STATISTICS if one.name == name)


@dataclass(frozen=True, slots=True)
class Until:
    """The figure, and the maximum half-width of its interval as a share: 0.05 is 5 %."""

    figure: str
    share: float
    confidence: float

    @classmethod
    def parse(cls, text: str, confidence: float) -> Until:
        """Parse `5%`, or `ttft_p99=5%`. Raises `ConfigError`."""
        name, equals, share = text.rpartition("=")
        figure = name.strip() if equals else DEFAULT
        if figure not in FIGURES:
            raise ConfigError(
                f"--until: there is no figure {shown(figure)}; there are {', '.join(FIGURES)}"
            )
        number = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*%\s*", share, re.ASCII)
        if number is None or not 0 < float(number[1]) < 100:
            raise ConfigError(
                f"--until: expected a width between 0 and 100 % such as 5% or ttft_p99=5%, got "
                f"{shown(text)}"
            )
        return cls(figure, float(number[1]) / 100, confidence)

    def _logs(self, base: Sequence[RunResult], other: Sequence[RunResult]) -> Floats:
        """Return [runs]: the logarithm of the change of the figure from `base` to `other`, run by
        run; not finite if one of them lacks it."""
        if self.figure in RATES:
            sides = ([getattr(measure(run), self.figure) for run in runs] for runs in (base, other))
            return log_ratio(*map(np.array, sides))
        metric, statistic = parts_of(self.figure)
        return log_ratio(*per_run(paired(base, other, metric), statistic))

    def look(self, runs: Mapping[str, Sequence[RunResult]]) -> list[Look]:
        """Return the interval of each other policy's change from the first."""
        (base, base_runs), *others = runs.items()
        return [
            Look(self, base, name, self._logs(base_runs, other_runs)) for name, other_runs in others
        ]


@dataclass(frozen=True, slots=True)
class Look:
    """The change of the figure from `base` to `other`: the geometric mean of the seeds' ratios."""

    until: Until
    base: str
    other: str
    logs: Floats  # of the ratios, by seed

    @property
    def half(self) -> float:
        """Half the width of the interval of the mean logarithm; NaN if a run lacks the figure."""
        if not np.isfinite(self.logs).all():
            return math.nan
        return anytime_half(self._deviation, len(self.logs), self.until.confidence)

    @property
    def _deviation(self) -> float:
        return float(self.logs.std(ddof=1)) if len(self.logs) > 1 else math.inf

    @property
    def narrow(self) -> bool:
        return self.half <= math.log1p(self.until.share)

    @property
    def more(self) -> float:
        """Estimated number of further seeds needed; with fewer than `FEWEST` seeds, the number
        missing to that. Infinite for very many, NaN if no number suffices."""
        if not np.isfinite(self.logs).all():
            return math.nan
        if len(self.logs) < FEWEST:
            return FEWEST - len(self.logs)
        half = math.log1p(self.until.share)
        seeds = len(self.logs)
        return anytime_count(self._deviation, half, seeds, self.until.confidence) - seeds

    @property
    def says(self) -> str:
        """The interval in words."""
        subject = f"{self.other} against {self.base}, {self.until.figure}"
        seeds = len(self.logs)
        if math.isnan(self.half):
            return f"{subject}: a run lacks it, so no number of seeds gives an interval"
        mean = float(self.logs.mean())
        change, low, high = (
            100 * math.expm1(value) for value in (mean, mean - self.half, mean + self.half)
        )
        needed = f"{self.more:,}" if self.more < math.inf else "very many"
        met = "narrow enough" if self.narrow else f"too wide, {needed} more seeds needed"
        return (
            f"{subject}: {change:+.1f} % [{low:+.1f}, {high:+.1f}] over {seeds} seeds, however "
            f"often one looks: {met}"
        )
