"""Short answers first, by what was predicted of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.testing import make_request, plan
from dovetail_schedulers.lengths import expected_tokens
from dovetail_schedulers.sjf import SJF
from dovetail_schedulers.srpt import SRPT, SRPTOptions
from tests.engine.world import Shape, Spec, World
from tests.support import examples

PURE = SRPTOptions(preempt_until=1.0)


def finishing_order(world: World, lengths: list[int], guesses: list[int | None]) -> list[str]:
    for i, (length, guess) in enumerate(zip(lengths, guesses, strict=True)):
        world.add(Spec(f"r{i}", (i,) * 4, max_tokens=length, predicted_tokens=guess))
    world.drain()
    return world.heard.finished


def test_the_shortest_predicted_answer_is_admitted_first_and_max_tokens_stands_in() -> None:
    waiting = [
        make_request("long", max_tokens=50, predicted_tokens=40),
        make_request("unknown", max_tokens=20),
        make_request("short", max_tokens=50, predicted_tokens=5),
    ]
    assert list(plan(SJF, waiting=waiting).granted) == ["short", "unknown", "long"]


def test_a_job_that_runs_is_not_put_off_for_a_shorter_one() -> None:
    running = [make_request("long", generated=1, max_tokens=50)]
    done = plan(SJF, running=running, waiting=[make_request("short", max_tokens=2)], max_num_seqs=1)
    assert done.granted == {"long": 1}


def test_the_longest_makes_room_for_a_shorter_one_that_runs() -> None:
    running = [
        make_request("short", 7, generated=2, max_tokens=4),
        make_request("long", 7, generated=2, max_tokens=90),
    ]
    assert plan(SJF, running=running, free_pages=0).preempted == ("long",)


@examples(quick=20, full=300)
@given(lengths=st.lists(st.integers(1, 12), min_size=2, max_size=8))
def test_one_at_a_time_answers_end_by_length(lengths: list[int]) -> None:
    order = finishing_order(World(SJF, Shape(max_num_seqs=1)), lengths, [*lengths])
    assert order == [f"r{i}" for i in sorted(range(len(lengths)), key=lambda i: lengths[i])]


def test_a_shorter_answer_takes_the_place_of_one_that_runs() -> None:
    running = [make_request("long", generated=1, max_tokens=50)]
    done = plan(
        SRPT,
        options=SRPTOptions(),
        running=running,
        waiting=[make_request("short", max_tokens=2)],
        max_num_seqs=1,
    )
    assert done.granted == {"short": 8}
    assert not done.preempted, "memory didn't lack"


def test_a_shorter_answer_takes_the_memory_of_one_that_runs() -> None:
    running = [make_request("long", 8, generated=1, max_tokens=50)]
    done = plan(
        SRPT,
        options=SRPTOptions(),
        running=running,
        waiting=[make_request("short", max_tokens=2)],
        free_pages=0,
    )
    assert done.preempted == ("long",)
    assert done.granted == {"short": 8}


def test_who_has_done_most_of_its_answer_is_finished() -> None:
    running = [make_request("nearly", 8, generated=41, max_tokens=50)]
    waiting = [make_request("short", max_tokens=2)]
    assert plan(
        SRPT,
        options=SRPTOptions(preempt_until=0.8),
        running=running,
        waiting=waiting,
        max_num_seqs=1,
    ).granted == {"nearly": 1}


def test_what_counts_is_what_is_left_not_what_was_expected() -> None:
    running = [make_request("half", generated=15, max_tokens=20)]
    assert list(
        plan(
            SRPT,
            options=PURE,
            running=running,
            waiting=[make_request("new", max_tokens=6)],
            max_num_seqs=1,
        ).granted
    ) == ["half"]


def test_of_answers_of_equal_length_the_first_is_never_preempted() -> None:
    world = World(SRPT, Shape(num_pages=8, block_size=2, max_model_len=16, token_budget=16), PURE)
    finishing_order(world, [8, 8, 8, 8], [None] * 4)
    assert world.core.update_stats().preemptions > 0
    assert world.requests["r0"].preemptions == 0


@pytest.mark.parametrize(("guess", "expected"), [(None, 16), (5, 5), (1, 4), (99, 16)])
def test_an_expected_length_is_more_than_there_is_and_no_more_than_allowed(
    guess: int | None, expected: int
) -> None:
    assert (
        expected_tokens(make_request("r", generated=3, max_tokens=16, predicted_tokens=guess))
        == expected
    )
