"""Random traffic over the fakes: whatever is restored, no step reads a page of another prefix, or
one that is still being restored, and nothing stays held."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from dovetail.api.kv_tier import KVTier
from dovetail.engine.tiers import tier_jobs
from dovetail.engine.tiers.host_time import HostTime
from dovetail.engine.tiers.prospect import Pace
from tests.engine.policies import FCFS, Chaos, Regrets, RoundRobin
from tests.engine.world import Shape, Spec, World
from tests.tiers.test_in_the_loop import WRONG
from tests.tiers.tiered import FRAME, InOrder, Tiered, ToyTier

WORLDS = int(os.environ.get("DOVETAIL_TIER_WORLDS", "0"))  # besides those in which most happens
# seeds: tiers that damage frames, restored prefixes, a reset meanwhile, provisional K and V
EVENTFUL = (40, 32, 58, 21)
LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 6},
    {"groups": ((4, None, 1), (4, 10, 1))},
    {"groups": ((4, None, 1), (8, 21, 2))},
    {"groups": ((8, None, 2), (4, 5, 1), (4, 13, 3))},
    {"state_pages": 2},
    {"groups": ((4, None, 1), (8, 10, 1)), "state_pages": 3},
)


@pytest.fixture(autouse=True)
def restores_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.engine.tiers.keys.FRAME_TOKENS", FRAME)
    monkeypatch.setattr(Pace, "loading_s", lambda *_: 0.0)
    monkeypatch.setattr(tier_jobs, "STORE_S", 0.5)


def random_world(chance: random.Random) -> Tiered:
    layout = chance.choice(LAYOUTS)
    shape = Shape(
        num_pages=chance.choice([90, 120, 200]),
        max_in_flight=chance.choice([1, 2, 3]),
        token_budget=chance.choice([5, 16, 64]),
        max_num_seqs=chance.choice([1, 3, 8]),
        drafter=chance.choice([None, None, "alternating", "model"]),
        adapters=chance.choice([0, 2]),
        deterministic_window=0 if "state_pages" in layout else 5,
        **layout,
    )
    world = World(chance.choice([FCFS, Chaos, Regrets, RoundRobin]), shape, executor=InOrder)
    kinds = chance.sample([ToyTier, ToyTier, *WRONG], chance.choice([0, 1, 1, 2]))

    def tiers(clock: Any) -> Sequence[KVTier]:
        return [kind(clock) for kind in kinds]

    return Tiered.of(
        world=world, tiers=tiers, host_bytes=chance.choice([1 << 13, 1 << 15, 1 << 17])
    )


def tried(seed: int) -> Counter[str]:
    """Try a world; return what its tiers have done."""
    chance = random.Random(seed)
    tiered = random_world(chance)
    frames_per_step = random.Random(f"frames {seed}").choice([1.0, 3.0, 100.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostTime, "frames", lambda *_: frames_per_step)
        return traffic(tiered, seed, chance)


def traffic(tiered: Tiered, seed: int, chance: random.Random) -> Counter[str]:
    world = tiered.world
    marks = random.Random(-seed)
    beginnings = [tuple(chance.randrange(97) for _ in range(chance.randint(8, 60))) for _ in "abc"]
    number = 0
    for _ in range(chance.randint(60, 200)):
        act = chance.random()
        if act < 0.25:
            begun = chance.choice(beginnings)
            rest = [chance.randrange(97) for _ in range(chance.randint(1, 20))]
            number += 1
            world.add(
                Spec(
                    str(number),
                    (*begun[: chance.randint(1, len(begun))], *rest),
                    max_tokens=chance.randint(1, 24),
                    n=chance.choice([1, 1, 1, 3]),
                    cache_keys=chance.choice([(), (), ("salt",)]),
                    adapter=chance.choice([None, "lora"]) if world.shape.adapters else None,
                    prompt_logprobs=chance.choice([None] * 9 + [1]),
                    delay=chance.choice([0.0, 0.0, 0.05]),
                    deterministic=world.shape.deterministic_window > 0 and marks.random() < 0.4,
                )
            )
        elif act < 0.28 and world.requests:
            world.abort(chance.choice([*world.requests]))
        elif act < 0.31:
            tiered.forget_device()
        elif act < 0.33:
            tiered.pool.clear()
        elif act < 0.34:
            for tier in tiered.tiers:
                if hasattr(tier, "hangs"):
                    tier.hangs = chance.random() < 0.7
        elif act < 0.345:
            world.core.reset_cache()
        elif world.core.has_unfinished():
            world.step()
            if chance.random() < 0.05:
                world.kv.check_integrity()
                tiered.pool.check_integrity()
        else:
            world.core.idle()
            world.clock.wait_until(world.clock.now() + 0.01)
    world.drain(20_000)
    for tier in tiered.tiers:
        tier.hangs = False  # type: ignore[attr-defined]
    tiered.settle()
    tiered.check()
    stats = tiered.feature.stats
    world.core.stop()
    tiered.pool.check_integrity()
    return Counter(
        restored=stats.restored_tokens,
        saved=stats.saved_frames,
        busy=stats.dropped_frames["busy"],
        loaded=sum(stats.loaded_frames.values()),
        damaged=sum(stats.damaged_frames.values()),
        states=stats.restored_tokens if world.shape.state_pages else 0,
        windows=stats.restored_tokens if world.core.books.layout.has_windows else 0,
        worlds=1,
        **{f"missed {why}": count for why, count in stats.missed.items()},
    )


@pytest.mark.parametrize("seed", [*dict.fromkeys([*EVENTFUL, *range(WORLDS)])])
def test_no_traffic_reads_what_was_not_restored(seed: int) -> None:
    done = tried(seed)
    assert seed not in EVENTFUL or done["restored"] + done["damaged"] > 0
