"""NaN in K and V, which a row notices only once it yields a token: perhaps steps later, when others
have read its pages, or the request is preempted or aborted. Frames and blocks that contain NaN must
not be reused afterwards, or later requests would fail, too.

The fake executor spreads NaN as a device does: by what rows read, through saves and restores.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from dovetail.engine.tiers.prospect import Pace
from tests.engine.policies import FCFS, Chaos
from tests.engine.world import Shape, Spec, World
from tests.tiers.tiered import FRAME, InOrder, Tiered, ToyTier

SHAPE = Shape(num_pages=64, token_budget=8)  # a frame in each step of a prompt
BEGIN = tuple(range(1, 34))  # four frames and a token
PROMPTS = (
    BEGIN,
    (*BEGIN, *range(60, 90)),
    (*BEGIN[:20], *range(40, 60)),
    tuple(range(50, 91)),
)


@pytest.fixture(autouse=True)
def restores_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use short frames, and restore even what is computed sooner."""
    monkeypatch.setattr("dovetail.engine.tiers.keys.FRAME_TOKENS", FRAME)
    monkeypatch.setattr(Pace, "loading_s", lambda *_: 0.0)


def tiered_of(shape: Shape = SHAPE, policy: type = FCFS) -> Tiered:
    world = World(policy, shape, executor=InOrder)
    return Tiered.of(world=world, tiers=lambda clock: [ToyTier(clock)])


def run_all(tiered: Tiered) -> None:
    """Run all requests to their end. Those that aren't failed have the right tokens."""
    world = tiered.world
    while world.core.has_unfinished():
        world.step()
    tiered.settle()
    for name, finish in world.finished.items():
        answer = (world.tokens[name], finish.reason)
        assert finish.reason in ("error", "rejected") or answer == world.expected(name)
    world.kv.check_integrity()
    tiered.pool.check_integrity()


def end(tiered: Tiered, name: str, prompt: tuple[int, ...]) -> str:
    """Run a request to its end; return how it ended."""
    tiered.world.add(Spec(name, prompt, max_tokens=2))
    run_all(tiered)
    return tiered.world.finished[name].reason


def steps_until_saved(tiered: Tiered, frames: int) -> None:
    while tiered.pool.frames < frames:
        tiered.world.step()


def test_frames_of_an_aborted_prompt_fail_one_request_at_most() -> None:
    tiered = tiered_of()
    tiered.world.executor.writes_nan = True
    tiered.world.add(Spec("aborted", PROMPTS[1]))
    steps_until_saved(tiered, 3)
    tiered.world.abort("aborted")
    run_all(tiered)
    tiered.world.executor.writes_nan = False
    tiered.forget_device()
    assert end(tiered, "first", PROMPTS[1]) == "error"
    assert end(tiered, "second", PROMPTS[1]) == "length"


def test_blocks_that_were_restored_for_a_failed_row_are_not_reused() -> None:
    tiered = tiered_of()
    assert end(tiered, "first", BEGIN) == "length"
    tiered.forget_device()
    tiered.world.executor.writes_nan = True
    assert end(tiered, "restored", BEGIN) == "error"
    tiered.world.executor.writes_nan = False
    assert tiered.world.requests["restored"].restored_tokens
    assert end(tiered, "again", BEGIN) == "length"
    assert tiered.world.requests["again"].cached_tokens == 0


@pytest.mark.parametrize("max_in_flight", [1, 2, 3, 4])
def test_no_frame_of_a_failed_row_is_kept(max_in_flight: int) -> None:
    tiered = tiered_of(replace(SHAPE, max_in_flight=max_in_flight))
    tiered.world.executor.writes_nan = True
    for number, prompt in enumerate(PROMPTS):
        tiered.world.add(Spec(f"{number}", prompt, delay=0.01 * number))
    run_all(tiered)
    assert {finish.reason for finish in tiered.world.finished.values()} == {"error"}
    assert tiered.pool.frames == 0


@pytest.mark.parametrize("seed", range(12))
def test_no_prompt_fails_twice_once_the_device_is_sound(seed: int) -> None:
    chance = random.Random(seed)
    shape = replace(
        SHAPE,
        num_pages=chance.choice([40, 64]),
        max_in_flight=chance.choice([1, 2, 3, 4]),
        token_budget=chance.choice([8, 16]),
        groups=chance.choice([(), ((4, None, 1), (4, 12, 2))]),
    )
    tiered = tiered_of(shape, chance.choice([FCFS, Chaos]))
    world = tiered.world
    for round_ in range(4):
        for number in range(6):
            name = f"{round_}: {number}"
            world.add(Spec(name, chance.choice(PROMPTS), max_tokens=3, delay=0.02 * number))
        while world.core.has_unfinished():
            world.executor.writes_nan = chance.random() < 0.4
            world.step()
            if chance.random() < 0.1:
                world.abort(f"{round_}: {chance.randrange(6)}")
        tiered.settle()
        if chance.random() < 0.5:
            tiered.forget_device()
        world.executor.writes_nan = False
        for number, prompt in enumerate(PROMPTS):
            ends = [end(tiered, f"{round_} {number} {again}", prompt) for again in range(3)]
            assert ends.count("error") <= 1
