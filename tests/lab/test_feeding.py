"""When a trace's requests are made, in real time and in a simulation."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.engine.live_request import LiveRequest
from dovetail_lab.feeding import AHEAD_S, Feeder
from dovetail_lab.simulate import replay
from tests.lab.runs import engine, request, run, trace

EVERY_S = AHEAD_S / 10


@pytest.fixture
def made() -> list[float]:
    """Arrival times of the requests that the engine was given."""
    return []


def feeder(made: list[float], simulated: bool) -> Feeder:
    """Return a feeder of a trace that starts at 0 with one request every `EVERY_S`."""
    engine: Any = SimpleNamespace(
        capacity=SimpleNamespace(vocab_size=100, max_model_len=100),
        config=SimpleNamespace(limits=SimpleNamespace(max_waiting=None)),
        add_request=lambda *args, arrival_time, **rest: made.append(arrival_time),
    )
    rows = SimpleNamespace(expect=lambda *args: None)
    executor: Any = SimpleNamespace(rows=rows) if simulated else None
    return Feeder(
        engine,
        executor,
        trace(*(request(index, index * EVERY_S) for index in range(50))),
        0.0,
        lambda *args: None,
    )


@pytest.mark.parametrize("simulated", [False, True])
def test_one_request_is_made_between_two_steps_and_in_time(
    made: list[float], simulated: bool
) -> None:
    feed = feeder(made, simulated).feed
    feed(-EVERY_S)
    assert made[-1] > AHEAD_S - 2 * EVERY_S, "before the trace begins there is time for many"
    for step in range(60):
        now, before = step * EVERY_S / 2, len(made)
        feed(now)
        assert len(made) <= before + 1
        assert len(made) == 50 or made[-1] > now + AHEAD_S - 2 * EVERY_S


def test_who_was_forgotten_is_made_at_once(made: list[float]) -> None:
    feed = feeder(made, simulated=False).feed
    feed(0.0)
    feed(3.0)
    assert made[-1] > 3.0


def test_who_has_arrived_is_known_and_the_next(made: list[float]) -> None:
    feed = feeder(made, simulated=True).feed
    for now in (0.0, EVERY_S / 2, EVERY_S, 7.5 * EVERY_S, 30 * EVERY_S):
        feed(now)
        assert made == pytest.approx([index * EVERY_S for index in range(len(made))])
        assert made[-1] > now


@pytest.mark.parametrize("every_s", [0.5, 0.02])
def test_a_request_is_rejected_if_max_waiting_are_unfinished_when_it_arrives(
    every_s: float,
) -> None:
    most = 5
    result = run(
        (request(index, index * every_s) for index in range(60)),
        limits={"max_waiting": most},
        max_num_seqs=2,
    )
    taken = [record for record in result if record.finish_reason != "rejected"]
    for record in result:
        unfinished = sum(other.arrival_s < record.arrival_s < other.finished_s for other in taken)
        assert (record.finish_reason == "rejected") == (unfinished >= most)
    assert (len(taken) == 60) == (every_s == 0.5)


def test_a_run_keeps_no_request_that_has_ended() -> None:
    alive = []

    def progress(done: int, of_all: int) -> None:
        if not alive or done == of_all:
            alive.append(sum(isinstance(one, LiveRequest) for one in gc.get_objects()))

    gc.collect()
    replay(
        engine(), trace(*(request(index, index * 0.5) for index in range(20))), progress=progress
    )
    assert len(alive) == 2
    assert alive[1] <= alive[0]
