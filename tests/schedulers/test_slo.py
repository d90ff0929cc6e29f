"""Objectives of latency: first tokens by a deadline, and a bound on the time between tokens."""

from __future__ import annotations

import numpy as np
import pytest

from dovetail.api.observer import StepFinished
from dovetail.api.scheduler import SchedulerCapabilities
from dovetail.testing import make_request, plan
from dovetail_schedulers.slo import LEAST, SLO, SLOOptions
from tests.engine.world import Shape, Spec, World

STEP_S, TOKEN_S = 0.05, 0.001  # of the fake device


def world(options: SLOOptions, **shape: int) -> World:
    sizes = {
        "num_pages": 4_000,
        "block_size": 16,
        "token_budget": 2_000,
        "max_num_seqs": 32,
        "max_model_len": 6_000,
    } | shape
    return World(SLO, Shape(**sizes, seconds_per_step=STEP_S, reuse=False), options)  # type: ignore[arg-type]


def prompt(index: int, tokens: int) -> tuple[int, ...]:
    return tuple((index * 7 + place) % 90 for place in range(tokens))


def test_first_tokens_that_are_due_first_go_first_and_without_an_objective_last() -> None:
    due = {"never": None, "soon": 5.0, "later": 9.0, "sooner": 3.0}
    waiting = [make_request(id, 8, ttft_deadline=at) for id, at in due.items()]
    assert list(plan(SLO, options=SLOOptions(ttft_s=None), waiting=waiting).granted) == [
        "sooner",
        "soon",
        "later",
        "never",
    ]


def test_who_says_nothing_has_the_objective_of_the_options() -> None:
    waiting = [
        make_request("default", 8, arrival_time=0.5),
        make_request("before", 8, ttft_deadline=2.4),
        make_request("after", 8, ttft_deadline=2.6),
    ]
    assert list(plan(SLO, options=SLOOptions(ttft_s=2.0), waiting=waiting).granted) == [
        "before",
        "default",
        "after",
    ]


@pytest.mark.parametrize("late", ["reject", "last"])
def test_what_is_late_is_rejected_or_comes_last(late: str) -> None:
    waiting = [
        make_request("late", 8, ttft_deadline=0.5),
        make_request("fine", 8, ttft_deadline=1.5),
    ]
    done = plan(SLO, options=SLOOptions(late=late), waiting=waiting, now=1.0)  # type: ignore[arg-type]
    assert list(done.granted) == (["fine"] if late == "reject" else ["fine", "late"])
    assert done.rejected == (
        {"late": "its first token would be late: it is due in -0.500 s"} if late == "reject" else {}
    )
    assert done.policy.capabilities == SchedulerCapabilities(
        idles=True, starves=True, rejects=late == "reject", prefill_limited=False
    )


def test_one_that_is_not_late_yet_but_will_be_is_turned_away_when_it_arrives() -> None:
    engine = world(SLOOptions(ttft_s=4.0))
    for i in range(12):  # the fit learns what a step and a prompt token take
        engine.add(Spec(f"warm{i}", prompt(i, 100 * i + 50), max_tokens=3, delay=0.5 * i))
    engine.drain()
    start = engine.clock.now()
    for i in range(9):  # each takes 1.1 s; all come at once
        engine.add(Spec(f"r{i}", prompt(20 + i, 1_000), max_tokens=2))
    engine.drain()
    served = [f"r{i}" for i in range(9) if engine.finished[f"r{i}"].reason == "length"]
    assert served == ["r0", "r1", "r2"]
    firsts = [engine.requests[id].first_token_time for id in served]
    assert all(first is not None and first - start <= 4.0 for first in firsts)
    assert all(engine.requests[f"r{i}"].first_scheduled_time is None for i in range(3, 9)), (
        "nothing was computed of those turned away"
    )


def test_steps_keep_the_tightest_bound_among_those_that_decode() -> None:
    engine = world(SLOOptions(ttft_s=None, tbt_s=1.0))
    for i in range(12):
        engine.add(Spec(f"warm{i}", prompt(i, 100 * i + 50), max_tokens=3, delay=0.5 * i))
    for request in engine.add(Spec("stream", (1, 2, 3), max_tokens=120, delay=8.0)):
        request.tbt_s = 0.6
    engine.add(Spec("other", (4, 5, 6), max_tokens=120, delay=8.0))
    engine.add(Spec("long", prompt(50, 5_000), max_tokens=1, delay=10.0))
    engine.drain()
    events = [
        e
        for e in engine.observer.events
        if isinstance(e, StepFinished) and e.decode_tokens and e.prefill_tokens and e.planned > 9.0
    ]
    longest = max(event.ended - event.started for event in events)
    assert 0.9 * 0.6 <= longest <= 1.02 * 0.6


def test_while_the_estimate_is_unsure_steps_beside_answers_are_short() -> None:
    stream = make_request("stream", 8, generated=2)
    done = plan(
        SLO,
        options=SLOOptions(),
        running=[stream],
        waiting=[make_request("long", 900)],
        token_budget=1_000,
        free_pages=300,
    )
    assert done.granted == {"stream": 1, "long": LEAST}


@pytest.mark.slow("tries large sizes")
def test_under_overload_most_meet_their_objective_where_in_order_of_arrival_hardly_any_do() -> None:
    def in_time(ttft_s: float | None) -> int:
        engine = world(SLOOptions(ttft_s=ttft_s, tbt_s=None))
        times = np.random.default_rng(1).exponential(0.7, 60).cumsum()
        for i, at in enumerate(times.tolist()):
            engine.add(Spec(f"r{i}", prompt(i, 700 + 37 * (i % 11)), max_tokens=2, delay=at))
        engine.drain()
        firsts = [
            r.first_token_time - r.arrival_time
            for r in engine.requests.values()
            if r.first_token_time is not None
        ]
        return sum(first <= 3.0 for first in firsts)

    assert in_time(3.0) >= 36
    assert in_time(None) <= 25
