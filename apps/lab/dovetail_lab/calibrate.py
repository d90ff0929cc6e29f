"""`calibrate`: measures a real engine's step times over a designed grid and fits a profile, with
which a simulation has the same step times.

decodes            rows × context, at sizes of graphs and others; few rows at more contexts
prompts join       decodes × their tokens
prompts in chunks  tokens × history, beside a growing number of decodes; a small last chunk beside decodes
images             rows, if the model reads images
adapters           loads, and decodes with and without, if the engine has slots
pooling            a prompt that pools against one that samples, if the model embeds

A short workload follows, which measures the host's times: `rehearsal`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import dovetail
from dovetail import EngineConfig, LLMEngine
from dovetail.api.token_sizes import ALWAYS_TOKENS, padded_sizes
from dovetail.errors import ConfigError
from dovetail.request.pooling import PoolingParams
from dovetail_lab.adapter_timing import adapter_times
from dovetail_lab.cache_layout import measured_groups, pool_tokens
from dovetail_lab.encoding import Encoded, encoded_images, pictures
from dovetail_lab.rehearsal import as_rehearsed, rehearse
from dovetail_lab.rig import NEVER, Rig, Sighting, TimeIsUpError
from dovetail_lab.step_profile import StepTimeProfile
from dovetail_lab.step_time import LaunchRule, StepShape
from dovetail_lab.step_timing import DeviceTimes, Timed, counts_as_launched, spread, timed

if TYPE_CHECKING:
    from dovetail.serving import Registry

TIME_LIMIT_S = 60.0
REHEARSAL_S = 6.0
QUICK_REHEARSAL_S = 1.5
REHEARSAL_SHARE = 1 / 6  # maximum share of the time limit
ENCODER_SHARE = 1 / 6  # the same, if the model reads images
HELD_OUT = 5  # every fifth measurement is excluded from the fit and evaluates it
SETTLING = 2  # decode steps after a change that aren't measured
TOGETHER = 6  # decode steps timed as one

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192)
# sizes without a graph: if they take as long as the next size, decodes are padded
BETWEEN = (
    3,
    6,
    12,
    20,
    44,
)
# (tokens of a decode, chunk), most useful first
CONTEXTS = (
    (512, 512),
    (64, 128),
    (2048, 1024),
    (6144, 2048),
)
# prompts that join one step; some in turn at each number of rows
JOINING = (
    *((tokens,) for tokens in (16, 48, 700, 128, 1500, 300, 1000, 90, 3000, 200, 1900, 450)),
    *((64, 64, 64, 64), (250, 250, 250), (30, 400), (600, 600), (150, 40, 10)),
)
AT_ONCE = 4  # half as many at contexts other than the first
# (tokens, chunk) of prompts that end in a small chunk, also in turn
LEFTOVERS = (
    (560, 512),
    (640, 512),
    (90, 64),
    (812, 512),
    (1100, 512),
)
FEW_ROWS = (1, 2, 4, 8)  # the split of their keys over the device depends on the context
FEW_ROWS_CONTEXTS = (1024, 256, 1500, 3072)
GRAPHS = padded_sizes(ALWAYS_TOKENS)  # each of these sizes may have a graph, and so its own time
FEW_GRAPHS = GRAPHS[1::3]
# (tokens, chunk), without decodes: a first chunk finds the device idle, a second doesn't
PREFILLS = (
    *(
        (tokens, chunk)
        for size in FEW_GRAPHS
        for tokens, chunk in ((size, NEVER), (2 * size, size))
    ),
    (4000, NEVER),
    *(
        (tokens, chunk)
        for size in GRAPHS
        if size not in FEW_GRAPHS
        for tokens, chunk in ((size, NEVER), (2 * size, size))
    ),
    *((2 * size + 16, size + 8) for size in GRAPHS[7:-1:3]),  # just above a size
    *(
        (tokens, 512) for tokens in (5632, 4096, 2560, 1536, 4608, 3072, 2048)
    ),  # only the last chunk is measured: few queries after a long history
    *((2600, NEVER), (5000, 2500), (8000, NEVER), (8000, 4000), (16_000, NEVER)),
)
FIRST = 2 * len(FEW_GRAPHS) + 1  # this many come first: they show which steps are graphs
# larger prompts aren't repeated: such steps hardly vary
REPEATS = 3
LARGE = 6000
ROUNDS = 2
LEVEL_TOKENS = 120_000  # of KV cache: filling more takes too long
QUICK_CONTEXTS = ((8, 512), (48, 128))
QUICK_JOINING = ((4,), (24,))
QUICK_PREFILLS = tuple((tokens, NEVER) for tokens in (6, 16, 40, 60))

Progress = Callable[[int, int], None]  # (cells measured, total)


@dataclass(frozen=True, slots=True)
class Level:
    """Measurements with decodes of about `context` tokens each. At each number of `rows`, some
    steps have only decodes, then `prompts` join, then `leftovers`; `between` these numbers there
    are only decodes."""

    context: int
    rows: tuple[int, ...]
    between: tuple[int, ...] = ()
    chunk: int = NEVER  # prompt tokens beside decodes while rows are added
    prompts: tuple[tuple[int, ...], ...] = ()  # prompts that join one step
    at_once: int = 0  # number of `prompts` to try at each number of rows, in turn
    leftovers: tuple[tuple[int, int], ...] = ()  # (tokens, chunk) of prompts: one of them


@dataclass(frozen=True, slots=True)
class Design:
    """Measurements to make, most useful first, since the time may run out."""

    warm_up: Level
    prefills: tuple[tuple[int, int], ...]  # (prompt tokens, chunk), without decodes
    levels: tuple[Level, ...]
    decode_steps: int
    repeats: int
    rounds: int

    @classmethod
    def of(cls, engine: LLMEngine, quick: bool) -> Design:
        """Return as much of the grid as fits into the engine; the tiny grid if `quick`, or if the
        engine is too small. Raises `ConfigError` if nothing fits."""
        capacity = engine.capacity
        config = engine.config
        pool = int(
            0.6
            * pool_tokens(capacity.layout, capacity.num_pages, min(config.max_num_seqs, ROWS[-1]))
        )
        most_rows = min(config.max_num_seqs, 4 if quick else 256)
        rows = sorted({rows for rows in ROWS if rows < most_rows} | {most_rows})
        steps, repeats, rounds = (2 * TOGETHER, 1, 1) if quick else (4 * TOGETHER, REPEATS, ROUNDS)
        longest = min(capacity.max_model_len - 1 - steps, pool)
        tiny = quick or 2 * min(CONTEXTS)[0] > longest
        contexts = [
            (context, chunk)
            for context, chunk in (QUICK_CONTEXTS if tiny else CONTEXTS)
            if 2 * context <= longest
        ]
        if not contexts:
            least = 2 * min(QUICK_CONTEXTS)[0]
            raise ConfigError(
                f"the engine is too small to calibrate: expected a max_model_len of "
                f"{least + 1 + steps} or more, and room for {least} tokens in "
                f"60 % of its KV pool; got {capacity.max_model_len}, and {pool}"
            )
        joining = [
            group
            for group in (QUICK_JOINING if tiny else JOINING)
            if sum(group) <= min(config.max_num_batched_tokens, longest)
        ]

        def that_fit(counts: Sequence[int], context: int) -> tuple[int, ...]:
            return tuple(
                count
                for count in counts
                if count == 1 or count * (context + 64) <= min(pool, LEVEL_TOKENS)
            )

        leftovers = () if tiny else _that_fit(LEFTOVERS, longest, config.max_num_batched_tokens)
        levels = [
            Level(
                context,
                that_fit(rows[:: 1 if index < 2 else 2], context),
                that_fit(
                    [count for count in BETWEEN if count < most_rows and count not in rows], context
                )
                if index < 2
                else (),
                chunk,
                tuple(joining),
                AT_ONCE // 2 if index else AT_ONCE,
                () if index else leftovers,
            )
            for index, (context, chunk) in enumerate(contexts)  # the first in full
        ]
        few_rows = [count for count in FEW_ROWS if count <= most_rows]
        levels[2:2] = [
            Level(context, that_fit(few_rows, context))
            for context in FEW_ROWS_CONTEXTS
            if not tiny and 2 * context <= longest
        ]
        prefills = _that_fit(
            QUICK_PREFILLS if tiny else PREFILLS, longest, config.max_num_batched_tokens
        )
        return cls(levels[0], prefills, tuple(levels), steps, repeats, rounds)

    @property
    def cells(self) -> int:
        return len(self.prefills) + sum(
            len(level.rows) + len(level.between) for level in self.levels
        )


def _that_fit(
    prefills: Sequence[tuple[int, int]], longest: int, max_tokens: int
) -> tuple[tuple[int, int], ...]:
    """Return the (prompt tokens, chunk) that fit: with whole chunks, if a step of `max_tokens` can
    hold them; unchunked prompts unchanged or not at all."""
    chunked = [
        (min(tokens, longest // chunk * chunk), chunk) if chunk < NEVER else (tokens, chunk)
        for tokens, chunk in prefills
    ]
    return tuple(
        (tokens, chunk)
        for tokens, chunk in chunked
        if 0 < tokens <= longest and (chunk == NEVER or chunk <= max_tokens)
    )


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
    """Start the engine that `config` describes, and measure it for at most `time_limit_s`, with its
    own executor.

    `quick`: a tiny grid. Raises the errors of `LLMEngine`, and `ConfigError` if too little could be
    measured to fit anything.
    """
    rehearsal_s = min(QUICK_REHEARSAL_S if quick else REHEARSAL_S, REHEARSAL_SHARE * time_limit_s)
    with LLMEngine.from_config(config, registry=registry) as engine:
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
    core_s, core_per_row_s = _line(
        rows, [sighting.submitted - sighting.planned for sighting in decodes]
    )
    results_s, results_per_row_s = _line(
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


def _image_times(images: Sequence[Encoded]) -> dict[str, float]:
    """Return what an image takes, and a row of it; nothing if none was measured."""
    if not images:
        return {}
    image_s, image_row_s = _line(
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


def _line(rows: np.ndarray[Any, Any], seconds: Sequence[float]) -> tuple[float, float]:
    """Return offset and slope of a line through the medians at each number of rows, neither
    negative."""
    counts = np.unique(rows)
    medians = np.array([np.median(np.array(seconds)[rows == count]) for count in counts])
    slope = max(0.0, float(np.polyfit(counts, medians, 1)[0])) if len(counts) > 1 else 0.0
    return max(0.0, float((medians - slope * counts).mean())), slope


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
