"""Stall-free batches within a budget of their own."""

from __future__ import annotations

from dovetail.request import Request
from dovetail.testing import make_request, plan
from dovetail_schedulers.sarathi import Sarathi, SarathiOptions

CHUNK = SarathiOptions(chunk_tokens=10)


def answers(count: int) -> list[Request]:
    return [make_request(f"d{i}", generated=2) for i in range(count)]


def test_answers_come_first_and_prompts_fill_what_is_left_of_the_chunk() -> None:
    done = plan(Sarathi, options=CHUNK, running=answers(3), waiting=[make_request("p", 40)])
    assert list(done.granted.items()) == [("d0", 1), ("d1", 1), ("d2", 1), ("p", 7)]


def test_a_prompt_that_has_begun_continues_before_a_new_one() -> None:
    begun = make_request("begun", 20, computed=15, arrival_time=0.2)
    done = plan(
        Sarathi, options=CHUNK, running=[begun], waiting=[make_request("new", 20, arrival_time=0.1)]
    )
    assert list(done.granted.items()) == [("begun", 5), ("new", 5)]


def test_answers_alone_may_go_beyond_the_chunk() -> None:
    done = plan(
        Sarathi,
        options=SarathiOptions(chunk_tokens=2),
        running=answers(4),
        waiting=[make_request("p", 8)],
    )
    assert done.granted == {"d0": 1, "d1": 1, "d2": 1, "d3": 1}


def test_a_prompt_begins_only_where_all_of_it_fits() -> None:
    done = plan(
        Sarathi, options=CHUNK, waiting=[make_request("p", 40), make_request("q", 4)], free_pages=9
    )
    assert done.granted == {}
    assert (
        plan(Sarathi, options=CHUNK, waiting=[make_request("p", 40)], free_pages=10).free_pages == 0
    )


def test_the_engine_s_budget_bounds_the_chunk() -> None:
    assert plan(
        Sarathi,
        options=SarathiOptions(chunk_tokens=512),
        waiting=[make_request("p", 40)],
        token_budget=6,
    ).granted == {"p": 6}
