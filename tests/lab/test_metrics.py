"""The definitions of vLLM's `bench serve`, from arrival; what didn't complete has no latency and
meets no objective."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dovetail_lab.metrics import Slo, Summary, itl_s, measure, per_request
from tests.lab.made_runs import record, rejected, run

GAPS = (0.1, 0.3)


def test_latencies_of_a_request() -> None:
    one = [record(0, 0.5, arrival_s=3.0, gaps_s=GAPS)]
    values = {name: per_request(one, name)[0] for name in ("ttft", "tpot", "e2e", "queue")}
    assert values == pytest.approx({"ttft": 0.5, "tpot": 0.2, "e2e": 0.9, "queue": 0.25})
    assert itl_s(one) == pytest.approx(GAPS)


def test_one_token_has_no_tpot_and_a_rejected_request_has_nothing() -> None:
    records = [record(0, 0.5, gaps_s=()), rejected(1)]
    assert np.isnan(per_request(records, "tpot")).all()
    assert np.isnan(per_request(records, "ttft")).tolist() == [False, True]


def test_itl_weighs_tokens_and_tpot_requests() -> None:
    metrics = measure(run([record(0, 0.1, gaps_s=(1.0,) * 9), record(1, 0.1, gaps_s=(2.0,))]))
    assert metrics.latencies["tpot"].mean == pytest.approx(1.5)
    assert metrics.latencies["itl"].mean == pytest.approx(1.1)


def test_rates_are_over_the_time_from_the_first_arrival_to_the_last_token() -> None:
    metrics = measure(
        run(
            [
                record(0, 1.0, arrival_s=2.0, gaps_s=GAPS),
                record(1, 1.6, arrival_s=5.0, gaps_s=GAPS),
                rejected(2),
            ]
        )
    )
    assert metrics.duration_s == pytest.approx(5.0)
    assert (metrics.completed, metrics.rejected, metrics.failed) == (2, 1, 0)
    assert metrics.request_rate == pytest.approx(2 / 5)
    assert metrics.output_rate == pytest.approx(6 / 5)
    assert metrics.total_rate == pytest.approx((6 + 21) / 5)


def test_rates_cover_the_time_in_which_requests_arrive_though_the_last_are_rejected() -> None:
    metrics = measure(run([record(0, 1.0), record(1, 1.0), rejected(2), rejected(9)]), Slo())
    assert metrics.request_rate == pytest.approx(2 / 9)
    assert metrics.output_rate == pytest.approx(6 / 9)


def test_goodput_is_over_the_time_in_which_requests_arrive_however_long_the_answers_take() -> None:
    ttfts = (1.0, 30.0, 40.0, 50.0)
    late, refused = (
        measure(run([record(0, 1.0), *others]), Slo(ttft_s=2))
        for others in (map(record, range(1, 4), ttfts[1:]), map(rejected, range(1, 4)))
    )
    assert late.goodput == refused.goodput == pytest.approx(1 / 3)
    assert measure(
        run([record(0, 1.0), record(1, 3.0, arrival_s=0.0)]), Slo(ttft_s=2)
    ).goodput == pytest.approx(1 / 3.2), "all at once: until the end"


def test_percentiles_are_numpys_and_skip_what_is_missing() -> None:
    values = np.array([3.0, math.nan, 1.0, 2.0])
    summary = Summary.of(values)
    assert (summary.count, summary.percentiles[50]) == (3, 2.0)
    assert summary.percentiles[90] == pytest.approx(np.percentile([1.0, 2.0, 3.0], 90))
    assert math.isnan(Summary.of(np.array([math.nan])).mean)


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(), 3),
        (Slo(ttft_s=0.5), 2),
        (Slo(tpot_s=0.15), 1),  # the one with a single token
        (Slo(ttft_s=0.5, e2e_s=0.85), 1),
    ],
)
def test_goodput_counts_those_that_meet_every_objective(slo: Slo, good: int) -> None:
    records = [
        record(0, 0.4, gaps_s=GAPS),
        record(1, 0.5, gaps_s=GAPS),
        record(2, 0.6, gaps_s=()),
        rejected(3),
    ]
    metrics = measure(run(records), slo)
    assert metrics.good_requests == good
    assert metrics.attainment == pytest.approx(good / 4)
    assert metrics.goodput == pytest.approx(good / 3)


def test_a_window_measures_requests_that_arrive_in_it_and_what_is_delivered_in_it() -> None:
    """A request a second, each answered by three tokens, after 0.5, 1.0 and 1.5 s; the fifth is
    rejected."""
    records = [record(index, 0.5, gaps_s=(0.5, 0.5)) for index in range(10)]
    records[4] = rejected(4)
    metrics = measure(run(records, window=(2.25, 6.25)), Slo(ttft_s=1))
    assert (metrics.requests, metrics.completed, metrics.rejected) == (4, 3, 1)
    assert metrics.duration_s == metrics.offered_s == 4
    assert metrics.output_rate == pytest.approx(9 / 4), (
        "of requests 1, 2, 3 and 5: 1, 3, 3 and 2 less what is outside"
    )
    assert metrics.request_rate == pytest.approx(3 / 4), "of requests 1, 2 and 3"
    assert metrics.total_rate == pytest.approx(
        (9 + sum(records[index].prompt_tokens for index in (2, 3, 5))) / 4
    )
    assert (metrics.goodput, metrics.attainment) == (pytest.approx(3 / 4), pytest.approx(3 / 4))
    assert metrics.device_share == pytest.approx(4 * 0.5 / 4)
    assert metrics.latencies["ttft"].count == 3


def test_a_run_of_nothing_has_no_figures_and_no_errors() -> None:
    metrics = measure(run([]))
    assert (metrics.requests, metrics.request_rate) == (0, 0.0)
