"""Intervals of paired differences: that they hold as often as they say, and find what is there."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dovetail_lab.block_length import block_length, optimal_block
from dovetail_lab.draws import BlockDraws, Draws, SeedDraws
from dovetail_lab.pairs import MEAN, P50, P99, Floats, Pairs, Statistic, Values
from dovetail_lab.ranked import Ranked
from dovetail_lab.statistics import Change, changes, scalar_change
from tests.support import FULL, examples

STATISTICS = (MEAN, P50, Statistic(0.9), P99)


def autoregressive(rng: np.random.Generator, count: int, memory: float) -> np.ndarray:
    """A series of variance 1 whose neighbours correlate by `memory`, as latencies in a queue do."""
    noise = rng.normal(0, math.sqrt(1 - memory**2), count + 200)
    for index in range(1, len(noise)):
        noise[index] += memory * noise[index - 1]
    return noise[200:]


def busy_run(
    rng: np.random.Generator, count: int = 200, memory: float = 0.8, shift: float = 0.0
) -> Pairs:
    """Two policies under one load, each with luck of its own; b's logarithms are `shift` higher."""
    load = autoregressive(rng, count, memory)
    a, b = (np.exp(load + 0.3 * autoregressive(rng, count, memory)) for _ in range(2))
    return Pairs.of(a, b * math.exp(shift))


def draws_for(runs: list[Pairs], resamples: int = 200) -> Draws:
    if len(runs) >= 5:
        return SeedDraws(len(runs), resamples, 0)
    return BlockDraws(
        max(block_length(runs, statistic).requests for statistic in STATISTICS),
        runs[0].requests,
        resamples,
        0,
    )


def change(runs: list[Pairs], statistic: Statistic, **options: float) -> Change:
    return changes(runs, [statistic], draws_for(runs), **options)[0]


@examples(quick=60, full=1_000)
@given(data=st.data(), q=st.floats(0.01, 0.99))
def test_a_weighted_statistic_is_that_of_the_repeated_values(data: st.DataObject, q: float) -> None:
    values = data.draw(arrays.arrays(np.float64, st.integers(1, 30), elements=st.floats(-1e3, 1e3)))
    weights = data.draw(arrays.arrays(np.int32, (3, len(values)), elements=st.integers(0, 3)))
    owners = data.draw(
        arrays.arrays(np.intp, len(values), elements=st.integers(0, len(values) - 1))
    )
    ranked = Ranked.of(
        Values(values, owners), len(values), data.draw(st.sampled_from([None, 1, 2, 7]))
    )
    found = ranked.statistics(weights, [MEAN, Statistic(q)])
    for draw, own in enumerate(weights):
        repeated = np.repeat(values, own[owners])
        expected = [MEAN.of(repeated), Statistic(q).of(repeated)]
        np.testing.assert_allclose(found[:, draw], expected, rtol=1e-9, atol=1e-9)


@examples(quick=30, full=300)
@given(requests=st.integers(1, 60), length=st.integers(1, 80), seed=st.integers(0, 9))
def test_blocks_cover_a_run_once_on_average_and_lose_no_request(
    requests: int, length: int, seed: int
) -> None:
    weights = np.concatenate(
        list(BlockDraws(length, requests, 40, seed)._weights(requests, np.random.default_rng(seed)))
    )
    own = min(length, requests)
    assert weights.shape == (40, requests)
    assert (weights >= 0).all()
    assert (weights.sum(axis=1) == math.ceil(requests / own) * own).all()


@pytest.mark.parametrize("seeds", [1, 5])
def test_a_against_itself_shows_no_difference(seeds: int) -> None:
    rng = np.random.default_rng(1)
    runs = [Pairs(run.a, run.a, run.requests) for run in (busy_run(rng) for _ in range(seeds))]
    for statistic in STATISTICS:
        found = change(runs, statistic)
        assert (found.relative, found.low, found.high, found.measurable) == (0, 0, 0, False)


@pytest.mark.parametrize(
    ("seeds", "memory"),
    [
        (1, 0.0),
        (1, 0.8),
        (5, 0.9),
        pytest.param(10, 0.9, marks=pytest.mark.slow("resamples ten runs 200 times")),
    ],
)
def test_differences_of_mere_luck_are_found_about_as_often_as_stated(
    seeds: int, memory: float
) -> None:
    """95 % intervals leave out zero in 5 % of cases; those of one short run with a long memory, in
    some 9 %."""
    rng, trials = np.random.default_rng(seeds), 2_000 if FULL else 100
    found = [
        change([busy_run(rng, memory=memory) for _ in range(seeds)], MEAN).measurable
        for _ in range(trials)
    ]
    at_most = 0.10 if seeds == 1 and memory else 0.06
    assert np.mean(found) <= at_most + 3 * math.sqrt(at_most * (1 - at_most) / trials)
    assert np.mean(found) >= 0.04 - 3 * math.sqrt(0.04 * 0.96 / trials)


@pytest.mark.parametrize("seeds", [1, 8])
@pytest.mark.parametrize("statistic", [MEAN, P50], ids=lambda statistic: statistic.name)
def test_a_known_shift_is_found_and_lies_in_its_interval(seeds: int, statistic: Statistic) -> None:
    rng = np.random.default_rng(2)
    found = change([busy_run(rng, count=600, shift=math.log(0.6)) for _ in range(seeds)], statistic)
    assert found.measurable
    assert found.low < -0.4 < found.high < 0


@examples(quick=15, full=200)
@given(seed=st.integers(0, 2**32), seeds=st.sampled_from([1, 2, 6]), shift=st.floats(-0.5, 0.5))
def test_exchanging_the_policies_turns_the_change_around(
    seed: int, seeds: int, shift: float
) -> None:
    rng = np.random.default_rng(seed)
    runs = [busy_run(rng, count=80, shift=shift) for _ in range(seeds)]
    there, back = change(runs, MEAN), change([run.reversed() for run in runs], MEAN)
    assert np.isclose((1 + there.relative) * (1 + back.relative), 1)
    assert np.isclose((1 + there.low) * (1 + back.high), 1)
    assert np.isclose((1 + there.high) * (1 + back.low), 1)


def test_the_same_seed_gives_the_same_interval() -> None:
    runs = [busy_run(np.random.default_rng(3))]
    assert change(runs, P99) == change(runs, P99)


def gaps(rng: np.random.Generator, counts: list[int], shift: float = 0.0) -> list[Floats]:
    """Requests with so many gaps between tokens each; a request's are alike."""
    return [np.exp(rng.normal() + rng.normal(0, 0.1, count) + shift) for count in counts]


def test_a_pool_of_one_value_a_request_is_treated_as_that_metric() -> None:
    one = busy_run(np.random.default_rng(8))
    pool = Pairs.pooled(one.a.numbers[:, None], one.b.numbers[:, None])
    assert changes([pool], STATISTICS, draws_for([one])) == changes(
        [one], STATISTICS, draws_for([one])
    )
    assert all(
        block_length([pool], statistic) == block_length([one], statistic)
        for statistic in STATISTICS
    )


def test_values_of_one_request_are_drawn_together() -> None:
    """Fifty alike gaps of a request tell no more than one of them."""
    rng = np.random.default_rng(9)
    a, b = gaps(rng, [1] * 80), gaps(rng, [1] * 80)
    once, often = (
        Pairs.pooled(a, b),
        Pairs.pooled([np.repeat(one, 50) for one in a], [np.repeat(one, 50) for one in b]),
    )
    narrow, wide = (
        changes([pairs], [MEAN, P50], BlockDraws(4, 80, 200, 0)) for pairs in (often, once)
    )
    assert [(one.low, one.high) for one in narrow] == [
        pytest.approx((one.low, one.high), rel=0.05) for one in wide
    ]


def test_requests_without_values_under_one_policy_have_none_in_the_pool() -> None:
    a, b = (
        gaps(np.random.default_rng(10), [3, 0, 2, 4]),
        gaps(np.random.default_rng(11), [3, 5, 0, 4]),
    )
    pairs = Pairs.pooled(a, b)
    assert pairs.present.tolist() == [0, 3]
    assert pairs.a.numbers.tolist() == [*a[0], *a[3]]
    assert pairs.b.request.tolist() == [0, 0, 0, 3, 3, 3, 3]


def test_pairs_with_a_missing_side_count_for_neither() -> None:
    whole = busy_run(np.random.default_rng(4), count=50)
    a, b = np.insert(whole.a.numbers, 10, 1e9), np.insert(whole.b.numbers, 10, math.nan)
    mended = changes([Pairs.of(a, b)], [MEAN], SeedDraws(1, 100, 0))[0]
    assert mended.relative == pytest.approx(
        changes([whole], [MEAN], SeedDraws(1, 100, 0))[0].relative
    )


@pytest.mark.parametrize("values", [[], [math.nan], [1.0]])
def test_too_little_gives_no_interval(values: list[float]) -> None:
    found = change([Pairs.of(np.array(values), np.array(values))], MEAN)
    assert math.isnan(found.low)
    assert not found.measurable


def test_from_nothing_to_something_has_no_ratio() -> None:
    found = change([Pairs.of(np.zeros(40), np.ones(40))], MEAN)
    assert math.isnan(found.relative)
    assert not found.measurable


def test_one_number_a_run_has_an_interval_only_from_many_runs() -> None:
    a, b = np.array([10.0, 11, 12, 10, 11]), np.array([8.0, 8.8, 9.7, 8, 8.8])
    assert scalar_change(a, b, SeedDraws(5, 500, 0)).measurable
    assert math.isnan(scalar_change(a, b, BlockDraws(3, 30, 500, 0)).low)


def test_blocks_grow_with_the_memory_of_a_series() -> None:
    rng = np.random.default_rng(5)
    lengths = [optimal_block(autoregressive(rng, 4_000, memory)) for memory in (0.0, 0.7, 0.95)]
    assert lengths[0] <= 5 < lengths[1] < lengths[2]


def test_a_run_shorter_than_its_memory_is_said_to_be() -> None:
    trend = np.linspace(1, 100, 100)
    assert block_length([Pairs.of(np.ones(100), trend)], MEAN).capped
    rng = np.random.default_rng(6)
    assert not block_length([busy_run(rng, count=2_000, memory=0.5)], MEAN).capped


def test_rounding_has_no_memory() -> None:
    rising = np.linspace(1, 2, 100)
    assert block_length([Pairs.of(rising, 0.3 * rising * (1 + 1e-15 * rising))], MEAN).requests == 1


def test_a_wider_confidence_gives_a_wider_interval() -> None:
    rng = np.random.default_rng(7)
    runs = [busy_run(rng) for _ in range(6)]
    narrow, wide = change(runs, MEAN, confidence=0.8), change(runs, MEAN, confidence=0.99)
    assert wide.low < narrow.low < narrow.high < wide.high
