"""Phases of a start add up to the whole, whichever are within others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from dovetail import LLMEngine
from dovetail.api.start_phases import StartPhases, measuring_start, phase


def clock(*times: float) -> Callable[[], float]:
    """A clock that shows these times, one after the other."""
    return iter(times).__next__


def test_the_time_of_an_inner_phase_is_not_also_that_of_the_outer_one() -> None:
    phases = StartPhases(clock(0, 1, 3, 6, 10, 15))
    with phases.phase("config"), phases.phase("imports"):
        pass
    assert phases.seconds == {"other": 1 + 5, "config": 2 + 4, "imports": 3}


def test_a_phase_that_recurs_is_counted_once() -> None:
    phases = StartPhases(clock(0, 1, 2, 4, 8, 8))
    for _ in range(2):
        with phases.phase("imports"):
            pass
    assert phases.seconds == {"other": 1 + 2, "imports": 1 + 4}


def test_a_phase_that_fails_is_over() -> None:
    phases = StartPhases(clock(0, 0, 2, 3))
    with pytest.raises(ZeroDivisionError), phases.phase("weights"):
        _ = 1 / 0
    assert phases.seconds == {"other": 1, "weights": 2}


def test_short_phases_are_told_among_the_others() -> None:
    phases = StartPhases(clock(0, 1, 3, 3, 3.04, 4))
    with phases.phase("weights"):
        pass
    with phases.phase("config"):
        pass
    assert str(phases) == "4.0 s: weights 2.0, other 2.0"


def test_phases_count_for_the_start_that_is_measured_in_this_thread_and_nothing_else() -> None:
    with phase("before"):
        pass

    def elsewhere() -> None:
        with phase("elsewhere"):
            pass

    with measuring_start() as phases:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        with phase("weights"):
            pass
    with phase("after"):
        pass
    assert set(phases.seconds) == {"other", "weights"}


def test_an_engine_logs_its_phases_and_has_them_among_its_details(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG, "dovetail"), LLMEngine.from_config("demo") as engine:
        took = engine.capacity.details["start"]
    assert f"ready after {took}" in caplog.messages
    assert took.partition(": ")[2].endswith(f"other {took.rpartition(' ')[2]}")
