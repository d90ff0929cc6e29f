"""Earliest deadline first, and turning away."""

from __future__ import annotations

import pytest

from dovetail.testing import make_request, plan
from dovetail_schedulers.edf import EDF, EDFOptions
from tests.engine.world import Shape, Spec, World


def test_the_earliest_deadline_goes_first_and_none_comes_last() -> None:
    deadlines = {"never": None, "soon": 5.0, "later": 9.0, "never too": None, "sooner": 3.0}
    waiting = [
        make_request(id, 8, deadline=deadline, arrival_time=at / 10)
        for at, (id, deadline) in enumerate(deadlines.items())
    ]
    assert list(plan(EDF, options=EDFOptions(), waiting=waiting).granted) == [
        "sooner",
        "soon",
        "later",
        "never",
        "never too",
    ]


def test_an_earlier_deadline_pushes_out_the_latest() -> None:
    running = [
        make_request("none", 8, generated=1),
        make_request("late", 7, generated=1, deadline=50.0),
    ]
    done = plan(
        EDF,
        options=EDFOptions(),
        running=running,
        waiting=[make_request("urgent", 8, deadline=2.0)],
        free_pages=0,
    )
    assert done.preempted == ("none",)
    assert done.granted == {"urgent": 8, "late": 1}


def test_what_is_late_is_rejected_with_its_deadline_in_the_reason() -> None:
    done = plan(
        EDF,
        options=EDFOptions(),
        waiting=[make_request("late", 8, deadline=0.5), make_request("fine", 8, deadline=1.5)],
        now=1.0,
    )
    assert list(done.granted) == ["fine"]
    assert done.rejected == {"late": "its deadline at 0.500 s can no longer be met at 1.000 s"}


def warm(options: EDFOptions | None = None) -> World:
    """A policy that knows its device: steps of 10 ms and 1 ms a token."""
    world = World(EDF, Shape(), options or EDFOptions())
    for i in range(4):
        world.add(Spec(f"warm{i}", tuple(range(5 + 9 * i)), max_tokens=10, delay=i * 0.1))
    world.drain()
    return world


def finish_reason(
    world: World, deadline_s: float, predicted: int | None, max_tokens: int = 20
) -> str:
    world.add(
        Spec(
            "asked",
            tuple(range(50, 60)),
            max_tokens=max_tokens,
            deadline=world.clock.now() + deadline_s,
            predicted_tokens=predicted,
        )
    )
    world.drain()
    return world.finished["asked"].reason


def test_a_deadline_that_leaves_time_for_the_predicted_length_is_kept() -> None:
    world = warm()
    assert (
        finish_reason(world, 0.32, predicted=20) == "length"
    )  # a prefill of 20 ms and 19 decodes of 11 ms
    assert world.requests["asked"].last_token_time <= world.requests["asked"].deadline  # type: ignore[operator]


def test_a_deadline_too_near_for_the_predicted_length_is_rejected_before_anything_runs() -> None:
    world = warm()
    assert finish_reason(world, 0.15, predicted=20) == "rejected"
    assert world.requests["asked"].generated == 0


@pytest.mark.parametrize(("assume", "generated"), [("shortest", True), ("longest", False)])
def test_without_a_prediction_the_shortest_answer_is_assumed_unless_told(
    assume: str, generated: bool
) -> None:
    world = warm(EDFOptions(assume=assume))  # type: ignore[arg-type]
    assert finish_reason(world, 0.15, predicted=None) == "rejected"  # sooner or later
    assert (world.requests["asked"].generated > 0) == generated


def test_estimates_are_not_trusted_before_the_warm_up() -> None:
    world = World(EDF, Shape(), EDFOptions(warmup_steps=1000))
    assert finish_reason(world, 0.15, predicted=20) == "rejected"
    assert world.requests["asked"].generated > 0
