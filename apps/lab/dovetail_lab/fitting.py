"""Fits coefficients to measured steps: non-negative least squares of relative errors, so that a
decode of 10 ms counts as much as a prefill of 1 s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import ConfigError
from dovetail_lab.step_time import LinearStepTime, PiecewiseStepTime, StepShape, StepTimeModel

TERMS = ("base_s", "per_token_s", "per_context_s", "per_pair_s", "per_row_s")  # of `LinearStepTime`

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Total time of consecutive steps: a single step, or a hundred decodes timed together."""

    shapes: tuple[StepShape, ...]
    seconds: float


def fit_linear(measurements: Sequence[Measurement], terms: Sequence[str] = TERMS) -> LinearStepTime:
    """Fit the model with the smallest sum of squared relative errors; terms not in `terms` are 0,
    none is negative.

    Raises `ConfigError` for fewer measurements than terms, or an invalid duration.
    """
    chosen = [TERMS.index(term) for term in terms]
    matrix = np.stack([_linear(one.shapes)[chosen] for one in measurements])
    return LinearStepTime.model_validate(
        dict(zip(terms, fitted_weights(matrix, _seconds(measurements)), strict=True))
    )


def fit_piecewise(
    measurements: Sequence[Measurement], knots: Sequence[int], terms: Sequence[str] = TERMS[2:]
) -> PiecewiseStepTime:
    """Like `fit_linear`, with the contribution of the batch's size interpolated between `knots`: at
    least 2 ascending numbers of tokens."""
    chosen = [TERMS.index(term) for term in terms]
    hats = [
        knot_weights([shape.tokens for shape in one.shapes], knots).sum(axis=0)
        for one in measurements
    ]
    matrix = np.stack(
        [
            np.concatenate([own, _linear(one.shapes)[chosen]])
            for own, one in zip(hats, measurements, strict=True)
        ]
    )
    weights = fitted_weights(matrix, _seconds(measurements))
    points = tuple(zip(knots, weights[: len(knots)], strict=True))
    return PiecewiseStepTime.model_validate(
        {"points": points, **dict(zip(terms, weights[len(knots) :], strict=True))}
    )


def _linear(shapes: Sequence[StepShape]) -> Floats:
    """Return the multiplier of each of `TERMS` [terms], summed over the steps."""
    rows = [
        (1, shape.tokens, shape.context_tokens, shape.prefill_pairs, shape.rows) for shape in shapes
    ]
    return np.asarray(np.array(rows, np.float64).sum(axis=0))


def knot_weights(tokens: Sequence[int] | Floats, knots: Sequence[int]) -> Floats:
    """Return the weight of each knot in the linear interpolation at each of `tokens` [tokens,
    knots], with linear extrapolation beyond the knots."""
    at_tokens = np.array(tokens, np.float64)
    at = np.clip(np.searchsorted(knots, at_tokens), 1, len(knots) - 1)
    low = np.array(knots, np.float64)[at - 1]
    high = np.array(knots, np.float64)[at]
    share = (at_tokens - low) / (high - low)
    weights = np.zeros((len(at_tokens), len(knots)))
    lines = np.arange(len(at_tokens))
    weights[lines, at - 1] = 1.0 - share
    weights[lines, at] = share
    return weights


def _seconds(measurements: Sequence[Measurement]) -> Floats:
    return np.array([one.seconds for one in measurements], np.float64)


def fitted_weights(
    matrix: Floats, seconds: Floats, importance: Floats | None = None
) -> list[float]:
    """Return non-negative weights [columns] of `matrix` [measurements, columns] that minimize the
    relative errors over `seconds` [measurements]; `importance` [measurements]: weight of each
    squared error, 1 by default.

    Raises `ConfigError` for fewer measurements than columns, or an invalid duration.
    """
    count, columns = matrix.shape
    if count < columns:
        raise ConfigError(f"{count} measurements can't determine {columns} coefficients")
    if not (np.isfinite(seconds) & (seconds > 0)).all():
        raise ConfigError("measured step times must be positive and finite")
    target = np.ones(count) if importance is None else importance
    relative = matrix * (target / seconds)[:, None]
    # scale columns to one size: context counts in millions
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-300)
    return [float(weight) for weight in nonnegative_least_squares(relative / scale, target) / scale]


def nonnegative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """Return x >= 0 [columns] that minimizes |matrix x - target|. Lawson and Hanson, Solving Least
    Squares Problems (1974), chapter 23: columns enter one by one, most helpful first, and leave
    when their weight would become negative."""
    columns = matrix.shape[1]
    x = np.zeros(columns)
    passive = np.zeros(columns, np.bool_)
    tolerance = (
        10
        * np.finfo(np.float64).eps
        * float(np.abs(matrix).sum(axis=0).max(initial=0.0))
        * max(matrix.shape)
    )
    for _ in range(30 * columns):
        gradient = np.where(passive, -np.inf, matrix.T @ (target - matrix @ x))
        enters = int(gradient.argmax())
        if gradient[enters] <= tolerance:
            break
        passive[enters] = True
        while True:
            solution = np.zeros(columns)
            solution[passive] = np.linalg.lstsq(matrix[:, passive], target, rcond=None)[0]
            leaving = passive & (solution <= 0)
            if not leaving.any():
                break
            share = float((x[leaving] / (x[leaving] - solution[leaving] + 1e-300)).min())
            x += share * (solution - x)
            passive &= ~(leaving & (x <= 1e-15))
            x[~passive] = 0.0
        x = solution
    return x


def relative_errors(model: StepTimeModel, measurements: Sequence[Measurement]) -> Floats:
    """Return (predicted - measured) / measured [measurements]."""
    predicted = np.array(
        [sum(model.seconds(shape) for shape in one.shapes) for one in measurements]
    )
    seconds = np.array([one.seconds for one in measurements])
    return np.asarray(predicted / seconds - 1.0)
