"""Steps on a slow device are sized by its measured speed; only what doesn't get on counts as
stuck."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dovetail.api.observer import StepFinished
from dovetail.engine.step_times import FEWEST_TOKENS, LONGEST_STEP_S
from tests.engine.policies import FCFS
from tests.engine.world import Shape, Spec, World

SLOW = Shape(
    num_pages=300,
    block_size=16,
    token_budget=2048,
    max_model_len=2100,
    max_num_seqs=4,
    overlap=False,
)


def steps(shape: Shape, *specs: Spec) -> list[StepFinished]:
    world = World(FCFS, shape)
    for spec in specs:
        world.add(spec)
    world.drain()
    return [event for event in world.observer.events if isinstance(event, StepFinished)]


def seconds(event: StepFinished) -> float:
    return event.ended - event.started


@pytest.mark.parametrize("token_s", [0.04, 0.2])
@pytest.mark.parametrize("rate", [0.5, 4.0])
def test_a_long_prompt_is_computed_in_steps_of_some_seconds(token_s: float, rate: float) -> None:
    """2,000 tokens take 80 or 400 seconds here."""
    shape = replace(SLOW, prompt_rate=rate, seconds_per_step=0.3, seconds_per_token=token_s)
    done = steps(shape, Spec("long", (1,) * 2_000, max_tokens=4))
    assert max(map(seconds, done)) <= 1.01 * LONGEST_STEP_S
    assert sum(map(seconds, done)) <= 1.15 * (2_000 * token_s + 4), (
        "large enough that the fixed part of a step hardly counts"
    )


def test_a_step_that_a_wrong_guess_has_made_too_long_is_the_only_one() -> None:
    done = steps(
        replace(SLOW, prompt_rate=1e6, seconds_per_token=0.04),
        Spec("long", (1,) * 2_000, max_tokens=2),
        Spec("next", (2,) * 2_000),
    )
    assert [event.index for event in done if seconds(event) > 1.01 * LONGEST_STEP_S] == [0]


def test_a_device_that_is_fast_enough_gets_whole_budgets_after_a_few_steps() -> None:
    """However low the guess, and whatever short prompts come in between."""
    shape = replace(SLOW, prompt_rate=1.0, seconds_per_step=0.05, seconds_per_token=1e-4)
    others = [
        Spec(f"short {index}", (3,) * 5, max_tokens=2, delay=20.0 + index) for index in range(4)
    ]
    done = steps(
        shape,
        Spec("first", (1,) * 2_000, max_tokens=2),
        *others,
        Spec("second", (2,) * 2_000, max_tokens=2, delay=40.0),
    )
    assert len([event for event in done if event.prefill_tokens > 5]) <= 6
    assert max(event.prefill_tokens for event in done if event.planned > 39.0) == 2_000


def test_prompts_get_on_beside_any_number_of_decodes() -> None:
    shape = replace(SLOW, prompt_rate=1e-3, seconds_per_step=10.0, seconds_per_token=1.0)
    done = steps(
        shape, Spec("answers", (1,) * 4, max_tokens=60), Spec("prompt", (2,) * 64, max_tokens=1)
    )
    assert max(event.prefill_tokens for event in done) <= FEWEST_TOKENS
    assert sum(event.prefill_tokens for event in done) == 68


def test_other_devices_get_what_their_budget_allows() -> None:
    done = steps(
        replace(SLOW, prompt_rate=None, seconds_per_token=1.0),
        Spec("long", (1,) * 2_000, max_tokens=2),
    )
    assert done[0].prefill_tokens == 2_000
