"""A short, ordinary run, with which `calibrate` ends: it measures steps while requests come and go.

In the grid the same steps come again and again, and nothing else happens between them. Here the engine's own policy plans, requests are made between
steps and end at any of them, and each delivery is recorded: the loop is that of every run, and the same host code takes longer. The device takes a
little longer, too: requests are copied to it and cleared from it. So the grid says how times grow with a step, and the rehearsal how long they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail import LLMEngine
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
    from dovetail.engine.flight import Delivery

SETTLING = 1 / 6  # the share of a rehearsal that doesn't count
ROWS = 12  # that decode, on average: some 8 to 16, as chance will have it
PROMPT_TOKENS, OUTPUT_TOKENS = 900, 300  # the most that a request has: prompts come one by one, after decodes, and find the host's code cold
LEAST = 1 / 20, 1 / 6  # of these
ROOM = 3  # times as many rows, each of the longest, have room in the KV pool
BUSY = 0.25  # at most this share of the time goes into steps with prompts
FEWEST = 10  # requests, however slow the engine is
ENOUGH = 20  # steps: of fewer the middle tells too little


def rehearse(rig: Rig, profile: StepTimeProfile, seconds: float) -> list[float]:
    """A workload of so many seconds on the engine's clock, as dense as `profile` says that the engine can take. Its steps join `rig.sightings`;
    returned are the seconds that making each request took, from the end of one step's results until the next could be planned. Raises what ended
    the engine.

    A step is planned from when the core is free for it: when the results before are delivered, so that recording them counts; or when requests
    were made, or it has slept, which a simulation accounts for by themselves.
    """
    rig.give_back()
    engine, core, probe = rig.engine, rig.engine.core, rig.probe
    trace = workload(engine, profile, seconds)
    start, first = engine.now() + LEAD_S, len(probe.collected)
    settled = start + SETTLING * seconds
    recorder = Recorder(core, trace, start)
    feeder = Feeder(engine, None, trace, start, recorder.refused)
    taking_in: list[float] = []
    taken, free, seen = 0, engine.now(), first  # requests made; when the loop turned to them; steps whose results are in

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
        probe.planned = engine.now()  # what is done with a delivery delays the next plan
        for sighting in probe.collected[seen:]:
            sighting.delivered = probe.planned
        seen = len(probe.collected)
        recorder.take(delivery)
        free = engine.now()
        if free > start + seconds:
            raise TimeIsUpError

    core.plan_timing.wait_until = wait_until
    with suppress(TimeIsUpError):  # who is still there when the last has arrived isn't waited for
        drive(core, feeder, fed, take)
    kept = [sighting for sighting in probe.collected[first:] if sighting.planned > settled and sighting.delivered]
    for sighting in kept:
        sighting.rehearsed = True
    probe.collected[first:] = kept
    return taking_in


def workload(engine: LLMEngine, profile: StepTimeProfile, seconds: float) -> Trace:
    """Prompts and answers of any length that the engine has room for, at a rate that keeps about `ROWS` requests decoding."""
    capacity, config = engine.capacity, engine.config
    rows = max(1, min(ROWS, config.max_num_seqs // 2))
    room = min(capacity.max_model_len, capacity.num_blocks * capacity.layout.block_size // (ROOM * rows))
    prompt = max(2, min(PROMPT_TOKENS, room * 2 // 3, config.max_num_batched_tokens))
    output = max(2, min(OUTPUT_TOKENS, room // 4))
    least_prompt, least_output = (max(1, int(share * most)) for share, most in zip(LEAST, (prompt, output), strict=True))
    mean_output = (least_output + output) / 2
    had = np.full(rows, (prompt + output) // 2)
    decode_s = _step_s(profile, StepShape.of(np.ones(rows, np.int64), had))
    prefill_s = _step_s(profile, StepShape.of(np.append(np.ones(rows, np.int64), max(2, prompt // 2)), np.append(had, 0)))
    # In a second there are `rate` steps with a prompt and (1 - rate * prefill_s) / decode_s others; each gives every row a token, and what is given
    # is what is asked for, rate * mean_output.
    rate = rows / decode_s / max(1.0, mean_output - rows + rows * prefill_s / decode_s)
    rate = max(min(rate, BUSY / prefill_s), FEWEST / seconds)
    lengths = f"prompt=uniform({least_prompt}, {prompt}) output=uniform({least_output}, {output})"
    return load_workload(f"arrivals=poisson({rate:.6f}) duration={seconds} {lengths} clients=3")


def _step_s(profile: StepTimeProfile, shape: StepShape) -> float:
    """Return the time of the slower one, device or host."""
    launch = profile.make_launch()
    launch_s = 0.0 if launch is None else launch.seconds(shape)
    return max(profile.make().seconds(shape), profile.planning_s(shape.rows) + launch_s + profile.delivering_s(shape.rows))


def as_rehearsed(profile: StepTimeProfile, sightings: Sequence[Sighting], overlapped: bool) -> StepTimeProfile:
    """The grid's `profile`, changed by those of `sightings` that were rehearsed, where there are enough of them: the host's times are multiplied by
    what they took of it, in the middle where there is a spread, which is theirs, too, and on average where there is none."""
    sightings = [sighting for sighting in sightings if sighting.rehearsed]
    decodes = [sighting for sighting in sightings if not sighting.shape.prefill_rows]
    if len(decodes) < ENOUGH:
        return profile
    core = _ratio((sighting.submitted - sighting.planned, profile.planning_s(sighting.shape.rows)) for sighting in decodes)
    delivering = sum(sighting.delivered - sighting.ended for sighting in sightings)
    fitted = sum(profile.delivering_s(sighting.shape.rows) for sighting in sightings)
    results = delivering / fitted if fitted else 1.0
    steps = [step for step in timed(sightings, overlapped) if counts_as_launched(step)]
    planning = [(one.shape, one.submitted - one.planned, core * profile.planning_s(one.shape.rows)) for one in sightings]
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
    """Return the median of how much longer recorded steps with prefills, launched in time, took than the grid's."""
    model, rule = profile.make(), profile.rule
    recorded = [step for step in steps if rule.regime(step.shape) is Regime.RECORDED and step.late_s <= rule.sampling_share * step.launch_s]
    return max(0.0, float(np.median([step.seconds - model.seconds(step.shape) for step in recorded]))) if len(recorded) >= ENOUGH else 0.0


def _launching(profile: StepTimeProfile, steps: Sequence[Timed]) -> dict[str, Any]:
    """The profile's `launch`, which the grid has of prompts that begin, what less it is for those that go on, and its spread."""
    if profile.launch is None:
        return {}
    launch, rule = RegimeStepTime.model_validate(profile.launch), profile.rule
    own: dict[Regime, list[tuple[float, float]]] = defaultdict(list)
    for step in steps:
        if not step.goes_on:
            own[rule.regime(step.shape)].append((step.launch_s, launch.seconds(step.shape)))
    ratios = {regime: _ratio(pairs) for regime, pairs in own.items() if len(pairs) >= ENOUGH}
    mixed = Regime.RECORDED if rule.recorded_tokens else Regime.LAUNCHED
    parts = {"decode": Regime.DECODE, "mixed": mixed, "large": Regime.LAUNCHED}
    scaled = {name: part.scaled(ratios.get(regime, 1.0)) for name, regime in parts.items() if (part := getattr(launch, name)) is not None}
    launch = launch.model_copy(update=scaled)
    less = [launch.seconds(step.shape) - step.launch_s for step in steps if step.goes_on]
    updated = {"launch": launch.model_dump(mode="json"), "joining_s": max(0.0, float(np.median(less))) if len(less) >= ENOUGH else 0.0}
    fitted = profile.model_copy(update=updated)
    times = [(step.shape, step.launch_s, fitted.launching_s(launch, step.shape, joins=not step.goes_on)) for step in steps]
    return {**updated, "launch_spread": _spread(profile, times, profile.launch_spread)}


def _ratio(times: Iterable[tuple[float, float]]) -> float:
    """Return the median of measured over fitted seconds; 1 if nothing was fitted."""
    ratios = [measured / fitted for measured, fitted in times if fitted > 0]
    return float(np.median(ratios)) if ratios else 1.0


def _spread(profile: StepTimeProfile, times: Iterable[tuple[StepShape, float, float]], otherwise: Spread | None) -> Spread | None:
    """Return the spread of (shape, measured, fitted seconds). `otherwise` is the grid's, for kinds with too few steps; None if that is."""
    found = spread((profile.rule.regime(shape), measured, fitted) for shape, measured, fitted in times)
    return None if otherwise is None else otherwise.model_copy(update={regime.value: found.of(regime) for regime in Regime if found.of(regime)})
