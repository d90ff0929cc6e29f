"""In pools that barely hold one request, every request ends: adapters, cache groups, states,
samples, drafts, aborts, and any policy, even one that loses interest. The engine lives, no page
leaks, and no token is wrong.

`test_engine_stateful.py` tries acts in any order; here many requests of nearly the full length need
the same pages, slots and tokens at once.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.kv_cache import CacheGroup, KVLayout
from dovetail.api.scheduler import Scheduler, SchedulerCapabilities, Step
from dovetail_schedulers.fcfs import FCFS
from tests.engine.drafters import DRAFTERS
from tests.engine.policies import BUILT_IN, Named
from tests.engine.world import Shape, Spec, World
from tests.support import examples

GROUPS = [(None,), (8,), (None, 3), (None, 8), (2, 9), (None, 1, 6)]


@st.composite
def tight(draw: st.DrawFn) -> Shape:
    """An engine whose pool has hardly more pages than a request of the full length needs."""
    max_model_len, max_tokens = (
        draw(st.integers(8, 60)),
        draw(st.sampled_from([1, 2, 3, 7, 7, 16, 64])),
    )
    unit = draw(st.integers(1, 4))
    groups = tuple(
        (unit * draw(st.sampled_from([1, 1, 2])), window, draw(st.sampled_from([1, 1, 3])))
        for window in draw(st.sampled_from(GROUPS))
    )
    layout = KVLayout(
        tuple(CacheGroup((index,), *group) for index, group in enumerate(groups)), 1, "none"
    )
    state_pages = draw(st.sampled_from([0, 0, 1, 3]))
    return Shape(
        num_pages=layout.most_pages(max_model_len, max_tokens)
        + state_pages
        + draw(st.sampled_from([0, 0, 1, 2, 3])),
        groups=groups,
        state_pages=state_pages,
        max_in_flight=draw(st.integers(1, 3)),
        overlap=draw(st.booleans()),
        token_budget=max_tokens,
        max_num_seqs=draw(st.integers(1, 7)),
        max_model_len=max_model_len,
        reuse=draw(st.sampled_from([True, True, True, False])),
        prefill_limit=draw(st.sampled_from([None, 2.0])),
        drafter=draw(st.sampled_from([None, None, *DRAFTERS])),
        adapters=draw(st.sampled_from([0, 1, 1, 2])),
        slot_wait_s=draw(st.sampled_from([0.02, 1.0])),
        seed=draw(st.integers(0, 1000)),
        events=False,
        strict=True,
    )


def crowd(shape: Shape, seed: int) -> list[Spec]:
    """Requests of which half are nearly as long as may be."""
    chance = random.Random(seed)
    most = shape.max_model_len - 1
    specs = []
    for index in range(chance.randint(2, 8)):
        length = chance.choice([chance.randint(1, most), max(1, most - chance.randint(0, 3))])
        prompt = (
            (0,) * length
            if chance.random() < 0.5
            else tuple(chance.randrange(5) for _ in range(length))
        )
        specs.append(
            Spec(
                f"r{index}",
                prompt,
                max_tokens=chance.randint(1, shape.max_model_len - length),
                n=chance.choice([1, 1, 1, 2, 3]),
                delay=chance.choice([0, 0, 0.005, 0.1]),
                priority=chance.randint(-1, 2),
                client=chance.choice([None, "a", "b"]),
                adapter=chance.choice([None, "x", "y"]) if shape.adapters else None,
            )
        )
    return specs


def play(world: World, specs: list[Spec], aborts: list[int]) -> None:
    """Add all requests, abort some on the way, and run until none is left."""
    for spec in specs:
        world.add(spec)
    for index in aborts:
        for _ in range(3):
            world.step()
        ids = sorted(world.requests)
        world.abort(ids[index % len(ids)])
    world.drain(6_000)


@pytest.mark.slow("serves many requests in scarce memory")
@examples(quick=60, full=2_500)
@given(
    named=st.sampled_from(BUILT_IN),
    shape=tight(),
    seed=st.integers(0, 2**32),
    aborts=st.lists(st.integers(0, 30), max_size=3),
)
def test_every_request_ends_in_a_pool_that_barely_holds_one(
    named: Named, shape: Shape, seed: int, aborts: list[int]
) -> None:
    """And by the policy's own plans: a strict engine would raise where it makes none."""
    play(World(named.policy, shape, named.make_options()), crowd(shape, seed), aborts)


def losing_interest(policy: type[Scheduler], seed: int) -> type[Scheduler]:
    """A policy that plans nothing at all every now and then, and doesn't ask to be called again."""
    chance = random.Random(seed)

    def schedule(self: Scheduler, step: Step) -> None:
        if chance.random() < 0.5:
            policy.schedule(self, step)

    return type(
        f"Bored{policy.__name__}",
        (policy,),
        {
            "schedule": schedule,
            "capabilities": SchedulerCapabilities(
                idles=True, starves=True, rejects=True, stalls_decodes=True
            ),
        },
    )


@examples(quick=30, full=1_000)
@given(
    named=st.sampled_from(BUILT_IN),
    shape=tight(),
    seed=st.integers(0, 2**32),
    aborts=st.lists(st.integers(0, 30), max_size=3),
)
def test_every_request_ends_though_its_policy_loses_interest(
    named: Named, shape: Shape, seed: int, aborts: list[int]
) -> None:
    """Policies bear that steps are planned without them."""
    world = World(
        losing_interest(named.policy, seed), replace(shape, strict=False), named.make_options()
    )
    play(world, crowd(shape, seed), aborts)


def test_an_older_prefill_takes_the_memory_of_a_younger_decode() -> None:
    """The older request is admitted later, when its adapter gets the only slot. When both need
    pages, the decode can evict nobody."""
    shape = Shape(
        num_pages=6,
        token_budget=8,
        max_model_len=24,
        reuse=False,
        adapters=1,
        overlap=False,
        strict=True,
    )
    world = World(FCFS, shape)
    world.add(Spec("holds the slot", (1, 2, 3), max_tokens=2, adapter="x"))
    world.step()
    world.add(Spec("older", (4,) * 22, max_tokens=2, adapter="y"))
    world.add(Spec("younger", (5,) * 6, max_tokens=14))
    world.drain(check=True)
    assert world.requests["younger"].preemptions
    assert world.finished["older"].reason == world.finished["younger"].reason == "length"
