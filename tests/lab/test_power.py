"""Number of runs: what the formulas promise, on made-up differences."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dovetail_lab.power import anytime_half, units_needed


def first_looks(deviation: float, looks: int, runs: int) -> np.ndarray:
    """[runs, looks]: whether zero is outside of the interval of the first differences, whose mean
    is zero, after each of them."""
    values = np.random.default_rng(7).normal(0.0, deviation, (runs, looks))
    counts = np.arange(1, looks + 1)
    means = np.cumsum(values, axis=1) / counts
    squares = np.cumsum(values**2, axis=1) - counts * means**2
    deviations = np.sqrt(np.maximum(squares, 0) / np.maximum(counts - 1, 1))
    halves = np.array([anytime_half(1.0, int(count)) for count in counts])
    with np.errstate(invalid="ignore"):
        return np.asarray(np.abs(means) > deviations * np.where(counts > 1, halves, np.inf))


def test_looking_after_every_run_keeps_the_stated_coverage() -> None:
    """A fixed interval of Student's t, looked at as often, excludes zero in some 40 % of runs."""
    outside = first_looks(deviation=3.0, looks=100, runs=2_000).any(axis=1).mean()
    assert 0.005 < outside < 0.05


def test_an_interval_narrows_with_runs_and_is_wider_than_one_of_a_single_look() -> None:
    halves = [anytime_half(1.0, count) for count in (3, 5, 10, 40, 400)]
    assert halves == sorted(halves, reverse=True)
    assert 1.96 / math.sqrt(40) < anytime_half(1.0, 40) < 2 * 1.96 / math.sqrt(40)
    assert anytime_half(0.0, 10) == 0
    assert math.isinf(anytime_half(1.0, 1))


@pytest.mark.parametrize("effect", [0.4, 1.0])
def test_so_many_pairs_find_the_difference_four_times_out_of_five(effect: float) -> None:
    count = math.ceil(units_needed(effect, 1.0))
    values = np.random.default_rng(3).normal(effect, 1.0, (4_000, count))
    t = values.mean(axis=1) / values.std(axis=1, ddof=1) * math.sqrt(count)
    critical = {0.4: 2.0066, 1.0: 2.2622}[effect]  # Student's, of 53 and of 9 degrees of freedom
    assert {0.4: 52, 1.0: 10}[effect] == pytest.approx(count, abs=1)
    assert 0.78 < float((t > critical).mean()) < 0.84


def test_no_difference_needs_endless_runs_and_a_sure_one_two() -> None:
    assert math.isinf(units_needed(0.0, 1.0))
    assert units_needed(-0.1, 0.0) == 2
