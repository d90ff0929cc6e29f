"""Timing of sighted steps: how long each was on the device, how much of that was waiting for
launches, and the profile's times fitted to many.

The core sees a step's end when it polls, which may be much later, since it doesn't poll while
launching the next step. So an end counts as observed only if the core waited for it; otherwise it
is derived from the previous end, since steps run one after the other and each one's own duration is
exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import Any

import numpy as np

from dovetail.api.token_sizes import padded_sizes, row_sizes
from dovetail_lab.fitting import Measurement, relative_errors
from dovetail_lab.regime_fitting import (
    BOUNDARIES,
    ENOUGH,
    WORTH,
    corrected,
    fit_decodes,
    fit_launches,
    fit_regimes,
)
from dovetail_lab.rig import Sighting
from dovetail_lab.step_profile import LEVELS, Spread
from dovetail_lab.step_time import LaunchRule, Regime, RegimeStepTime, StepShape

WAITED_S = 3e-5  # after a shorter wait, the step may have ended before
# share of its time: a step that ends this soon after its launch was bound by it
LAUNCH_BOUND = 0.15
HICCUP = 1.6  # multiple of the median launch of steps of about the same size
LEAST_LAUNCH_S = 1e-6  # shorter launches aren't measurable
LEAST_COMPUTED = 0.01  # share of its time: a step that computes less was misinterpreted
IN_TIME = 6  # decode steps of a cell: if this many were launched in time, the others aren't needed
LATE = 0.5  # share of its launch: with that delay, all computation during the launch is visible
SPREAD_OVER = 50  # steps; with fewer the variation is unknown

Cells = Sequence[Sequence[tuple["Timed", ...]]]  # repetitions of the same together


@dataclass(frozen=True, slots=True)
class Timed:
    """One step on the device. Times in seconds."""

    shape: StepShape
    launch_s: float  # time to submit it
    waited_s: float  # from then until the device was free for it
    seconds: float  # from then until it had ended
    yields_token: bool = True  # any row yields a token
    # all its prompts had a row before, as far as recorded: its launch is shorter
    goes_on: bool = False

    @property
    def late_s(self) -> float:
        """Time for which the device was idle before the whole step was launched; negative if it was
        launched earlier."""
        return self.launch_s - self.waited_s

    @property
    def after_launch_s(self) -> float:
        return self.seconds - self.late_s

    def launch_bound(self, rule: LaunchRule) -> bool:
        """True if the step gives only an upper bound on its computing time."""
        return (
            rule.regime(self.shape) is Regime.LAUNCHED
            and self.late_s > 0
            and self.after_launch_s < LAUNCH_BOUND * self.seconds
        )

    def computed_s(self, rule: LaunchRule) -> float:
        return rule.computed_s(self.shape, self.seconds, self.late_s, self.launch_s)


def timed(sightings: Iterable[Sighting], overlapped: bool) -> Iterator[Timed]:
    """Yield the timed steps in order. Without overlap nothing is launched while the device is busy,
    so the executor's times are exact."""
    sightings = list(sightings)
    noted = any(sighting.added for sighting in sightings)
    before = -np.inf
    for sighting in sightings:
        seconds = sighting.ended - sighting.started
        goes_on = noted and not sighting.added and sighting.shape.prefill_rows > 0
        if not overlapped:
            yield Timed(sighting.shape, 0.0, 0.0, seconds, sighting.sampled != 0, goes_on)
            continue
        seen = sighting.ended - sighting.asked > WAITED_S
        before = (
            sighting.ended
            if seen
            else min(sighting.ended, max(sighting.submitted, before) + seconds)
        )
        waited_s = max(0.0, before - seconds - sighting.submitted)
        yield Timed(
            sighting.shape,
            sighting.launched - sighting.submitted,
            waited_s,
            seconds,
            sighting.sampled != 0,
            goes_on,
        )


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """A profile's `step_time` and `launch`, and the launch rule for both."""

    step_time: RegimeStepTime
    launch: RegimeStepTime | None
    rule: LaunchRule

    @classmethod
    def fit(cls, cells: Cells) -> DeviceTimes:
        """Fit to repetitions of the same steps: by the median of steps, and the mean of launches,
        since each launch delays the next.

        Which steps are recorded graphs, and of which sizes, is unknown. So all possibilities are
        tried, and the best one is kept if it is clearly better than no graphs: a graph launched
        when the device was idle took longer than the same one launched before, by the time of the
        launch. Decodes, which don't depend on this, are fitted first.

        Raises `ConfigError` if decodes, or steps with prefills, are missing.
        """
        middle = [median(in_time(cell)) for cell in cells]
        begin = LaunchRule(copying_share=_copying_share(middle, cells))
        rows = _padded_rows(
            [_computed(one, begin) for one in middle if not one[0].shape.prefill_rows],
            bool(_launches(cells, begin)),
        )
        plain = cls._under(begin, middle, cells, rows)
        others = []
        for sizes in _sizes([one[0].shape.tokens for one in middle if one[0].shape.prefill_rows]):
            others.append(cls._under(begin, middle, cells, rows, sizes[-1], sizes))
            if plain.launch is not None:
                recorded = replace(begin, recorded_tokens=sizes[-1])
                others += [
                    cls._under(recorded, middle, cells, rows, sizes[-1], padded_to)
                    for padded_to in ((), sizes)
                ]
        best = min(others, key=lambda one: one._misfit(middle), default=plain)
        best = best if best._misfit(middle) < WORTH * plain._misfit(middle) else plain
        decode = corrected(best.step_time.decode, [_computed(one, best.rule) for one in middle])
        return replace(best, step_time=best.step_time.model_copy(update={"decode": decode}))

    @classmethod
    def _under(
        cls,
        rule: LaunchRule,
        middle: Sequence[tuple[Timed, ...]],
        cells: Cells,
        rows: Sequence[int],
        boundary: int | None = None,
        sizes: Sequence[int] = (),
    ) -> DeviceTimes:
        """Fit assuming this launch rule, except for its measured parts; decodes are padded to
        `rows`; other arguments as in `fit_regimes`."""
        bound = [one for one in middle if one[0].launch_bound(rule)]
        free = [one for one in middle if not one[0].launch_bound(rule)]

        def fitted(steps: Sequence[tuple[Timed, ...]], rule: LaunchRule) -> RegimeStepTime:
            return fit_regimes(
                [_computed(one, rule) for one in steps],
                [_computed(one, rule) for one in bound],
                boundary,
                sizes,
                rows,
            )

        late = [
            one
            for one in free
            if rule.regime(one[0].shape) is Regime.RECORDED and one[0].late_s > 0
        ]
        early = [
            one
            for one in free
            if one[0].late_s <= 0 or rule.regime(one[0].shape) is not Regime.RECORDED
        ]
        if late and sum(rule.regime(one[0].shape) is Regime.RECORDED for one in early) >= ENOUGH:
            model = fitted(early, rule)
            shares = [
                (model.seconds(one[0].shape) + one[0].late_s - one[0].seconds) / one[0].launch_s
                for one in late
            ]
            rule = replace(rule, sampling_share=min(max(0.0, float(np.median(shares))), 1.0))
        if bound:
            rule = replace(
                rule,
                after_launch_s=max(0.0, float(np.median([one[0].after_launch_s for one in bound]))),
            )
        launches = _launches(cells, rule)
        return cls(
            fitted(free, rule),
            fit_launches(launches, rule.recorded_tokens or None) if launches else None,
            rule,
        )

    def _misfit(self, steps: Iterable[tuple[Timed, ...]]) -> float:
        """Return the mean relative error, given the measured launch times."""
        return float(
            np.mean(
                [
                    abs(
                        sum(self._predicted(step, step.launch_s) for step in one) / _seconds(one)
                        - 1
                    )
                    for one in steps
                ]
            )
        )

    def errors(self, cells: Cells) -> list[float]:
        """Return (predicted - measured) / measured of each cell's device time."""
        middle = [median(cell) for cell in cells]
        return [
            sum(self._predicted(step, self._launch_s(step.shape)) for step in steps)
            / _seconds(steps)
            - 1
            for steps in middle
        ]

    def launch_spread(self, steps: Iterable[Timed]) -> Spread | None:
        """Return the spread of launches; None if launching takes no time."""
        return (
            None
            if self.launch is None
            else spread(
                (self.rule.regime(step.shape), step.launch_s, self._launch_s(step.shape))
                for step in steps
            )
        )

    def _launch_s(self, shape: StepShape) -> float:
        return 0.0 if self.launch is None else self.launch.seconds(shape)

    def _predicted(self, step: Timed, launch_s: float) -> float:
        seconds = self.step_time.seconds(step.shape)
        return (
            seconds
            if self.launch is None
            else self.rule.occupied_s(step.shape, seconds, launch_s - step.waited_s, launch_s)
        )


def counts_as_launched(step: Timed) -> bool:
    """Return True if a run waits for the step's launch: not for steps that sample nothing, or
    continue prompts without decodes."""
    return step.yields_token and (step.shape.decodes > 0 or not step.goes_on)


def spread(times: Iterable[tuple[Regime, float, float]]) -> Spread:
    """Return the spread of (regime, measured, fitted) seconds."""
    ratios: dict[Regime, list[float]] = defaultdict(list)
    for regime, measured, fitted in times:
        if fitted > 0:
            ratios[regime].append(measured / fitted)
    return Spread(
        **{regime.value: _means(own) for regime, own in ratios.items() if len(own) >= SPREAD_OVER}
    )


def _means(ratios: Sequence[float]) -> tuple[float, ...]:
    """Return the mean between each two of `LEVELS`, which preserves the overall mean."""
    sums = np.interp(
        LEVELS,
        np.linspace(0, 1, len(ratios) + 1),
        np.concatenate([[0.0], np.cumsum(np.sort(ratios))]),
    )
    means = np.diff(sums) / np.diff(LEVELS) / len(ratios)
    return tuple(float(f"{mean:.4g}") for mean in np.maximum(means, 0.0))


def median(cell: Sequence[tuple[Timed, ...]]) -> tuple[Timed, ...]:
    """Return the median of repetitions; for an even number the shorter of the middle two."""
    return sorted(cell, key=lambda steps: _seconds(steps) / len(steps))[(len(cell) - 1) // 2]


def in_time(cell: Sequence[tuple[Timed, ...]]) -> Sequence[tuple[Timed, ...]]:
    """Drop decodes that were launched late, if enough others are left: late ones' times are only
    inferred."""
    if cell[0][0].shape.prefill_rows:
        return cell
    kept = [tuple(step for step in steps if step.late_s <= 0) for steps in cell]
    return [steps for steps in kept if steps] if sum(map(len, kept)) >= IN_TIME else cell


def _copying_share(middle: Sequence[tuple[Timed, ...]], cells: Cells) -> float:
    """Estimate the share of launching decodes that the device doesn't wait for, by comparing steps
    launched late with the same ones launched in time."""
    decodes = [one for one in middle if not one[0].shape.prefill_rows]
    early = [one for one in decodes if all(step.late_s <= 0 for step in one)]
    steps = [
        step
        for cell in cells
        if not cell[0][0].shape.prefill_rows
        for steps in cell
        for step in steps
    ]
    late = [step for step in steps if step.late_s > LATE * step.launch_s]
    if min(len(early), len(late)) < ENOUGH:
        return 0.0
    model = fit_decodes(
        [_computed(one, LaunchRule()) for one in early],
        row_sizes(max(one[0].shape.rows for one in early)),
    )
    shares = [
        (model.seconds(step.shape) + step.late_s - step.seconds) / step.launch_s for step in late
    ]
    return min(max(0.0, float(np.median(shares))), 1.0)


def _padded_rows(decodes: Sequence[Measurement], launched: bool) -> tuple[int, ...]:
    """Return the sizes that decodes are padded to, or none. The default is kept unless the other
    explains the measured times clearly better."""
    # If only sizes were measured, both explain the same. If launching takes time, `LaunchRule` has
    # decodes replayed, from graphs of a few sizes: on an H200, 17 to 20 rows took as long as 24,
    # and a third longer than 16. Otherwise there is no sign of graphs.
    sizes = row_sizes(max((one.shapes[0].rows for one in decodes), default=1))
    usual, other = (sizes, ()) if launched else ((), sizes)
    errors = [
        float(np.abs(relative_errors(fit_decodes(decodes, padded_to), decodes)).mean())
        for padded_to in (usual, other)
    ]
    return other if errors[1] < WORTH * errors[0] else usual


def _seconds(steps: Sequence[Timed]) -> float:
    return sum(step.seconds for step in steps)


def _sizes(tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield padded numbers of tokens, up to each boundary with enough steps below, and up to the
    largest step."""
    largest = max(tokens, default=0)
    for boundary in (*(boundary for boundary in BOUNDARIES if boundary < largest), largest):
        if sum(count <= boundary for count in tokens) >= ENOUGH:
            yield padded_sizes(boundary)


def _computed(steps: tuple[Timed, ...], rule: LaunchRule) -> Measurement:
    seconds = sum(step.computed_s(rule) for step in steps)
    return Measurement(
        tuple(step.shape for step in steps), max(seconds, LEAST_COMPUTED * _seconds(steps))
    )


def _launches(cells: Cells, rule: LaunchRule) -> list[Measurement]:
    """Return each cell's mean launch without hiccups, compared with cells of about the same size,
    since a whole cell may be affected. Steps that continue prompts are excluded: their launches are
    shorter."""
    sizes: dict[tuple[Any, ...], list[list[Timed]]] = defaultdict(list)
    for cell in cells:
        shape = cell[0][0].shape
        # graphs often end at a power of two
        size = (
            rule.regime(shape),
            (shape.tokens - 1).bit_length(),
            round(log2(shape.rows)),
        )
        if not cell[0][0].goes_on:
            sizes[size].append([step for steps in cell for step in steps])
    launches = []
    for alike_cells in sizes.values():
        middle = float(
            np.median([np.median([step.launch_s for step in alike]) for alike in alike_cells])
        )
        for alike in alike_cells:
            usual = [step.launch_s for step in alike if step.launch_s <= HICCUP * middle]
            if usual and middle > LEAST_LAUNCH_S:
                launches.append(Measurement((alike[0].shape,), float(np.mean(usual))))
    return launches
