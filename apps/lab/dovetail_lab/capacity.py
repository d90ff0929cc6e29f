"""`find_capacity`: search for the highest arrival rate at which an engine meets its objectives.
Doubling brackets it; then the bracket is halved, on a log scale, to a given tolerance.

The search assumes that an objective missed at one rate is missed at every higher one. A finite
trace doesn't guarantee that, so probes next to the result and all rates tried are checked. If it
doesn't hold, the answer is the highest rate below every failure, with a note.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dovetail.errors import ConfigError
from dovetail_lab.records import RunResult
from dovetail_lab.slo import Judgement, Objective

MAX_DOUBLINGS = 12  # in each direction from the start
# multiples of the rate found: those below 1 must pass, the other must fail
PROBES = (
    0.5,
    0.8,
    1.25,
)


@dataclass(frozen=True, slots=True)
class Trial:
    """Outcome of each objective at one rate (a factor on the workload's own), over all seeds
    together."""

    scale: float
    judged: tuple[Judgement, ...]  # in the order of the objectives

    @property
    def met(self) -> bool:
        return all(judgement.met for judgement in self.judged)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Result of a search. `scale` is None if even the lowest rate tried fails. `open_ended`: the
    highest rate tried still passes, so the limit is unknown."""

    scale: float | None
    tolerance: float
    trials: tuple[Trial, ...]  # by rate
    open_ended: bool

    @property
    def monotone(self) -> bool:
        """True if no rate passed above one that failed."""
        failed = [trial.scale for trial in self.trials if not trial.met]
        return (
            not any(trial.met and trial.scale > min(failed) for trial in self.trials)
            if failed
            else True
        )


def find_capacity(
    run: Callable[[float], Sequence[RunResult]],
    objectives: Sequence[Objective],
    *,
    tolerance: float = 0.02,
    start: float = 1.0,
) -> Capacity:
    """Find the capacity. `run(scale)` returns the runs, one per seed, at `scale` times the
    workload's rate. `tolerance` is relative: the true limit is between the answer and (1 +
    tolerance) times it. Raises `ConfigError` for a tolerance outside 0.001 to 1, or a start <=
    0."""
    if not 0.001 <= tolerance <= 1:
        raise ConfigError(f"--tolerance: expected 0.001 to 1, got {tolerance:g}")
    if not 0 < start < math.inf:
        raise ConfigError(f"the rate to start from must be more than 0, got {start:g}")
    search = _Search(run, objectives, start)
    rate: float | None = start
    while rate is not None:
        search.try_rate(rate)
        rate = search.next_rate(tolerance)
    return Capacity(
        search.low,
        tolerance,
        tuple(sorted(search.trials.values(), key=lambda trial: trial.scale)),
        search.high == math.inf,
    )


class _Search:
    """The rates tried so far, which determine the next one."""

    def __init__(
        self,
        run: Callable[[float], Sequence[RunResult]],
        objectives: Sequence[Objective],
        start: float,
    ) -> None:
        self._run = run
        self._objectives = objectives
        self._start = start
        self.trials: dict[float, Trial] = {}

    @property
    def high(self) -> float:
        """Lowest rate that failed; infinity if none did."""
        return min(
            (trial.scale for trial in self.trials.values() if not trial.met), default=math.inf
        )

    @property
    def low(self) -> float | None:
        """Highest rate below `high` that passed."""
        return max(
            (
                trial.scale
                for trial in self.trials.values()
                if trial.met and trial.scale < self.high
            ),
            default=None,
        )

    def try_rate(self, scale: float) -> None:
        runs = self._run(scale)
        self.trials[scale] = Trial(
            scale, tuple(objective.judge(runs) for objective in self._objectives)
        )

    def next_rate(self, tolerance: float) -> float | None:
        """Return the next rate: double or halve to find a bracket, halve the bracket, then probe
        next to it; an unexpected probe moves it."""
        low = self.low
        high = self.high
        if low is None:
            return high / 2 if high > self._start / 2**MAX_DOUBLINGS else None
        if high == math.inf:
            return low * 2 if low < self._start * 2**MAX_DOUBLINGS else None
        if high / low > 1 + tolerance:
            return math.sqrt(low * high)
        return next((low * probe for probe in PROBES if low * probe not in self.trials), None)
