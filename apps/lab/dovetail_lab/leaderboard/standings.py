"""Ranking: scores with intervals over seeds, and groups of schedulers that the runs can't tell
apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dovetail_lab.leaderboard.board import Entry, Figures
from dovetail_lab.power import anytime_count, anytime_half
from dovetail_lab.statistics import half_of

CONFIDENCE = 0.95
ALL = "all"  # the mean over the traces
_ROUNDING = 1e-12  # a smaller difference is a rounding error

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
    by_entry = {entry: _scores(of_trace) for entry, of_trace in runs.items()}
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
    found: dict[str, int] = {}
    group = 0
    best = ""
    for name in _ordered(scores):
        if not best or _worse(scores[best] - scores[name]):
            group += 1
            best = name
        found[name] = group
    return found


@dataclass(frozen=True, slots=True)
class Lead:
    """Lead of a scheduler over the next one: the difference of their means over the traces, with an
    interval that stays valid while seeds are added (`power.anytime_half`)."""

    name: str
    next: str
    mean: float
    half: float
    deviation: float  # of a seed's difference
    count: int  # seeds

    @property
    def seeds(self) -> float:
        """Number of seeds with which the two are apart if the lead stays as it is; infinite for very
        many."""
        return anytime_count(self.deviation, self.mean, self.count, CONFIDENCE)

    def seeds_within(self, share: float) -> float:
        """Return the number of seeds with which they are shown to be within `share`, likewise."""
        return anytime_count(self.deviation, share - self.mean, self.count, CONFIDENCE)

    @property
    def same(self) -> bool:
        """True if no seed has shown any difference."""
        return self.mean + self.half <= _ROUNDING

    @property
    def apart(self) -> bool:
        """True if the one is measurably better than the next."""
        return self.mean - self.half > _ROUNDING

    def within(self, share: float) -> bool:
        """Return True if the two measurably differ by no more than `share`."""
        return self.mean + self.half <= share

    def is_open(self, share: float) -> bool:
        """Return True if the two are neither told apart nor shown to be within `share`."""
        return not (self.same or self.apart or self.within(share))


def leads(runs: Mapping[Entry, Mapping[str, Sequence[Figures]]]) -> list[Lead]:
    """Return the lead of each scheduler but the last, the best first. `runs`: as of `rank`."""
    means = {entry.name: _scores(of_trace)[ALL] for entry, of_trace in runs.items()}
    return [
        _lead(one, next_, means[one] - means[next_]) for one, next_ in pairwise(_ordered(means))
    ]


def _lead(name: str, next_: str, differences: Floats) -> Lead:
    mean = float(differences.mean())
    deviation = float(differences.std(ddof=1))
    return Lead(
        name,
        next_,
        mean,
        anytime_half(deviation, len(differences), CONFIDENCE),
        deviation,
        len(differences),
    )


def _ordered(scores: Mapping[str, Floats]) -> list[str]:
    return sorted(scores, key=lambda name: (-float(scores[name].mean()), name))


def _scores(runs: Mapping[str, Sequence[Figures]]) -> dict[str, Floats]:
    """Return the scores of one scheduler, [seeds], by trace, and of `ALL`."""
    scores = {trace: np.array([one.in_time for one in own]) for trace, own in runs.items()}
    return scores | {ALL: np.mean([*scores.values()], axis=0)}


def _worse(differences: Floats) -> bool:
    return float(differences.mean()) - _half(differences) > _ROUNDING


def _half(values: Floats) -> float:
    """Return half the width of the mean's interval."""
    return half_of(float(values.std(ddof=1)), len(values), CONFIDENCE)


def _means(runs: Sequence[Figures]) -> dict[str, float]:
    """Return the mean of each figure over seeds, of those that have it."""
    means = {}
    for name in Figures.__slots__:
        values = [float(getattr(one, name)) for one in runs]
        present = [value for value in values if not math.isnan(value)]
        means[name] = sum(present) / len(present) if present else math.nan
    return means
