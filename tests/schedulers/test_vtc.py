"""Fairness among clients by virtual token counters."""

from __future__ import annotations

from collections import Counter

import pytest

from dovetail.testing import make_request, plan
from dovetail_schedulers.vtc import VTC, VTCOptions
from tests.engine.world import Shape, Spec, World

PROMPT, ANSWER = 6, 8


def backlogged(weights: dict[str, float] | None = None) -> World:
    """A client that floods the engine at once, and one whose requests come behind all of them."""
    world = World(VTC, Shape(max_num_seqs=2, token_budget=32), VTCOptions(weights=weights or {}))
    for client in ("flood", "other"):
        for i in range(20):
            world.add(Spec(f"{client}{i}", tuple(range(PROMPT)), max_tokens=ANSWER, client=client))
    return world


def served(world: World) -> Counter[str]:
    """Return the clients' service at the default prices: prompt tokens count once, on admission,
    and generated tokens twice."""
    total: Counter[str] = Counter()
    for request in world.requests.values():
        assert request.client is not None
        total[request.client] += (
            PROMPT * (request.first_scheduled_time is not None) + 2 * request.generated
        )
    return total


def test_clients_that_wait_get_service_within_the_bound_of_the_paper() -> None:
    world = backlogged()
    # 2 max(w_p L_input, w_q M), theorem 4.4; M: tokens in the running batch
    bound = 2 * max(PROMPT, 2 * 2 * (PROMPT + ANSWER))
    while (
        all(
            any(r.client == client for r in world.core.books.waiting)
            for client in ("flood", "other")
        )
        or not world.core.stats.steps
    ):
        world.step()
        total = served(world)
        assert abs(total["flood"] - total["other"]) <= bound
    assert world.core.stats.finished > 20


def test_twice_the_weight_is_twice_the_service() -> None:
    world = backlogged({"other": 2.0})
    while world.core.stats.finished < 18:
        world.step()
    total = served(world)
    assert total["other"] / total["flood"] == pytest.approx(2.0, rel=0.35)


def test_one_of_each_client_is_admitted_in_turn_and_no_client_is_a_client_too() -> None:
    waiting = [
        make_request(id, 8, client=client)
        for id, client in [("a1", "a"), ("a2", "a"), ("b1", "b"), ("n1", None), ("n2", None)]
    ]
    done = plan(VTC, options=VTCOptions(), waiting=waiting, token_budget=28)
    assert list(done.granted) == ["a1", "b1", "n1", "a2"]


def test_samples_of_one_prompt_are_charged_for_it_once() -> None:
    """A client that requests four answers to one prompt pays for one prompt and four answers."""
    world = World(VTC, Shape(max_num_seqs=8, token_budget=64), VTCOptions())
    world.add(Spec("four", tuple(range(PROMPT)), n=4, max_tokens=ANSWER, client="four"))
    world.drain()
    forks = 3  # of one token each
    assert world.policy.counters.served["four"] == PROMPT + forks + 4 * 2 * ANSWER  # type: ignore[attr-defined]


def test_a_client_whose_samples_are_held_back_counts_as_waiting() -> None:
    """Otherwise its next request would be lifted to the counters of others, as if it had been
    away."""
    world = World(VTC, Shape(max_num_seqs=2, token_budget=4), VTCOptions())
    world.add(Spec("samples", tuple(range(40, 80)), n=3, max_tokens=2, client="held back"))
    world.add(Spec("waits", tuple(range(8)), max_tokens=2, client="served more"))
    world.step()
    world.step()
    served = world.policy.counters.served  # type: ignore[attr-defined]
    served["served more"] = 1_000.0
    world.add(Spec("next", (1, 2), max_tokens=2, client="held back"))
    world.step()
    assert served["held back"] < 100
    world.drain()


def test_a_client_that_was_away_gets_no_credit_for_it() -> None:
    policy = plan(
        VTC,
        options=VTCOptions(),
        waiting=[make_request(f"a{i}", 8, client="a") for i in range(4)],
        token_budget=24,
    ).policy
    # b comes when a has had three prompts
    waiting = [make_request(id, 8, client=id[0]) for id in ("a4", "b1", "b2", "b3")]
    assert list(plan(policy, waiting=waiting, token_budget=16).granted) == ["a4", "b1"]


def test_computing_a_prompt_again_is_free() -> None:
    world = World(
        VTC, Shape(num_pages=8, block_size=2, max_num_seqs=4, max_model_len=16), VTCOptions()
    )
    for i in range(4):
        world.add(Spec(f"r{i}", (i,) * 4, max_tokens=8, client="a"))
    world.drain()
    assert world.core.stats.preemptions > 0
    assert world.policy.counters.served["a"] == 4 * (4 + 2 * 8)  # type: ignore[attr-defined]
