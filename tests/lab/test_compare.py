"""Comparing runs: what is said of them, and what is refused."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dovetail.errors import ConfigError
from dovetail_lab.compare import compare
from dovetail_lab.draws import BlockDraws, SeedDraws
from dovetail_lab.records import RunResult
from dovetail_lab.statistics import Change
from dovetail_lab.verdict import Comparison, Line
from tests.lab.made_runs import record, rejected, run, run_of_ttfts


def ttfts(seed: int = 0, count: int = 120) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0, 0.4, count)


def compared(a: list[RunResult], b: list[RunResult], **options: Any) -> Comparison:
    return compare({"A": a, "B": b}, resamples=300, **options)


def with_own_traffic(factor: float, seed: int) -> RunResult:
    values = ttfts(seed)
    return run(
        (
            record(index, factor * value, arrival_s=index + seed / 10)
            for index, value in enumerate(values)
        ),
        seed=seed,
    )


def test_the_same_runs_are_said_to_be_the_same() -> None:
    same = [run_of_ttfts(ttfts())]
    assert (
        compared(same, same).versus[0].verdict
        == "B behaves exactly like A: no measurable difference, every token came at the same time"
    )


def test_a_cut_is_reported_with_its_interval_and_what_doesnt_differ_without() -> None:
    base = ttfts()
    verdict = compared([run_of_ttfts(base)], [run_of_ttfts(0.69 * base)]).versus[0].verdict
    assert verdict.startswith("B cuts mean TTFT by 31 % [31, 31], cuts p99 TTFT by 31 % [31, 31]")
    assert "no measurable difference in mean and p99 TPOT, mean and p99 ITL" in verdict


@pytest.mark.parametrize("factor", [0.5, 1.02, 3.0])
@pytest.mark.parametrize("seeds", [1, 5])
def test_a_verdict_names_the_mean_and_the_p99_of_every_latency_once(
    factor: float, seeds: int
) -> None:
    base, other = ([with_own_traffic(by, seed) for seed in range(seeds)] for by in (1.0, factor))
    verdict = (
        compared(base, other)
        .versus[0]
        .verdict.replace("mean and p99", "mean X, p99")
        .replace("; ", ", ")
    )
    named = re.sub(r"mean X, p99 (\w+)", r"mean \1, p99 \1", verdict)
    for label in (
        *(
            f"{statistic} {metric}"
            for statistic in ("mean", "p99")
            for metric in ("TTFT", "TPOT", "ITL", "E2E")
        ),
        "output tokens/s",
    ):
        assert named.count(label) == 1, (label, verdict)


def test_a_verdict_names_the_p50_of_a_latency_that_changes_most() -> None:
    base = ttfts()
    # most requests gain, and the slowest don't
    other = np.where(base < np.quantile(base, 0.6), base / 4, base)
    verdict = compared([run_of_ttfts(base)], [run_of_ttfts(other)]).versus[0].verdict
    assert "cuts p50 TTFT by 75 %" in verdict
    assert "p90" not in verdict


def test_a_verdict_names_the_p90_of_a_latency_that_changes_most() -> None:
    base = np.random.default_rng(0).permutation(np.repeat([1.0, 2.0, 9.0], [340, 48, 12]))
    slow = np.where(base == 2.0, 8.0, base)
    assert (
        "makes p90 TTFT 4 times as much"
        in compared([run_of_ttfts(base)], [run_of_ttfts(slow)]).versus[0].verdict
    )
    assert "p90" not in compared([run_of_ttfts(base)], [run_of_ttfts(0.5 * base)]).versus[0].verdict


def test_a_stall_that_tpot_averages_away_stands_in_the_verdict() -> None:
    """One gap of each request is twelve times as long, the others are shorter: the sum stays."""
    smooth, stalling = [0.05] * 21, [0.6, *[0.45 / 20] * 20]
    base, other = (
        [run(record(i, value, gaps_s=gaps) for i, value in enumerate(ttfts()))]
        for gaps in (smooth, stalling)
    )
    verdict = compared(base, other).versus[0].verdict
    assert "makes p99 ITL 12 times as much [12, 12]" in verdict
    assert "no measurable difference in mean and p99 TTFT, mean and p99 TPOT, mean ITL" in verdict


def remembering(factor: float, seed: int = 0, **options: Any) -> RunResult:
    """Requests whose TTFT rises to the end, as in an overload: the run is one long memory."""
    return run_of_ttfts(
        (1 + index * (factor + 0.01 * math.sin(index + seed)) for index in range(60)),
        seed=seed,
        **options,
    )


@pytest.mark.parametrize("seeds", [1, 2])
def test_what_the_footer_calls_too_narrow_is_no_finding(seeds: int) -> None:
    base, other = ([remembering(factor, seed) for seed in range(seeds)] for factor in (1.0, 1.2))
    found = compared(base, other)
    assert "intervals are too narrow" in found.method.warnings[0]
    line = found.versus[0].line("ttft", "p99")
    assert (line.change.measurable, line.measurable, line.better) == (True, False, None)
    assert line.outcome == "runs too short to tell"
    assert re.match(
        r"B against A: mean TTFT \+\d+.\d %, p99 TTFT .*: these runs are too short to rule out "
        r"chance; ",
        found.versus[0].verdict,
    )
    assert not re.search("cuts|raises|makes", found.versus[0].verdict)


@pytest.mark.parametrize(
    ("seeded", "remedy"),
    [(True, "use a longer trace, or --seeds 5 or more"), (False, "use a longer trace")],
)
def test_more_seeds_are_advised_only_where_they_bring_other_traffic(
    seeded: bool, remedy: str
) -> None:
    method = compared([remembering(1.0, seeded=seeded)], [remembering(1.2, seeded=seeded)]).method
    assert method.warnings[0].endswith(remedy)
    assert ("too few to draw among" in method.says) == seeded
    replayed = [
        [replace(remembering(factor, seeded=seeded), seed=seed) for seed in range(2)]
        for factor in (1.0, 1.2)
    ]
    assert compared(*replayed).method.warnings[0].endswith("use a longer trace")


def test_the_order_of_the_policies_turns_the_verdict_around() -> None:
    base = ttfts()
    forth = compared([run_of_ttfts(base)], [run_of_ttfts(base / 2)]).versus[0]
    back = compared([run_of_ttfts(base / 2)], [run_of_ttfts(base)]).versus[0]
    assert "cuts p99 TTFT by 50 %" in forth.verdict
    assert "makes p99 TTFT 2 times as much" in back.verdict
    assert (forth.line("ttft", "p99").better, back.line("ttft", "p99").better) == (True, False)


def test_an_interval_without_zero_is_never_shown_with_one() -> None:
    changed = Line("ttft", "p99", Change(1.0, 1.2, 0.2, 0.003, 0.6))
    assert changed.finding == "raises p99 TTFT by 20.0 % [0.3, 60.0]"
    assert (
        Line("ttft", "p99", Change(1.0, 2.3, 1.3, 0.04, 1.4)).finding
        == "makes p99 TTFT 2.3 times as much [1.04, 2.4]"
    )


def test_many_times_as_long_is_said_as_a_factor() -> None:
    base = ttfts()
    assert (
        "makes p99 TTFT 3 times as much"
        in compared([run_of_ttfts(base)], [run_of_ttfts(3 * base)]).versus[0].verdict
    )


@pytest.mark.slow("draws many samples")
def test_whole_runs_are_drawn_only_if_seeds_give_other_traffic_and_enough_of_it() -> None:
    own = [[with_own_traffic(factor, seed) for seed in range(5)] for factor in (1.0, 0.9)]
    assert isinstance(compared(*own).method.draws, SeedDraws)
    assert isinstance(compared(own[0][:4], own[1][:4]).method.draws, BlockDraws)
    replayed = [
        [replace(run_of_ttfts(factor * ttfts()), seed=seed) for seed in range(5)]
        for factor in (1.0, 0.9)
    ]
    method = compared(*replayed).method
    assert isinstance(method.draws, BlockDraws)
    assert method.draws.same_traffic
    assert "all 5 seeds replay the same arrivals and lengths" in method.says
    assert "every seed gave the same runs: one would do" in method.warnings


def test_rates_have_an_interval_from_enough_seeds_only() -> None:
    own = [[with_own_traffic(factor, seed) for seed in range(6)] for factor in (1.0, 5.0)]
    assert compared(*own).versus[0].line("output_rate", "").outcome in (
        "worse",
        "no measurable difference",
    )
    assert (
        compared(own[0][:1], own[1][:1]).versus[0].line("output_rate", "").outcome == "no interval"
    )


def test_a_policy_that_turns_requests_away_has_that_said_first() -> None:
    base = ttfts(count=40)
    picky = run(
        [rejected(i) if i % 10 == 0 else record(i, value / 2) for i, value in enumerate(base)]
    )
    versus = compared([run_of_ttfts(base)], [picky]).versus[0]
    assert versus.verdict.startswith(
        "B completes 90.0 % of the requests, A 100.0 %, and latencies are of those that both "
        "completed; B cuts"
    )
    assert versus.compared == 36


def test_nothing_completed_cannot_be_compared() -> None:
    none = [run(map(rejected, range(5)))]
    assert (
        compared([run_of_ttfts(ttfts(count=5))], none).versus[0].verdict
        == "B can't be compared with A: no request was completed by both"
    )


def test_one_request_gets_no_interval() -> None:
    verdict = compared([run_of_ttfts([1.0])], [run_of_ttfts([0.5])]).versus[0].verdict
    assert "p99 TTFT -50.0 %" in verdict
    assert verdict.endswith("(without an interval)")


def test_each_is_compared_with_the_first_and_all_intervals_are_counted() -> None:
    base = ttfts()
    found = compare(
        {name: [run_of_ttfts(factor * base)] for name, factor in {"A": 1, "B": 2, "C": 3}.items()},
        resamples=100,
    )
    assert [(versus.base, versus.other) for versus in found.versus] == [("A", "B"), ("A", "C")]
    assert found.caution.startswith(
        "32 intervals, each of 95 %: without any differences, about 1.6 would"
    )


def test_shares_of_requests_leave_out_ties() -> None:
    base = ttfts(count=10)
    changed = base * np.array([0.5] * 3 + [2.0] * 2 + [1.0] * 5)
    sides = compared([run_of_ttfts(base)], [run_of_ttfts(changed)]).versus[0].faster["ttft"]
    assert sides == pytest.approx((0.3, 0.2))


def test_the_same_call_gives_the_same_comparison() -> None:
    runs = {"A": [run_of_ttfts(ttfts(0))], "B": [run_of_ttfts(ttfts(1))]}
    assert repr(compare(runs, resamples=200)) == repr(compare(runs, resamples=200))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            [run_of_ttfts(ttfts(count=119))],
            "A ran 120 requests of made, B ran 119 of made: not the same trace",
        ),
        ([run_of_ttfts(ttfts(), seed=1)], "a run of A has seed 0, its counterpart of B seed 1"),
        ([run_of_ttfts(ttfts()), run_of_ttfts(ttfts())], "A has 1 runs and B 2"),
        (
            [run(record(i, 1.0, predicted_tokens=7) for i in range(120))],
            "request 0 of A isn't request 0 of B: not the same trace, or prediction",
        ),
    ],
)
def test_runs_of_other_requests_are_refused(other: list[RunResult], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        compared([run_of_ttfts(ttfts())], other)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"confidence": 1.0}, "--confidence"),
        ({"confidence": 0.1}, "--confidence"),
        ({"resamples": 5}, "--resamples"),
    ],
)
def test_senseless_settings_are_refused(options: dict[str, Any], says: str) -> None:
    same = [run_of_ttfts([1.0])]
    with pytest.raises(ConfigError, match=says):
        compare({"A": same, "B": same}, **options)


def test_a_single_policy_has_nothing_to_compare_with() -> None:
    with pytest.raises(ConfigError, match="needs two policies or more"):
        compare({"A": [run_of_ttfts([1.0])]})
