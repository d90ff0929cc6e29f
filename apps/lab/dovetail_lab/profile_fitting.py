"""`profile_of`: fits a profile to the steps that `calibrate` has measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import log2
from typing import Any

import numpy as np

from dovetail_lab.calibration_grid import TOGETHER
from dovetail_lab.rehearsal import as_rehearsed
from dovetail_lab.rig import Sighting
from dovetail_lab.step_profile import StepTimeProfile
from dovetail_lab.step_time import LaunchRule, StepShape
from dovetail_lab.step_timing import DeviceTimes, Timed, counts_as_launched, spread, timed

HELD_OUT = 5  # every fifth measurement is excluded from the fit and evaluates it
SETTLING = 2  # decode steps after a change that aren't measured


def profile_of(sightings: Sequence[Sighting], overlapped: bool, **papers: Any) -> StepTimeProfile:
    """Fit a profile to `sightings`, in order, a rehearsal's last. `overlapped`: steps were
    submitted while the device was busy. `papers`: other fields of the profile. Raises `ConfigError`
    if there are too few to fit anything."""
    grid = [sighting for sighting in sightings if not sighting.rehearsed]
    steps = list(timed(grid, overlapped))
    cells = _cells(steps)
    kept = [cell for index, cell in enumerate(cells) if index % HELD_OUT != HELD_OUT // 2]
    judges = cells[HELD_OUT // 2 :: HELD_OUT]
    times = DeviceTimes.fit(kept)
    profile = StepTimeProfile(
        step_time=times.step_time.model_dump(mode="json"),
        launch=None if times.launch is None else times.launch.model_dump(mode="json"),
        launch_spread=times.launch_spread(step for step in steps if counts_as_launched(step)),
        after_launch_s=times.rule.after_launch_s,
        recorded_tokens=times.rule.recorded_tokens,
        sampling_share=times.rule.sampling_share,
        copying_share=times.rule.copying_share,
        error=round(float(np.abs(times.errors(judges)).mean()), 4),
        judged_on=f"{len(judges)} of {len(cells)} measurements that were excluded from the fit",
        **_core_times(grid, times.rule),
        **papers,
    )
    return as_rehearsed(profile, sightings, overlapped)


def _cells(steps: Sequence[Timed]) -> list[list[tuple[Timed, ...]]]:
    """Return runs of decodes and steps with prefills, repetitions grouped. Chunks without a sampled
    token are excluded: with decodes there are none, and both they and their launches are
    shorter."""
    cells: dict[tuple[Any, ...], list[tuple[Timed, ...]]] = defaultdict(list)
    for first, last in _spans([step.shape for step in steps]):
        measured = tuple(steps[first:last])
        if all(step.yields_token and step.computed_s(LaunchRule()) > 0 for step in measured):
            cells[_cell(measured[0].shape)].append(measured)
    return list(cells.values())


def _spans(shapes: Sequence[StepShape]) -> Iterator[tuple[int, int]]:
    """Yield [first, last) of the steps of each measurement."""
    # decodes of the same rows in a row
    index = 0
    settled = 0
    while index < len(shapes):
        shape = shapes[index]
        following = shapes[index + 1 : index + TOGETHER]
        if shape.prefill_rows:
            settled = 0
            yield index, index + 1
            index += 1
        elif (
            settled >= SETTLING
            and len(following) == TOGETHER - 1
            and all(_same_decodes(shape, other) for other in following)
        ):
            yield index, index + TOGETHER
            index += TOGETHER
        else:
            settled = settled + 1 if index and _same_decodes(shape, shapes[index - 1]) else 0
            index += 1


def _same_decodes(shape: StepShape, other: StepShape) -> bool:
    return not shape.prefill_rows and not other.prefill_rows and shape.rows == other.rows


def _cell(shape: StepShape) -> tuple[Any, ...]:
    """Return the key of repeated measurements; they differ only by a few tokens generated
    meanwhile, or a few added decodes."""
    own = (shape.prefill_rows, shape.prefill_tokens, shape.prefill_pairs)
    decodes = (
        round(4 * log2(shape.decodes)) if shape.prefill_rows and shape.decodes else shape.decodes
    )
    return (decodes, round(4 * log2(shape.context_tokens)), *own)


def _core_times(sightings: Sequence[Sighting], rule: LaunchRule) -> dict[str, Any]:
    """Return the core's own times: those of planning and delivering."""
    decodes = [
        sighting for sighting in sightings if not sighting.shape.prefill_rows and sighting.delivered
    ]
    rows = np.array([sighting.shape.rows for sighting in decodes])
    core_s, core_per_row_s = fitted_line(
        rows, [sighting.submitted - sighting.planned for sighting in decodes]
    )
    results_s, results_per_row_s = fitted_line(
        rows, [sighting.delivered - sighting.ended for sighting in decodes]
    )
    fitted = (core_s + core_per_row_s * sighting.shape.rows for sighting in sightings)
    measured = (
        (rule.regime(sighting.shape), sighting.submitted - sighting.planned)
        for sighting in sightings
    )
    return {
        "core_s": core_s,
        "core_per_row_s": core_per_row_s,
        "core_spread": spread(
            (*one, seconds) for one, seconds in zip(measured, fitted, strict=True)
        )
        if core_s or core_per_row_s
        else None,
        "results_s": results_s,
        "results_per_row_s": results_per_row_s,
    }


def fitted_line(rows: np.ndarray[Any, Any], seconds: Sequence[float]) -> tuple[float, float]:
    """Return offset and slope of a line through the medians at each number of rows, neither
    negative."""
    counts = np.unique(rows)
    medians = np.array([np.median(np.array(seconds)[rows == count]) for count in counts])
    slope = max(0.0, float(np.polyfit(counts, medians, 1)[0])) if len(counts) > 1 else 0.0
    return max(0.0, float((medians - slope * counts).mean())), slope
