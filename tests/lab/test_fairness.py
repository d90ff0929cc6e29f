"""Service over time, and how unequal it is: the measures of the VTC paper's artifact, on work whose
answer is plain."""

from __future__ import annotations

import numpy as np
import pytest

from dovetail_lab.fairness import (
    Work,
    arena_centres,
    service_difference,
    service_over_time,
    work_of,
)
from tests.lab.made_runs import record, rejected, run

ONE_WINDOW = np.array([5.0])  # of ten seconds


def work(client: str, arrival_s: float, first_s: float, last_s: float, service: float) -> Work:
    return Work(client, arrival_s, first_s, last_s, service)


def test_service_spreads_evenly_from_the_first_token_to_the_last() -> None:
    service = service_over_time([work("a", 0.0, 5.0, 15.0, 100.0)], ONE_WINDOW, 10.0)
    assert service.served[0, 0] == pytest.approx(5.0)  # half of it, over ten seconds
    assert service.asked[0, 0] == pytest.approx(10.0)


def test_equal_service_is_no_difference_and_neither_is_wanting_nothing() -> None:
    equal = [work(client, 1.0, 2.0, 8.0, 60.0) for client in "ab"]
    absent = work("c", 50.0, 51.0, 52.0, 1000.0)
    service = service_over_time([*equal, absent], ONE_WINDOW, 10.0)
    assert service_difference(service) == pytest.approx([0.0])


def test_who_waits_lags_behind_as_far_as_it_asked() -> None:
    served, starved = work("a", 0.0, 0.0, 10.0, 100.0), work("b", 1.0, 30.0, 40.0, 70.0)
    assert service_difference(
        service_over_time([served, starved], ONE_WINDOW, 10.0)
    ) == pytest.approx([7.0])


def test_work_is_of_completed_requests_prompt_plus_twice_the_answer() -> None:
    [one] = work_of(run([record(0, 0.5, gaps_s=(0.1, 0.1)), rejected(1)]))
    assert (one.client, one.service) == ("a", 10 + 2 * 3)


def test_the_artifacts_windows() -> None:
    centres = arena_centres()
    assert (len(centres), centres[0], centres[-1]) == (
        19,
        pytest.approx(58.5),
        pytest.approx(571.5),
    )
