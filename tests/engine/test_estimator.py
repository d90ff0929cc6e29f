"""The running fit of step times: correct if its model is, finite and positive for any input."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.engine.step_times import StepTimeFit
from tests.support import FULL, examples

Point = tuple[int, int, int]  # prefill tokens, decodes, context tokens
PROBES: list[Point] = [
    (0, 0, 0),
    (0, 1, 100),
    (0, 256, 500_000),
    (2000, 0, 2000),
    (8192, 256, 10**6),
    (10**6, 10**5, 10**9),
]


def true_s(prefill: int, decodes: int, context: int) -> float:
    return 0.005 + 2e-5 * prefill + 1e-5 * decodes + 3e-9 * context


def points(seed: int) -> Iterator[Point]:
    dice = random.Random(seed)
    while True:
        decodes = dice.randint(0, 256)
        yield dice.choice([0, 0, dice.randint(1, 2000)]), decodes, decodes * dice.randint(10, 4000)


def test_nothing_is_known_before_the_first_step() -> None:
    assert StepTimeFit().estimate_s(100, 10, 1000) == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_a_linear_device_is_learnt_in_thirty_steps(seed: int) -> None:
    fit, at = StepTimeFit(), points(seed)
    for _ in range(30):
        point = next(at)
        fit.update(true_s(*point), *point)
    for point in PROBES[1:5]:
        assert fit.estimate_s(*point) == pytest.approx(true_s(*point), rel=0.02)


def test_noise_and_slow_steps_hardly_matter() -> None:
    fit, at, dice = StepTimeFit(), points(1), random.Random(1)
    for index in range(400):
        point = next(at)
        fit.update(
            30.0 if index in (0, 50, 51, 300) else true_s(*point) * dice.uniform(0.9, 1.1), *point
        )
    for point in PROBES[1:5]:
        assert fit.estimate_s(*point) == pytest.approx(true_s(*point), rel=0.1)


def test_the_error_is_unknown_at_first_and_then_that_of_the_device() -> None:
    def error(spread: float) -> float:
        fit, at, dice = StepTimeFit(), points(1), random.Random(1)
        for index in range(400):
            assert (fit.error() == math.inf) == (index <= 4)
            point = next(at)
            fit.update(true_s(*point) * (1 + dice.gauss(0, spread)), *point)
        return fit.error()

    assert error(0.0) < 0.005
    assert error(0.05) == pytest.approx(0.05, rel=0.2)
    assert error(0.2) == pytest.approx(0.2, rel=0.2)


def test_a_device_that_changes_is_followed() -> None:
    fit, at = StepTimeFit(), points(2)
    for index in range(2_000):
        point = next(at)
        fit.update(true_s(*point) * (1 if index < 1_000 else 3), *point)
    for point in PROBES[1:5]:
        assert fit.estimate_s(*point) == pytest.approx(3 * true_s(*point), rel=0.1)


def test_a_device_that_changes_is_followed_also_when_all_steps_were_alike() -> None:
    fit = StepTimeFit()
    for index in range(20_000):
        fit.update(0.01 if index < 19_000 else 0.03, 0, 64, 64_000)
    assert fit.estimate_s(0, 64, 64_000) == pytest.approx(0.03, rel=0.05)


def test_a_long_spell_of_decodes_leaves_prefills_known() -> None:
    fit, at = StepTimeFit(), points(3)
    for _ in range(100):
        point = next(at)
        fit.update(true_s(*point), *point)
    for _ in range(20_000):
        fit.update(true_s(0, 64, 64_000), 0, 64, 64_000)
    assert fit.estimate_s(2000, 64, 66_000) == pytest.approx(true_s(2000, 64, 66_000), rel=0.02)


ODD: dict[str, Callable[[random.Random], tuple[float, int, int, int]]] = {
    "all zeros": lambda dice: (0.0, 0, 0, 0),
    "constant": lambda dice: (0.01, 0, 256, 10**6),
    "collinear": lambda dice: (0.01, 0, (n := dice.randint(1, 256)), 1000 * n),
    "outliers": lambda dice: (
        dice.choice([0.0, 1e-9, 0.01, 0.01, 0.01, 1e9]),
        dice.randint(0, 8192),
        dice.randint(0, 256),
        dice.randint(0, 10**7),
    ),
    "no durations": lambda dice: (dice.choice([math.nan, math.inf, -1.0, 0.01]), 0, 1, 10),
    "falling": lambda dice: (1.0 / (1 + (n := dice.randint(0, 8192))), n, 0, n),
    "huge": lambda dice: (1e12, 10**12, 10**12, 10**15),
    "one odd feature": lambda dice: (0.01, 10**9 if dice.random() < 1e-4 else 0, 1, 1),
}


@pytest.mark.parametrize("name", ODD)
def test_many_odd_steps_leave_it_finite_and_never_negative(name: str) -> None:
    fit, dice = StepTimeFit(), random.Random(0)
    for index in range(100_000 if FULL else 5_000):
        fit.update(*ODD[name](dice))
        if index % 97 == 0:
            check_sane(fit)
    check_sane(fit)


@examples(quick=50, full=1_000)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 1e6), st.integers(0, 10**6), st.integers(0, 10**4), st.integers(0, 10**9)
        ),
        max_size=30,
    )
)
def test_any_steps_leave_it_finite_and_never_negative(
    steps: list[tuple[float, int, int, int]],
) -> None:
    fit = StepTimeFit()
    for step in steps:
        fit.update(*step)
        check_sane(fit)


def check_sane(fit: StepTimeFit) -> None:
    for point in PROBES:
        estimate = fit.estimate_s(*point)
        assert math.isfinite(estimate)
        assert estimate >= 0.0
    assert fit.estimate_s(100, 10, 1000) <= fit.estimate_s(200, 20, 2000), (
        "more work never takes less time"
    )
    assert fit.error() >= 0.0
