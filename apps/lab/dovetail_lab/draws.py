"""Bootstrap resampling for comparisons, the same draws for both policies: whole runs if there are
enough independent ones (`SeedDraws`), otherwise blocks of consecutive requests (`BlockDraws`).
Requests of one run share queues, batches and the KV pool, so none is drawn separately.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dovetail_lab.pairs import Floats, Pairs, Statistic
from dovetail_lab.ranked import Ranked

MIN_SEEDS = 5  # with fewer runs, resampling them is meaningless
_ROUNDING = 1e-9  # logarithms below this are rounding errors
_CELLS = 200_000  # weights generated at once, to fit a processor's cache


class Draws(Protocol):
    """A way to resample both policies' runs together."""

    @property
    def units(self) -> int:
        """Number of independent units to draw from; the fewer, the wider the interval."""

    def logs(self, runs: Sequence[Pairs], statistics: Sequence[Statistic]) -> Floats:
        """Return log(b / a) of each statistic in each resample: [statistics, resamples]."""


@dataclass(frozen=True, slots=True)
class SeedDraws:
    """Resamples whole runs, which are independent replications, with replacement."""

    seeds: int
    resamples: int
    seed: int

    @property
    def units(self) -> int:
        return self.seeds

    def logs(self, runs: Sequence[Pairs], statistics: Sequence[Statistic]) -> Floats:
        return np.stack([self.of_scalars(*per_run(runs, statistic)) for statistic in statistics])

    def of_scalars(self, a: Floats, b: Floats) -> Floats:
        """Resample metrics with one number per run: a[run], b[run]."""
        drawn = np.random.default_rng(self.seed).integers(
            0, self.seeds, (self.resamples, self.seeds)
        )
        return log_ratio(a[drawn].mean(axis=1), b[drawn].mean(axis=1))


@dataclass(frozen=True, slots=True)
class BlockDraws:
    """Resamples blocks of `length` consecutive requests with replacement from each run, treated as
    a circle (Politis and Romano 1992, "A circular block-resampling procedure for stationary data").
    `same_traffic`: the runs hold the same requests, so one draw serves all."""

    length: int
    requests: int  # in a run
    resamples: int
    seed: int
    same_traffic: bool = False

    @property
    def units(self) -> int:
        return max(1, self.requests // self.length)

    def logs(self, runs: Sequence[Pairs], statistics: Sequence[Statistic]) -> Floats:
        total = np.zeros((2, len(statistics), self.resamples))
        for index, run in enumerate(runs):
            seed = self.seed if self.same_traffic else [self.seed, index]
            sides = [Ranked.of(run.a, run.requests), Ranked.of(run.b, run.requests)]
            done = 0
            for weights in self._weights(run.requests, np.random.default_rng(seed)):
                span = slice(done, done + len(weights))
                for side, ranked in enumerate(sides):
                    total[side, :, span] += ranked.statistics(weights, statistics)
                done = span.stop
        return log_ratio(total[0], total[1])

    def _weights(self, requests: int, rng: np.random.Generator) -> Iterator[npt.NDArray[np.int32]]:
        """Yield the number of times that each request of a run was drawn, some resamples at a
        time."""
        length = max(1, min(self.length, requests))
        blocks = math.ceil(requests / length)
        at_once = max(1, _CELLS // max(1, requests))
        for begin in range(0, self.resamples, at_once):
            rows = min(at_once, self.resamples - begin)
            starts = rng.integers(0, requests, (rows, blocks))
            steps = np.zeros((rows, 2 * requests + 1), np.int32)
            row = np.arange(rows)[:, None]
            np.add.at(steps, (row, starts), 1)
            np.add.at(steps, (row, starts + length), -1)
            counts = np.cumsum(steps[:, :-1], axis=1, dtype=np.int32)
            yield counts[:, :requests] + counts[:, requests:]


def per_run(runs: Sequence[Pairs], statistic: Statistic) -> tuple[Floats, Floats]:
    """Return the statistic of each run under both policies."""
    return np.array([statistic.of(run.a.numbers) for run in runs]), np.array(
        [statistic.of(run.b.numbers) for run in runs]
    )


def log_ratio(a: Floats, b: Floats) -> Floats:
    """Return log(b / a): 0 if both are equal up to rounding, or both 0; not finite if only one is
    0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(a == b, 0.0, np.log(b) - np.log(a))
    return np.where(np.abs(logs) < _ROUNDING, 0.0, logs)
