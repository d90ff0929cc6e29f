"""Fitting a `RegimeStepTime` to measured steps, for `dovetail lab calibrate`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dovetail.api.token_sizes import row_sizes
from dovetail.errors import ConfigError
from dovetail_lab.fitting import Floats, Measurement, nonnegative_least_squares, relative_errors
from dovetail_lab.step_time import PiecewiseStepTime, RegimeStepTime, StepShape, padded

TERMS = ("per_context_s", "per_pair_s", "per_row_s", "per_length_s", "beside_s")
KNOTS = (
    1,
    2,
    4,
    8,
    16,
    24,
    32,
    48,
    64,
    96,
    128,
    192,
    256,
    384,
    512,
    768,
    1024,
    1536,
    2048,
    3072,
    4096,
    6144,
    8192,
    12_288,
    16_384,
    32_768,
)
# candidate numbers of tokens up to which an engine may replay graphs instead of launching kernels
BOUNDARIES = (
    256,
    512,
    1024,
    2048,
    4096,
)
WORTH = 0.97  # a floor or a boundary must lower the error to this share, to exclude chance
GOOD = 0.002  # mean error below which nothing is added
ENOUGH = 10  # measurements on each side of a boundary
FEW = 3  # likewise, if the boundary is known
OUTLIER = 5.0  # times the median error
HICCUP = 0.25  # a ratio that far from 1 isn't caused by the device
BOUND_ROUNDS = 3  # iterations: the fit determines which upper bounds are exceeded, and vice versa


@dataclass(frozen=True, slots=True)
class _Step:
    shape: StepShape
    seconds: float


def fit_regimes(
    measurements: Sequence[Measurement],
    at_most: Sequence[Measurement] = (),
    boundary: int | None = None,
    sizes: Sequence[int] = (),
    padded_rows: Sequence[int] = (),
) -> RegimeStepTime:
    """Fit decodes, and steps with prefills; a measurement holds only one kind. Outliers (a
    compilation, a hiccup) are excluded. Of the measurements in `at_most`, which hold prefills, only
    an upper bound is known: they count where the fit would exceed it. Steps of up to `boundary`
    tokens have their own model, in which tokens are padded to the next of `sizes`; None: search for
    a boundary. Decodes are padded to the next of `padded_rows`.

    Raises `ConfigError` if one of the two kinds is missing.
    """
    decode = fit_decodes(measurements, padded_rows)
    steps = [_step(one) for one in measurements if any(shape.prefill_rows for shape in one.shapes)]
    bounds = [_step(one) for one in at_most]
    best = _with_prefills(decode, steps or bounds, boundary, sizes)
    for _ in range(BOUND_ROUNDS if steps else 0):
        exceeded = [step for step in bounds if best.seconds(step.shape) > step.seconds]
        if not exceeded:
            break
        best = _with_prefills(decode, steps + exceeded, boundary, sizes)
    return best


def fit_launches(measurements: Sequence[Measurement], boundary: int | None) -> RegimeStepTime:
    """Fit the time of submitting steps, linearly: it is the same graph, or the same number of
    kernels, for any number of tokens; only the inputs of a step grow. Steps with prefills of up to
    `boundary` tokens have their own line. Raises `ConfigError` like `fit_regimes`."""
    steps = [_step(one) for one in measurements]
    decode = _without_outliers(
        [step for step in steps if not step.shape.prefill_rows], "decodes", straight=True
    )
    return _with_prefills(
        decode, [step for step in steps if step.shape.prefill_rows], boundary, (), straight=True
    )


def fit_decodes(
    measurements: Sequence[Measurement], sizes: Sequence[int] = ()
) -> PiecewiseStepTime:
    """Fit the measurements without prefills; rows are padded to the next of `sizes`. Raises
    `ConfigError` if there are none."""
    decodes = [one for one in measurements if not any(shape.prefill_rows for shape in one.shapes)]
    return _without_outliers([_step(one) for one in decodes], "decodes", sizes)


def corrected(decode: PiecewiseStepTime, measurements: Sequence[Measurement]) -> PiecewiseStepTime:
    """Return the model with corrections from the measurements of full sizes. With few rows, the
    split of their keys over the device changes in jumps with the number of keys, which no sum of
    terms describes."""
    ratios: dict[int, dict[int, float]] = defaultdict(dict)
    for step in (
        _step(one) for one in measurements if not any(shape.prefill_rows for shape in one.shapes)
    ):
        rows = step.shape.rows
        ratio = step.seconds / decode.seconds(step.shape)
        if padded(rows, decode.sizes) == rows and abs(ratio - 1) < HICCUP:
            ratios[rows][step.shape.context_tokens] = ratio
    return decode.model_copy(
        update={
            "corrections": tuple(
                (rows, tuple(sorted(ratios[rows].items()))) for rows in sorted(ratios)
            )
        }
    )


def _with_prefills(
    decode: PiecewiseStepTime,
    steps: Sequence[_Step],
    boundary: int | None,
    sizes: Sequence[int],
    straight: bool = False,
) -> RegimeStepTime:
    """Fit one model for all steps, or two: split at `boundary` if known, otherwise where it
    helps."""
    best = RegimeStepTime(
        decode=decode,
        mixed=_without_outliers(steps, "prefills", () if boundary is None else sizes, straight),
    )
    least = np.inf if boundary is not None else _error(best, steps)
    for tried in BOUNDARIES if boundary is None else (boundary,):
        small, large = (
            [step for step in steps if (step.shape.tokens > tried) == above]
            for above in (False, True)
        )
        if min(len(small), len(large)) < (ENOUGH if boundary is None else FEW):
            continue
        parted = RegimeStepTime(
            decode=decode,
            mixed=_without_outliers(small, "prefills", sizes, straight),
            large=_without_outliers(large, "prefills", (), straight),
            large_above=tried,
        )
        if least > GOOD and (error := _error(parted, steps)) < WORTH * least:
            best = parted
            least = error
    return best


def _step(measurement: Measurement) -> _Step:
    return _Step(_mean_shape(measurement.shapes), measurement.seconds / len(measurement.shapes))


def _mean_shape(shapes: Sequence[StepShape]) -> StepShape:
    """Return the mean shape of steps that differ only in their context."""
    return shapes[0]._replace(
        context_tokens=round(sum(shape.context_tokens for shape in shapes) / len(shapes))
    )


def _without_outliers(
    steps: Sequence[_Step], what: str, sizes: Sequence[int] = (), straight: bool = False
) -> PiecewiseStepTime:
    if not steps:
        raise ConfigError(
            f"no step of {what} was measured: the time limit is too short, or the engine too small"
        )
    first = _with_floor(steps, sizes, straight)
    off = np.abs(_relative(first, steps))
    kept = [
        step
        for step, error in zip(steps, off, strict=True)
        if error <= OUTLIER * max(float(np.median(off)), 0.01)
    ]
    return _with_floor(kept, sizes, straight)


def _with_floor(steps: Sequence[_Step], sizes: Sequence[int], straight: bool) -> PiecewiseStepTime:
    """Fit with the floor that minimizes the error, or with none."""
    best = _fit(steps, sizes, straight)
    least = float(np.abs(_relative(best, steps)).mean())
    if least <= GOOD:
        return best
    for floor in np.percentile([step.seconds for step in steps], (5, 10, 20, 30, 40, 50)).tolist():
        model = best
        above = list(steps)
        for _ in range(3):  # the model determines which steps are above the floor, and vice versa
            if len(above) < ENOUGH:
                break
            free = _fit(above, sizes, straight)
            model = free.model_copy(update={"least_s": floor})
            above = [step for step in steps if free.seconds(step.shape) > floor]
        error = float(np.abs(_relative(model, steps)).mean())
        if error < WORTH * least:
            best = model
            least = error
    return best


def _fit(steps: Sequence[_Step], sizes: Sequence[int], straight: bool) -> PiecewiseStepTime:
    """Fit by non-negative least squares of relative errors. Times never decrease with the number of
    tokens; `straight`: they are linear in it."""
    tokens = np.array([padded(step.shape.tokens, sizes) for step in steps], np.float64)
    decodes = all(step.shape.prefill_rows == 0 for step in steps)
    if straight:
        knots = _knots(tokens, ())
    elif decodes:
        knots = _measured(tokens, row_sizes(int(tokens.max())))
    else:
        knots = _knots(
            tokens, sorted({*sizes, *(knot for knot in KNOTS if not sizes or knot > sizes[-1])})
        )
    rises = [
        np.clip((tokens - low) / (high - low), 0, 1 if high != knots[-1] else None)
        for low, high in pairwise(knots)
    ]
    shapes = [step.shape for step in steps]
    if decodes:  # the number of rows is the number of tokens
        terms = [
            [shape.context_tokens, 0, 0, shape.context_tokens / shape.rows, 0] for shape in shapes
        ]
    else:
        terms = [
            [
                shape.context_tokens,
                shape.prefill_pairs,
                shape.rows,
                shape.prefill_length,
                shape.decodes > 0,
            ]
            for shape in shapes
        ]
    matrix = np.column_stack([np.ones(len(steps)), *rises, np.array(terms, np.float64)])
    matrix /= np.array([step.seconds for step in steps])[:, None]
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    weights = nonnegative_least_squares(matrix / scale, np.ones(len(steps))) / scale
    points = tuple(zip(knots, np.cumsum(weights[: len(knots)]).tolist(), strict=True))
    return PiecewiseStepTime(
        points=points,
        sizes=tuple(sizes),
        **dict(zip(TERMS, weights[len(knots) :].tolist(), strict=True)),
    )


def _knots(tokens: Floats, candidates: Sequence[int]) -> list[int]:
    """Return the candidates between which steps were measured, and both ends."""
    low = int(tokens.min())
    high = int(tokens.max())
    knots = [low]
    for knot in (*(knot for knot in candidates if low < knot < high), high):
        if knot > knots[-1] and np.count_nonzero((tokens > knots[-1]) & (tokens <= knot)) >= 3:
            knots.append(knot)
    return knots if len(knots) > 1 else [low, max(high, low + 1)]


def _measured(tokens: Floats, candidates: Sequence[int]) -> list[int]:
    """Return the candidates that were measured, and both ends. One measurement is enough, since a
    context adds the same to all."""
    low = int(tokens.min())
    high = int(tokens.max())
    return sorted({low, max(high, low + 1), *(set(candidates) & set(tokens.astype(int).tolist()))})


def _relative(model: PiecewiseStepTime, steps: Sequence[_Step]) -> Floats:
    return relative_errors(model, [Measurement((step.shape,), step.seconds) for step in steps])


def _error(model: RegimeStepTime, steps: Sequence[_Step]) -> float:
    return float(
        np.abs(
            relative_errors(model, [Measurement((step.shape,), step.seconds) for step in steps])
        ).mean()
    )
