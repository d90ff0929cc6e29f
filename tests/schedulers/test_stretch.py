"""Prompts that arrive while answers are streamed stretch a step only so far, in simulation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.api.observer import StepFinished
from dovetail.api.scheduler import Claims, SchedulerContext
from dovetail.sampling_params import OutputKind, SamplingParams
from dovetail.testing import make_request
from dovetail_schedulers.fcfs import FCFS, FCFSOptions
from dovetail_schedulers.stretch import LEAST, prefill_within
from tests.engine.world import Shape, Spec, World

DECODES = 4
STEP_S, TOKEN_S = 0.6, 0.001  # of the fake device
ALONE_S = STEP_S + DECODES * TOKEN_S
SHAPE = Shape(num_blocks=2_000, block_size=16, max_tokens=4096, max_seqs=16, max_model_len=6000, seconds_per_step=STEP_S, events=True)


def longest_step_beside_decodes(max_stretch: float | None, prompts: int = 3, output_kind: OutputKind = OutputKind.DELTA) -> tuple[float, float]:
    """(the longest device time of a step while four answers go on and prompts of 4,000 tokens come, when the last prompt was through)."""
    world = World(FCFS, SHAPE, FCFSOptions(max_stretch=max_stretch))
    specs = [Spec(f"d{i}", (i,) * 20, max_tokens=200) for i in range(DECODES)]
    specs += [Spec(f"p{i}", tuple((j * (i + 3)) % 90 for j in range(4000)), max_tokens=1, delay=20.0 + 15 * i) for i in range(prompts)]
    for spec in specs:
        for request in world.add(spec):
            request.params = SamplingParams(max_tokens=spec.max_tokens, output_kind=output_kind)
    world.drain()
    steps = [event for event in world.observer.events if isinstance(event, StepFinished) and event.decode_tokens]
    assert any(event.prefill_tokens for event in steps)
    return max(event.ended - event.started for event in steps), max(world.requests[f"p{i}"].first_token_time or 0.0 for i in range(prompts))


@pytest.mark.parametrize("max_stretch", [1.5, 2.0, 4.0])
def test_no_step_with_a_streamed_answer_is_stretched_further_than_allowed(max_stretch: float) -> None:
    longest, _ = longest_step_beside_decodes(max_stretch)
    assert longest <= 1.05 * max(max_stretch * ALONE_S, ALONE_S + LEAST * TOKEN_S)


def test_without_a_bound_a_step_is_as_long_as_the_budget_lets_it() -> None:
    longest, _ = longest_step_beside_decodes(None)
    assert longest > 6 * ALONE_S


def test_prompts_are_through_about_as_soon() -> None:
    (_, bounded), (_, free) = longest_step_beside_decodes(2.0), longest_step_beside_decodes(None)
    assert bounded <= 1.15 * free


@pytest.mark.parametrize(
    ("base_s", "token_s", "tokens"),
    [
        pytest.param(0.0, 0.0, 4096, id="no step was seen yet"),
        pytest.param(0.01, 0.0, LEAST, id="prompt tokens seem to cost nothing"),
        pytest.param(0.01, 1e-5, 1000, id="both are known"),
        pytest.param(0.01, 1e-3, LEAST, id="a token takes long"),
        pytest.param(0.01, 1e-9, 4096, id="a token takes no time to speak of"),
    ],
)
def test_how_many_prompt_tokens_a_step_takes_beside_streams(base_s: float, token_s: float, tokens: int) -> None:
    stream = make_request("stream", 8, generated=2)
    stream.params = SamplingParams(output_kind=OutputKind.DELTA)

    def estimate_s(prefill_tokens: int, decodes: int, context_tokens: int) -> float:
        return base_s + token_s * prefill_tokens

    step: Any = SimpleNamespace(decoding=(stream,), estimate_s=estimate_s)
    assert prefill_within(step, 2.0, 4096) == pytest.approx(tokens, abs=1)


def test_who_wants_the_final_output_alone_does_not_hold_prompts_up() -> None:
    assert longest_step_beside_decodes(2.0, output_kind=OutputKind.FINAL) == longest_step_beside_decodes(None, output_kind=OutputKind.FINAL)


def test_a_bound_leaves_room_unused_and_says_so() -> None:
    context = SchedulerContext(max_tokens=64, max_seqs=8, total_blocks=64, block_size=4, seed=0)
    assert FCFS(FCFSOptions(), context).claims == Claims(order="arrival", idles=True)
    assert FCFS(FCFSOptions(max_stretch=None), context).claims == Claims(order="arrival")
