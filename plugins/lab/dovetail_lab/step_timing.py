"""What a sighted step says: how long the device had it, and how much of that it only waited for launches; and the profile's times, fitted on many.

A step's end is seen when the core asks for it, which may be long after: while the next step is launched nobody asks. So an end counts as seen only
where the core waited for it; else it follows from the end before, since steps run one after the other and each one's own duration is exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any

import numpy as np

from dovetail_lab.fitting import Measurement
from dovetail_lab.regime_fitting import fit_regimes
from dovetail_lab.rig import Sighting
from dovetail_lab.step_time import RegimeStepTime, StepShape, occupied_s

WAITED_S = 3e-5  # a wait that is shorter may have found the step ended
LAUNCH_BOUND = 0.15  # of its time: a step that ends so soon after its launching was as long as that, whatever it computed
HICCUP = 1.6  # times the median of launching steps of about the same size
LEAST_LAUNCH_S = 1e-6  # a core that hands over faster than this has nothing to measure


@dataclass(frozen=True, slots=True)
class Timed:
    """One step on the device. Seconds."""

    shape: StepShape
    launch_s: float  # that handing it over took
    waited_s: float  # from then on until the device was free for it
    seconds: float  # from then on until it had ended

    @property
    def late_s(self) -> float:
        """How long the device was free for it before all of it was launched; negative, if it was launched earlier."""
        return self.launch_s - self.waited_s

    @property
    def after_launch_s(self) -> float:
        return self.seconds - self.late_s

    @property
    def launch_bound(self) -> bool:
        """Whether nothing is known of what a step with prefills computes but that it takes no longer."""
        return bool(self.shape.prefill_rows) and self.late_s > 0 and self.after_launch_s < LAUNCH_BOUND * self.seconds

    @property
    def computed_s(self) -> float:
        """A replayed step begins when it is launched; others are computed meanwhile."""
        return self.seconds if self.shape.prefill_rows else self.seconds - max(self.late_s, 0.0)


def timed(sightings: Iterable[Sighting], overlapped: bool) -> Iterator[Timed]:
    """In order. Without overlap nothing is launched while the device is busy: a step takes as long as the executor says."""
    before = -np.inf
    for sighting in sightings:
        seconds = sighting.ended - sighting.started
        if not overlapped:
            yield Timed(sighting.shape, 0.0, 0.0, seconds)
            continue
        seen = sighting.ended - sighting.asked > WAITED_S
        before = sighting.ended if seen else min(sighting.ended, max(sighting.submitted, before) + seconds)
        waited_s = max(0.0, before - seconds - sighting.submitted)
        yield Timed(sighting.shape, sighting.launched - sighting.submitted, waited_s, seconds)


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """A profile's `step_time`, `launch` and `after_launch_s`."""

    step_time: RegimeStepTime
    launch: RegimeStepTime | None
    after_launch_s: float

    @classmethod
    def fit(cls, cells: Sequence[Sequence[tuple[Timed, ...]]]) -> DeviceTimes:
        """On repetitions of the same: of steps the median counts, of launching the mean, since each one delays the next.

        Raises `ConfigError` if decodes, or steps with prefills, are missing.
        """
        middle = [median(cell) for cell in cells]
        free = [one for one in middle if not one[0].launch_bound]
        bound = [one for one in middle if one[0].launch_bound]
        step_time = fit_regimes([_computed(one) for one in free], at_most=[_computed(one) for one in bound])
        launches = _launches(cells)
        after_s = float(np.median([one[0].after_launch_s for one in bound])) if bound else 0.0
        return cls(step_time, fit_regimes(launches) if launches else None, max(0.0, after_s))

    def errors(self, cells: Iterable[Sequence[tuple[Timed, ...]]]) -> list[float]:
        """(predicted - measured) / measured of the time that the device had each."""
        middle = [median(cell) for cell in cells]
        return [sum(map(self._predicted, steps)) / sum(step.seconds for step in steps) - 1 for steps in middle]

    def _predicted(self, step: Timed) -> float:
        seconds = self.step_time.seconds(step.shape)
        if self.launch is None:
            return seconds
        return occupied_s(step.shape, seconds, self.launch.seconds(step.shape) - step.waited_s, self.after_launch_s)


def median(cell: Sequence[tuple[Timed, ...]]) -> tuple[Timed, ...]:
    """Of repetitions the one in the middle."""
    return sorted(cell, key=lambda steps: sum(step.seconds for step in steps))[len(cell) // 2]


def _computed(steps: tuple[Timed, ...]) -> Measurement:
    return Measurement(tuple(step.shape for step in steps), max(sum(step.computed_s for step in steps), 1e-9))


def _launches(cells: Iterable[Sequence[tuple[Timed, ...]]]) -> list[Measurement]:
    """Of each cell the mean, but for hiccups: against cells of about the same size, since a whole cell may have had a bad time."""
    sizes: dict[tuple[Any, ...], list[list[Timed]]] = defaultdict(list)
    for cell in cells:
        shape = cell[0][0].shape
        size = bool(shape.prefill_rows), round(log2(shape.tokens)), round(log2(shape.rows))
        sizes[size].append([step for steps in cell for step in steps])
    launches = []
    for alike_cells in sizes.values():
        middle = float(np.median([np.median([step.launch_s for step in alike]) for alike in alike_cells]))
        for alike in alike_cells:
            usual = [step.launch_s for step in alike if step.launch_s <= HICCUP * middle]
            if usual and middle > LEAST_LAUNCH_S:
                launches.append(Measurement((alike[0].shape,), float(np.mean(usual))))
    return launches
