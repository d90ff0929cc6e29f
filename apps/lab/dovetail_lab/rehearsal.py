"""A short, ordinary run at the end of `calibrate`: it measures steps while requests come and go.

In the grid, the same steps repeat and nothing else happens between them. Here the engine's own
policy plans, requests are created between steps and end at any of them, and each delivery is
recorded: the loop is that of every run, and the same host code takes longer. The device also takes
a little longer: requests are copied to it and cleared from it. So the grid determines how times
grow with a step, and the rehearsal their level.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail import LLMEngine
from dovetail_lab.cache_layout import pool_tokens, windows_of
from dovetail_lab.feeding import Feeder
from dovetail_lab.recording import Recorder
from dovetail_lab.rig import Rig, Sighting, TimeIsUpError
from dovetail_lab.simulate import LEAD_S, drive
from dovetail_lab.step_profile import Spread, StepTimeProfile
from dovetail_lab.step_time import Regime, RegimeStepTime, StepShape
from dovetail_lab.step_timing import Timed, counts_as_launched, spread, timed
from dovetail_lab.traces.request import Trace
from dovetail_lab.workloads import load_workload

if TYPE_CHECKING:
    from dovetail.serving import Delivery

SETTLING = 1 / 6  # share of a rehearsal that is discarded
ROWS = 12  # decoding on average; 8 to 16 by chance
# maximum per request: prompts arrive one by one, after decodes, when the host's code is cold
PROMPT_TOKENS = 900
OUTPUT_TOKENS = 300
LEAST = 1 / 20, 1 / 6  # minimum, as a share of these
ROOM = 3  # the KV pool holds this multiple of the rows at maximum length
BUSY = 0.25  # maximum share of the time in steps with prompts
FEWEST = 10  # requests, even on a slow engine
ENOUGH = 20  # steps; the median of fewer is unreliable


def rehearse(rig: Rig, profile: StepTimeProfile, seconds: float) -> list[float]:
    """Run a workload for `seconds` on the engine's clock, as dense as `profile` predicts that the
    engine can sustain. Its steps are added to `rig.sightings`. Returns the seconds spent on
    creating each request, from the end of one step's results until the next could be planned.
    Raises the error that ended the engine.

    The planning of a step starts when the core is free: after the previous results are delivered,
    so that recording them counts; or after requests were created, or the core has slept, which a
    simulation accounts for separately.
    """
    rig.give_back()
    engine = rig.engine
    core = rig.engine.core
    probe = rig.probe
    trace = workload(engine, profile, seconds)
    start, first = engine.now() + LEAD_S, len(probe.collected)
    settled = start + SETTLING * seconds
    recorder = Recorder(core, trace, start)
    feeder = Feeder(engine, None, trace, start, recorder.refused)
    taking_in: list[float] = []
    # requests created; when the loop started on them; finished steps
    taken, free, seen = (
        0,
        engine.now(),
        first,
    )

    def fed() -> None:
        nonlocal taken
        if feeder.taken > taken:
            probe.planned = engine.now()
            if free > settled:
                taking_in.append((probe.planned - free) / (feeder.taken - taken))
            taken = feeder.taken

    def wait_until(instant: float) -> None:
        core.clock.wait_until(instant)
        probe.planned = engine.now()

    def take(delivery: Delivery) -> None:
        nonlocal free, seen
        probe.planned = engine.now()  # handling a delivery delays the next plan
        for sighting in probe.collected[seen:]:
            sighting.delivered = probe.planned
        seen = len(probe.collected)
        recorder.take(delivery)
        free = engine.now()
        if free > start + seconds:
            raise TimeIsUpError

    with suppress(TimeIsUpError):  # don't wait for requests unfinished at the last arrival
        drive(core, feeder, fed, take, wait_until)
    kept = [
        sighting
        for sighting in probe.collected[first:]
        if sighting.planned > settled and sighting.delivered
    ]
    for sighting in kept:
        sighting.rehearsed = True
    probe.collected[first:] = kept
    return taking_in


def workload(engine: LLMEngine, profile: StepTimeProfile, seconds: float) -> Trace:
    """Return a workload with all lengths that fit the engine, at a rate that keeps about `ROWS`
    requests decoding."""
    capacity = engine.capacity
    config = engine.config
    rows = max(1, min(ROWS, config.max_num_seqs // 2))
    windows = windows_of(capacity.layout)
    room = min(
        capacity.max_model_len,
        pool_tokens(capacity.layout, capacity.num_pages, ROOM * rows) // (ROOM * rows),
    )
    prompt = max(2, min(PROMPT_TOKENS, room * 2 // 3, config.max_num_batched_tokens))
    output = max(2, min(OUTPUT_TOKENS, room // 4))
    least_prompt, least_output = (
        max(1, int(share * most)) for share, most in zip(LEAST, (prompt, output), strict=True)
    )
    mean_output = (least_output + output) / 2
    had = np.full(rows, (prompt + output) // 2)
    decode_s = _step_s(profile, StepShape.of(np.ones(rows, np.int64), had, windows))
    prefill_s = _step_s(
        profile,
        StepShape.of(
            np.append(np.ones(rows, np.int64), max(2, prompt // 2)), np.append(had, 0), windows
        ),
    )
    # In a second there are `rate` steps with a prompt and (1 - rate * prefill_s) / decode_s others;
    # each generates a token per row, and the supply must equal the demand, rate * mean_output.
    rate = rows / decode_s / max(1.0, mean_output - rows + rows * prefill_s / decode_s)
    rate = max(min(rate, BUSY / prefill_s), FEWEST / seconds)
    lengths = f"prompt=uniform({least_prompt}, {prompt}) output=uniform({least_output}, {output})"
    return load_workload(f"arrivals=poisson({rate:.6f}) duration={seconds} {lengths} clients=3")


def _step_s(profile: StepTimeProfile, shape: StepShape) -> float:
    """Return the time of the slower of device and host."""
    launch = profile.make_launch()
    launch_s = 0.0 if launch is None else launch.seconds(shape)
    return max(
        profile.make().seconds(shape),
        profile.planning_s(shape.rows) + launch_s + profile.delivering_s(shape.rows),
    )


def as_rehearsed(
    profile: StepTimeProfile, sightings: Sequence[Sighting], overlapped: bool
) -> StepTimeProfile:
    """Return the grid's `profile` adjusted to the rehearsed `sightings`, where there are enough of
    them: the host's times are multiplied by the ratio of measured to fitted, by its median if there
    is a spread, which is then the rehearsal's, too, otherwise by its mean."""
    sightings = [sighting for sighting in sightings if sighting.rehearsed]
    decodes = [sighting for sighting in sightings if not sighting.shape.prefill_rows]
    if len(decodes) < ENOUGH:
        return profile
    core = _ratio(
        (sighting.submitted - sighting.planned, profile.planning_s(sighting.shape.rows))
        for sighting in decodes
    )
    delivering = sum(sighting.delivered - sighting.ended for sighting in sightings)
    fitted = sum(profile.delivering_s(sighting.shape.rows) for sighting in sightings)
    results = delivering / fitted if fitted else 1.0
    steps = [step for step in timed(sightings, overlapped) if counts_as_launched(step)]
    planning = [
        (one.shape, one.submitted - one.planned, core * profile.planning_s(one.shape.rows))
        for one in sightings
    ]
    updated = {
        "core_s": core * profile.core_s,
        "core_per_row_s": core * profile.core_per_row_s,
        "core_spread": _spread(profile, planning, profile.core_spread),
        "results_s": results * profile.results_s,
        "results_per_row_s": results * profile.results_per_row_s,
        "setup_s": _setup_s(profile, steps),
        **_launching(profile, steps),
    }
    return profile.model_copy(update=updated)


def _setup_s(profile: StepTimeProfile, steps: Sequence[Timed]) -> float:
    """Return the median difference between recorded steps with prefills, launched in time, and the
    grid's."""
    model = profile.make()
    rule = profile.rule
    recorded = [
        step
        for step in steps
        if rule.regime(step.shape) is Regime.RECORDED
        and step.late_s <= rule.sampling_share * step.launch_s
    ]
    return (
        max(0.0, float(np.median([step.seconds - model.seconds(step.shape) for step in recorded])))
        if len(recorded) >= ENOUGH
        else 0.0
    )


def _launching(profile: StepTimeProfile, steps: Sequence[Timed]) -> dict[str, Any]:
    """Return the profile's `launch`, which the grid has for starting prompts, its reduction for
    continued ones, and its spread."""
    if profile.launch is None:
        return {}
    launch = RegimeStepTime.model_validate(profile.launch)
    rule = profile.rule
    own: dict[Regime, list[tuple[float, float]]] = defaultdict(list)
    for step in steps:
        if not step.goes_on:
            own[rule.regime(step.shape)].append((step.launch_s, launch.seconds(step.shape)))
    ratios = {regime: _ratio(pairs) for regime, pairs in own.items() if len(pairs) >= ENOUGH}
    mixed = Regime.RECORDED if rule.recorded_tokens else Regime.LAUNCHED
    parts = {"decode": Regime.DECODE, "mixed": mixed, "large": Regime.LAUNCHED}
    scaled = {
        name: part.scaled(ratios.get(regime, 1.0))
        for name, regime in parts.items()
        if (part := getattr(launch, name)) is not None
    }
    launch = launch.model_copy(update=scaled)
    less = [launch.seconds(step.shape) - step.launch_s for step in steps if step.goes_on]
    updated = {
        "launch": launch.model_dump(mode="json"),
        "joining_s": max(0.0, float(np.median(less))) if len(less) >= ENOUGH else 0.0,
    }
    fitted = profile.model_copy(update=updated)
    times = [
        (step.shape, step.launch_s, fitted.launching_s(launch, step.shape, joins=not step.goes_on))
        for step in steps
    ]
    return {**updated, "launch_spread": _spread(profile, times, profile.launch_spread)}


def _ratio(times: Iterable[tuple[float, float]]) -> float:
    """Return the median of measured over fitted seconds; 1 if nothing was fitted."""
    ratios = [measured / fitted for measured, fitted in times if fitted > 0]
    return float(np.median(ratios)) if ratios else 1.0


def _spread(
    profile: StepTimeProfile,
    times: Iterable[tuple[StepShape, float, float]],
    otherwise: Spread | None,
) -> Spread | None:
    """Return the spread of (shape, measured, fitted seconds). `otherwise`: the grid's, for kinds
    with too few steps; None if it is None."""
    found = spread(
        (profile.rule.regime(shape), measured, fitted) for shape, measured, fitted in times
    )
    return (
        None
        if otherwise is None
        else otherwise.model_copy(
            update={regime.value: found.of(regime) for regime in Regime if found.of(regime)}
        )
    )
