"""Objectives: read right, judged right, and every request that wasn't served counts against
them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import ConfigError
from dovetail_lab.slo import PRESETS, Objective, parse_slo
from tests.lab.made_runs import record, rejected, run, run_of_ttfts
from tests.support import examples


def test_objectives_are_read_with_their_units() -> None:
    assert parse_slo("ttft_p99<0.5, tpot_mean<=50ms,e2e_p99.9<2s") == (
        Objective("ttft", 0.99, 0.5),
        Objective("tpot", None, 0.05),
        Objective("e2e", pytest.approx(0.999), 2.0),
    )


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_read_and_has_a_source(name: str) -> None:
    assert [objective.name for objective in parse_slo(name)] == ["ttft_p99", "tpot_p99"]
    assert PRESETS[name].source


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected METRIC_STATISTIC<SECONDS"),
        ("ttft_p99", "neither an objective, like ttft_p99<0.5, nor a preset"),
        ("mlperf-llama2-70", "did you mean mlperf-llama2-70b"),
        ("tftt_p99<1", "unknown metric 'tftt', did you mean ttft?"),
        ("ttft_p99>1", "expected METRIC_STATISTIC<SECONDS"),
        ("ttft_p100<1", "between 0 and 100"),
        ("ttft_p0<1", "between 0 and 100"),
        ("ttft_p99<0", "more than 0"),
        ("ttft_p99<1e999", "more than 0"),
        ("ttft_p99<1.2.3", "'1.2.3' is no number"),
        ("ttft_p99<1,", "expected METRIC_STATISTIC<SECONDS"),
        ("ttft_p99<1,ttft_p99<2", "ttft_p99 is limited twice"),
    ],
)
def test_what_cannot_be_read_is_explained(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_slo(text)


@examples(quick=80, full=1_000)
@given(
    ttfts=st.lists(st.floats(0.01, 10), min_size=1, max_size=60),
    turned_away=st.integers(0, 10),
    percent=st.integers(1, 99),
    limit=st.floats(0.01, 10),
)
def test_a_percentile_is_met_if_that_share_of_all_requests_sent_is_within_the_limit(
    ttfts: list[float], turned_away: int, percent: int, limit: float
) -> None:
    made = run(
        [record(i, t, arrival_s=0.0) for i, t in enumerate(ttfts)]
        + [rejected(len(ttfts) + i) for i in range(turned_away)]
    )
    within = sum(t <= limit for t in ttfts)
    assert Objective("ttft", percent / 100, limit).judge([made]).met == (
        100 * within >= percent * len(made)
    )


@pytest.mark.parametrize("statistic", [None, 0.99])
@pytest.mark.parametrize("metric", ["ttft", "tpot", "itl", "e2e"])
def test_rejected_requests_count_as_infinitely_slow(metric: str, statistic: float | None) -> None:
    made = run([record(i, 0.1) if i % 10 else rejected(i) for i in range(40)])
    judged = Objective(metric, statistic, 1e6).judge([made])
    assert judged.value == math.inf
    assert not judged.met


def test_a_request_of_one_token_has_no_tpot_to_miss() -> None:
    assert Objective("tpot", 0.99, 1e-9).judge([run([record(0, 0.1, gaps_s=())])]).met


def test_nothing_completed_meets_nothing() -> None:
    assert not parse_slo("ttft_p50<1")[0].judge([run([rejected(0)])]).met


def test_runs_are_judged_together() -> None:
    quick, slow = run_of_ttfts(np.full(98, 0.1)), run_of_ttfts(np.full(2, 5.0))
    assert parse_slo("ttft_p98<1")[0].judge([quick, slow]).met
    assert not parse_slo("ttft_p99<1")[0].judge([quick, slow]).met
