"""Frames of requests that end before a step had time to save them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dovetail.engine.tiers import kept_blocks
from dovetail.engine.tiers.host_time import HostTime
from dovetail.engine.tiers.prospect import Pace
from tests.engine.policies import FCFS, Chaos, Regrets, RoundRobin
from tests.engine.world import Shape, Spec, World
from tests.tiers.tiered import FRAME, InOrder, Tiered

SHAPE = Shape(num_pages=128, strict=True)
PROMPT = tuple(range(1, 62))  # seven frames and some tokens


@pytest.fixture(autouse=True)
def saves_one_frame_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.engine.tiers.keys.FRAME_TOKENS", FRAME)
    monkeypatch.setattr(HostTime, "frames", lambda *_: 1.0)
    monkeypatch.setattr(Pace, "loading_s", lambda *_: 0.0)


def prompts(count: int) -> Iterator[tuple[int, ...]]:
    chance = random.Random(0)
    for _ in range(count):
        yield tuple(chance.randrange(97) for _ in range(61))


def run_beside(tiered: Tiered, *specs: Spec) -> None:
    """Answer requests one after the other while another one generates."""
    world = tiered.world
    world.add(Spec("running", (1, 2, 3), max_tokens=100))
    for spec in specs:
        world.add(spec)
        while spec.id not in world.finished:
            world.step()
            world.check()
    assert "running" not in world.finished


@pytest.mark.parametrize("answer", [1, 2, 5])
def test_all_frames_of_long_prompts_with_short_answers_are_saved(answer: int) -> None:
    tiered = Tiered.of(SHAPE)
    specs = [
        Spec(str(number), prompt, max_tokens=answer) for number, prompt in enumerate(prompts(6))
    ]
    run_beside(tiered, *specs)
    tiered.world.drain()
    tiered.settle()
    tiered.check()
    assert not tiered.feature.stats.dropped_frames
    ended = [(*spec.prompt, *tiered.world.tokens[spec.id]) for spec in specs]
    whole = sum((len(tokens) - 1) // FRAME for tokens in ended) + 102 // FRAME
    assert tiered.feature.stats.saved_frames == whole


def test_an_idle_engine_saves_what_its_last_request_has_left() -> None:
    tiered = Tiered.of(SHAPE)
    tiered.world.add(Spec("only", PROMPT, max_tokens=1))
    tiered.world.drain()
    assert tiered.world.kv.counts.held
    tiered.settle()
    tiered.check()
    assert tiered.feature.stats.saved_frames == 7


def test_what_is_saved_of_ended_requests_is_restored() -> None:
    tiered = Tiered.of(SHAPE)
    run_beside(tiered, Spec("first", PROMPT, max_tokens=1))
    tiered.world.drain()
    tiered.settle()
    tiered.forget_device()
    tiered.world.add(Spec("again", PROMPT, max_tokens=1))
    tiered.world.drain()
    assert tiered.world.requests["again"].restored_tokens == 7 * FRAME


def test_an_aborted_request_leaves_its_frames_and_no_page() -> None:
    tiered = Tiered.of(SHAPE)
    world = tiered.world
    world.add(Spec("running", (1, 2, 3), max_tokens=100))
    world.add(Spec("long", PROMPT, max_tokens=50))
    while not world.requests["long"].generated:
        world.step()
    world.abort("long")
    world.check()
    world.drain()
    tiered.settle()
    tiered.check()
    assert tiered.feature.stats.saved_frames >= 7
    assert not tiered.feature.stats.dropped_frames


def test_a_request_may_have_the_id_of_one_that_has_just_ended() -> None:
    tiered = Tiered.of(SHAPE)
    world = tiered.world
    world.add(Spec("running", (1, 2, 3), max_tokens=100))
    for prompt in prompts(3):
        for records in (world.finished, world.tokens, world.requests, world.heard.arrived):
            records.pop("same", None)
        world.heard.finished.clear()
        world.add(Spec("same", prompt, max_tokens=2))
        while "same" not in world.finished:
            world.step()
        assert world.kv.counts.held > 16, "the blocks of the prompt"
        assert world.tokens["same"] == world.expected("same")[0]
    while world.core.has_unfinished():
        world.step()
    tiered.settle()
    assert not world.kv.counts.held


def test_blocks_of_few_ended_requests_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_blocks, "MOST_KEPT", 2)
    tiered = Tiered.of(replace(SHAPE, num_pages=400, token_budget=400))
    for number, prompt in enumerate(prompts(4)):
        tiered.world.add(Spec(str(number), prompt, max_tokens=1))
    tiered.world.drain()
    assert tiered.world.kv.counts.held <= 2 * 16
    tiered.settle()
    tiered.check()
    assert tiered.feature.stats.dropped_frames["busy"] > 0


def test_a_reset_frees_the_blocks_of_ended_requests() -> None:
    tiered = Tiered.of(SHAPE)
    run_beside(tiered, Spec("first", PROMPT, max_tokens=1))
    held = tiered.world.kv.counts.held
    tiered.world.core.reset_cache()
    assert tiered.world.kv.counts.held <= held - 15
    tiered.world.drain()
    tiered.settle()
    tiered.check()


def test_an_engine_that_ends_saves_what_ended_requests_have_left() -> None:
    tiered = Tiered.of(SHAPE)
    tiered.world.add(Spec("only", PROMPT, max_tokens=1))
    tiered.world.drain()
    tiered.world.core.stop()
    assert tiered.feature.stats.saved_frames == 7


def steps_of(seed: int, *, with_tiers: bool) -> tuple[list[tuple[object, ...]], int]:
    """Run random traffic without common prefixes in a tiny pool; return what the policy has seen
    and been told, and the number of frames saved."""
    chance = random.Random(seed)
    shape = Shape(
        num_pages=chance.choice([24, 40, 60]),
        overlap=False,  # its timing depends on the host's
        token_budget=chance.choice([5, 16, 64]),
        max_num_seqs=chance.choice([1, 3, 8]),
    )
    world = World(chance.choice([FCFS, Chaos, Regrets, RoundRobin]), shape, executor=InOrder)
    tiered = Tiered.of(world=world) if with_tiers else None
    for number in range(20):
        prompt = (number, *(chance.randrange(97) for _ in range(chance.randint(2, 60))))
        world.add(
            Spec(
                str(number),
                prompt,
                max_tokens=chance.randint(1, 12),
                delay=chance.choice([0.0, 0.1]),
                n=chance.choice([1, 1, 1, 2]),
            )
        )
        if chance.random() < 0.2:
            world.abort(chance.choice([*world.requests]))
        for _ in range(chance.randrange(6)):
            world.step()
        world.check()
    world.drain()
    calls = world.heard.calls
    if tiered is None:
        return calls, 0
    tiered.settle()
    tiered.check()
    return calls, tiered.feature.stats.saved_frames


@pytest.mark.parametrize("seed", [1, 3])
def test_kept_blocks_delay_nobody_and_none_stays_held(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(Pace, "loading_s", lambda *_: math.inf)  # restore nothing
    calls, saved = steps_of(seed, with_tiers=True)
    assert calls == steps_of(seed, with_tiers=False)[0]
    assert saved > 0
