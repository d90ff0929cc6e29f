"""Whole prompts before answers, never both in a step."""

from __future__ import annotations

import pytest

from dovetail.testing import make_request, plan
from dovetail_schedulers.prefill_first import PrefillFirst, PrefillFirstOptions
from tests.engine.world import Shape, Spec, World

NO_WATERMARK = PrefillFirstOptions(watermark=0.0)


def test_answers_wait_while_a_prompt_can_begin() -> None:
    done = plan(
        PrefillFirst,
        options=NO_WATERMARK,
        running=[make_request("answer", generated=2)],
        waiting=[make_request("prompt", 10)],
    )
    assert done.granted == {"prompt": 10}


def test_prompts_are_taken_whole_in_order_of_arrival_and_none_is_passed_over() -> None:
    waiting = [
        make_request("a", 10, arrival_time=0.1),
        make_request("b", 12, arrival_time=0.2),
        make_request("c", 3, arrival_time=0.3),
    ]
    done = plan(PrefillFirst, options=NO_WATERMARK, waiting=waiting, token_budget=16)
    assert done.granted == {"a": 10}


def test_answers_run_when_no_prompt_fits_in_memory() -> None:
    done = plan(
        PrefillFirst,
        options=NO_WATERMARK,
        running=[make_request("answer", generated=2)],
        waiting=[make_request("prompt", 40)],
        free_pages=3,
    )
    assert done.granted == {"answer": 1}


@pytest.mark.parametrize(
    ("free_pages", "answers", "granted"),
    [
        (10, 0, {"prompt": 40}),  # an idle engine leaves nothing free
        (19, 1, {"answer0": 1}),  # a tenth of the pages is more than what would be left
        (20, 1, {"answer0": 1}),
        (21, 1, {"prompt": 40}),
    ],
)
def test_an_admission_leaves_the_watermark_free_but_not_on_an_idle_engine(
    free_pages: int, answers: int, granted: dict[str, int]
) -> None:
    done = plan(
        PrefillFirst,
        options=PrefillFirstOptions(watermark=0.5),
        running=[make_request(f"answer{index}", 3, generated=2) for index in range(answers)],
        waiting=[make_request("prompt", 40)],
        free_pages=free_pages,
    )
    assert done.granted == granted


def test_who_decodes_in_another_step_counts_as_a_sequence() -> None:
    running = [make_request(f"answer{i}", generated=2) for i in range(2)]
    done = plan(
        PrefillFirst,
        options=NO_WATERMARK,
        running=running,
        waiting=[make_request("prompt", 8)],
        max_num_seqs=2,
    )
    assert done.granted == {"answer0": 1, "answer1": 1}


def test_a_prompt_longer_than_the_budget_continues_before_any_answer() -> None:
    running = [make_request("answer", generated=2), make_request("long", 40, computed=16)]
    assert plan(
        PrefillFirst, options=NO_WATERMARK, running=running, token_budget=16, free_pages=20
    ).granted == {"long": 16}


@pytest.mark.parametrize("overlap", [True, False])
def test_no_step_of_an_engine_mixes_prompts_and_answers(overlap: bool) -> None:
    world = World(
        PrefillFirst, Shape(token_budget=16, overlap=overlap, reuse=False), PrefillFirstOptions()
    )
    for i in range(12):
        world.add(Spec(f"r{i}", tuple(range(i, i + 3 + 5 * (i % 5))), max_tokens=6, delay=i * 0.02))
    world.drain()
    decoded: set[str] = set()
    for event in world.observer.events:
        if hasattr(event, "prefill_tokens"):
            assert not (event.prefill_tokens and event.decode_tokens), event
            decoded.add("prefill" if event.prefill_tokens else "decode")
    assert decoded == {"prefill", "decode"}
