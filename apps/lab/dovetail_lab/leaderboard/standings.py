"""Ranking: scores with intervals over seeds, and groups of schedulers that the runs can't tell
apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy import special  # type: ignore[import-untyped]

from dovetail_lab.leaderboard.board import Entry, Figures

CONFIDENCE = 0.95
ALL = "all"  # the mean over the traces
MOST_SEEDS = 1_000  # that `seeds_needed` returns
TIED_WITHIN = 0.02  # half the width of an interval below which a tie is one

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Score:
    """A mean over seeds with its interval (Student's t), and the group: 1 is the best, and equal
    groups are ties."""

    mean: float
    half: float
    group: int

    @property
    def low(self) -> float:
        return max(0.0, self.mean - self.half)

    @property
    def high(self) -> float:
        return min(1.0, self.mean + self.half)


@dataclass(frozen=True, slots=True)
class Standing:
    """A scheduler's scores by trace, `ALL` first, and its other figures by trace, means over
    seeds."""

    entry: Entry
    scores: Mapping[str, Score]
    figures: Mapping[str, Mapping[str, float]]


def rank(runs: Mapping[Entry, Mapping[str, Sequence[Figures]]]) -> list[Standing]:
    """Return the standings, the best first. `runs[entry][trace]` has one run for each of two seeds
    or more, the same for all."""
    by_entry = {
        entry: {trace: _in_time(own) for trace, own in of_trace.items()}
        for entry, of_trace in runs.items()
    }
    for own in by_entry.values():
        own[ALL] = np.mean([own[trace] for trace in own], axis=0)
    traces = next(iter(by_entry.values()), {})
    places = {
        trace: groups({entry.name: own[trace] for entry, own in by_entry.items()})
        for trace in traces
    }
    standings = [
        Standing(
            entry,
            {
                trace: Score(float(own[trace].mean()), _half(own[trace]), places[trace][entry.name])
                for trace in sorted(own, key=_all_first)
            },
            {trace: _means(of_trace) for trace, of_trace in runs[entry].items()},
        )
        for entry, own in by_entry.items()
    ]
    return sorted(standings, key=lambda standing: (-standing.scores[ALL].mean, standing.entry.name))


def _all_first(trace: str) -> bool:
    return trace != ALL


def groups(scores: Mapping[str, Floats]) -> dict[str, int]:
    """Return each name's group. `scores[name]` is [seeds]. From the best mean down, a name is in
    the group of the best one that has none yet, unless it is measurably worse: the interval of the
    paired differences over seeds excludes zero. The first such name begins the next group."""
    order = sorted(scores, key=lambda name: (-float(scores[name].mean()), name))
    found: dict[str, int] = {}
    group = 0
    best = ""
    for name in order:
        if not best or _worse(scores[best] - scores[name]):
            group += 1
            best = name
        found[name] = group
    return found


def seeds_needed(runs: Mapping[Entry, Mapping[str, Sequence[Figures]]], share: float) -> int:
    """Return how many seeds tell two schedulers apart that differ by `share` of a trace's requests:
    the interval of their differences is no wider than that, for nine of ten pairs of schedulers
    and traces. `MOST_SEEDS` at most; 2 without pairs. Estimated from the seeds of these runs."""
    deviations = [
        float((_in_time(one[trace]) - _in_time(other[trace])).std(ddof=1))
        for one, other in combinations(runs.values(), 2)
        for trace in one
    ]
    if not deviations:
        return 2
    deviation = float(np.quantile(deviations, 0.9))
    return next(
        (count for count in range(2, MOST_SEEDS) if _half_of(deviation, count) <= share), MOST_SEEDS
    )


def have_parted(runs: Mapping[Entry, Mapping[str, Sequence[Figures]]]) -> bool:
    """Tell whether more seeds would change no group of the mean over traces: each scheduler that is
    tied with the best of its group differs from it by `TIED_WITHIN` at most, or is that one."""
    means = {
        entry.name: np.mean([_in_time(own) for own in of_trace.values()], axis=0)
        for entry, of_trace in runs.items()
    }
    best: dict[int, str] = {}
    for name, group in groups(means).items():
        differences = means[best.setdefault(group, name)] - means[name]
        if float(differences.mean()) + _half(differences) > TIED_WITHIN and best[group] != name:
            return False
    return True


def _in_time(runs: Sequence[Figures]) -> Floats:
    return np.array([one.in_time for one in runs])


def _worse(differences: Floats) -> bool:
    return float(differences.mean()) - _half(differences) > 1e-12  # a smaller one is rounding


def _half(values: Floats) -> float:
    """Return half the width of the mean's interval."""
    return _half_of(float(values.std(ddof=1)), len(values))


def _half_of(deviation: float, count: int) -> float:
    return float(special.stdtrit(count - 1, (1 + CONFIDENCE) / 2) * deviation / math.sqrt(count))


def _means(runs: Sequence[Figures]) -> dict[str, float]:
    """Return the mean of each figure over seeds, of those that have it."""
    means = {}
    for name in Figures.__slots__:
        values = [float(getattr(one, name)) for one in runs]
        present = [value for value in values if not math.isnan(value)]
        means[name] = sum(present) / len(present) if present else math.nan
    return means
