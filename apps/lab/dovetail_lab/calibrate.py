"""`calibrate`: measures a real engine's step times over a designed grid and fits a profile, with
which a simulation has the same step times.

steps              decodes, prompts that join them, and chunks: `calibration_grid`
images             rows, if the model reads images
adapters           loads, and decodes with and without, if the engine has slots
pooling            a prompt that pools against one that samples, if the model embeds

A short workload follows, which measures the host's times: `rehearsal`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import dovetail
from dovetail import EngineConfig, LLMEngine
from dovetail.errors import ConfigError
from dovetail.request.pooling import PoolingParams
from dovetail_lab.adapter_timing import adapter_times
from dovetail_lab.cache_layout import measured_groups
from dovetail_lab.calibration_grid import FIRST, LARGE, REPEATS, Design, Level
from dovetail_lab.encoding import Encoded, encoded_images, pictures
from dovetail_lab.profile_fitting import fitted_line, profile_of
from dovetail_lab.rehearsal import as_rehearsed, rehearse
from dovetail_lab.rig import Rig, Sighting, TimeIsUpError
from dovetail_lab.step_profile import StepTimeProfile

if TYPE_CHECKING:
    from dovetail.serving import Registry

TIME_LIMIT_S = 60.0
REHEARSAL_S = 6.0
QUICK_REHEARSAL_S = 1.5
REHEARSAL_SHARE = 1 / 6  # maximum share of the time limit
ENCODER_SHARE = 1 / 6  # the same, if the model reads images

Progress = Callable[[int, int], None]  # (cells measured, total)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A profile and the measurements that it was fitted to."""

    profile: StepTimeProfile
    sightings: tuple[Sighting, ...]
    complete: bool  # True if the whole grid was measured in time


def calibrate(
    config: str | Path | Mapping[str, Any] | EngineConfig,
    *,
    name: str = "calibrated",
    quick: bool = False,
    time_limit_s: float = TIME_LIMIT_S,
    registry: Registry | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Start the engine that `config` describes, without `kv_host_memory` and `kv_tiers`, and measure
    it for at most `time_limit_s`, with its own executor.

    `quick`: a tiny grid. Raises the errors of `LLMEngine`, and `ConfigError` if the model can't
    generate, or too little could be measured to fit anything.
    """
    rehearsal_s = min(QUICK_REHEARSAL_S if quick else REHEARSAL_S, REHEARSAL_SHARE * time_limit_s)
    # saves of K and V would be part of the steps, and simulations add them by their own rates
    with LLMEngine.from_config(
        config, registry=registry, kv_host_memory=None, kv_tiers=()
    ) as engine:
        pooling = engine.capacity.pooling
        if pooling is not None and not pooling.generates:
            raise ConfigError("calibrate measures steps that generate, which this model can't")
        design = Design.of(engine, quick)
        prompts = pictures(engine, quick=quick)  # which takes no time of the engine
        rig = Rig(engine, time.monotonic() + time_limit_s - rehearsal_s)
        images = encoded_images(rig, prompts, ENCODER_SHARE * time_limit_s)
        features = {**_adapter_times(rig, quick), **_pooling_times(rig)}
        complete = _measure(rig, design, progress or (lambda done, total: None))
        overlapped = engine.core.max_in_flight > 1
        grid = profile_of(rig.sightings, overlapped, name=name, **_papers(engine, complete))
        taking_in = rehearse(rig, grid, rehearsal_s) or rig.taking_in
        sightings = tuple(rig.sightings)
    profile = as_rehearsed(grid, sightings, overlapped)
    found = {"request_s": float(np.mean(taking_in)), **_image_times(images), **features}
    return Calibration(profile.model_copy(update=found), sightings, complete)


def _measure(rig: Rig, design: Design, progress: Progress) -> bool:
    """Measure the grid, repeatedly to see how times vary. Returns True if all of it was measured at
    least once."""
    done = 0
    first, *others = design.levels

    def tell() -> None:
        nonlocal done
        done += 1
        progress(done, design.rounds * design.cells)

    try:
        _warm_up(rig, design)
        for _ in range(design.rounds):
            _measure_prefills(rig, design.prefills[:FIRST], design, tell)
            _measure_level(rig, first, design, tell)
            _measure_prefills(rig, design.prefills[FIRST:], design, tell)
            for level in others:
                _measure_level(rig, level, design, tell)
    except TimeIsUpError:
        return done >= design.cells
    return True


def _measure_prefills(
    rig: Rig, prefills: Sequence[tuple[int, int]], design: Design, tell: Callable[[], None]
) -> None:
    for tokens, chunk in prefills:
        for _ in range(design.repeats if tokens <= LARGE else 1):
            rig.inject((tokens,), chunk=chunk)
        tell()


def _measure_level(rig: Rig, level: Level, design: Design, tell: Callable[[], None]) -> None:
    groups = cycle(level.prompts)
    leftovers = cycle(level.leftovers)
    for rows in sorted({*level.rows, *level.between}):
        rig.grow(rows, level.context, level.chunk)
        rig.decode(design.decode_steps)
        joined = rows not in level.between
        for group in filter(rig.has_rows_for, islice(groups, level.at_once if joined else 0)):
            for _ in range(design.repeats):
                rig.inject(group, then=1)
        for tokens, chunk in islice(leftovers, 1 if joined and rig.has_rows_for((1,)) else 0):
            for _ in range(design.repeats):
                rig.inject((tokens,), then=1, chunk=chunk)
        tell()
    rig.clear()


def _warm_up(rig: Rig, design: Design) -> None:
    """Run unmeasured steps that compile kernels and fill memory caches, including those that only
    large steps need."""
    level = design.warm_up
    for tokens, chunk in sorted({*design.prefills[::4], max(design.prefills)}):
        rig.inject((tokens,), chunk=chunk)
    for rows in (1, 4, 16):
        rig.grow(min(rows, level.rows[-1]), level.context, level.chunk)
        rig.decode(4)
        for group in filter(rig.has_rows_for, level.prompts):
            rig.inject(group, then=2)
    rig.clear()
    rig.sightings.clear()


def _image_times(images: Sequence[Encoded]) -> dict[str, float]:
    """Return what an image takes, and a row of it; nothing if none was measured."""
    if not images:
        return {}
    image_s, image_row_s = fitted_line(
        np.array([one.rows for one in images]), [one.seconds for one in images]
    )
    return {"image_s": image_s, "image_row_s": image_row_s}


def _adapter_times(rig: Rig, quick: bool) -> dict[str, float]:
    """Return what adapters cost; nothing if none was measured."""
    times = adapter_times(rig, quick=quick)
    return {} if times is None else {f"adapter_{key}": s for key, s in times._asdict().items()}


def _pooling_times(rig: Rig) -> dict[str, float]:
    """Return what pooling a prompt takes beyond sampling a token; nothing if it can't embed."""
    pooling = rig.engine.capacity.pooling
    if pooling is None or "embed" not in pooling.tasks or not pooling.generates:
        return {}
    differences = []
    with suppress(TimeIsUpError):
        for first in range(1, 2 + REPEATS):
            ids = [first, *range(8, 23)]
            pools = rig.time_of(ids, pooling=PoolingParams("embed"))
            differences.append(pools - rig.time_of([first + 8, *ids[1:]]))
    return {"pooled_s": max(0.0, float(np.median(differences[1:])))} if differences[1:] else {}


def _papers(engine: LLMEngine, complete: bool) -> dict[str, Any]:
    """Return a description of what was measured, and how."""
    capacity = engine.capacity
    config = engine.config
    details = ", ".join(
        f"{key} {value}"
        for key, value in capacity.details.items()
        if key not in ("device", "model")
    )
    overlap = "on" if engine.core.max_in_flight > 1 else "off"
    sizes = (
        f"max_num_seqs {config.max_num_seqs}, max_num_batched_tokens "
        f"{config.max_num_batched_tokens}, max_model_len {capacity.max_model_len}"
    )
    notes = [f"blocks of {capacity.layout.block_size}, overlap {overlap}, {sizes}"]
    if not complete:
        notes.append("time ran out before all of the grid was measured")
    return {
        "kv_tokens": capacity.num_pages * capacity.layout.block_size,
        "cache_groups": measured_groups(capacity.layout),
        "line_costs": capacity.line_costs,
        "draft_costs": capacity.draft_costs if len(capacity.draft_costs) > 1 else (),
        "max_in_flight": engine.core.max_in_flight,
        "machine": capacity.details.get("device", capacity.details.get("step times", "unknown")),
        "model": f"{config.model} ({capacity.details.get('model', 'unknown')})",
        "engine": f"Dovetail {dovetail.__version__}, executor {config.executor.label}"
        + (f": {details}" if details else ""),
        "source": "dovetail lab calibrate",
        "notes": tuple(notes),
    }
