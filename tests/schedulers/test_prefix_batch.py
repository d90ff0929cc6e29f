"""Requests that begin alike, side by side."""

from __future__ import annotations

import random

from dovetail.request import Request
from dovetail.testing import make_request, plan
from dovetail_schedulers.lpm import LPM, LPMOptions
from dovetail_schedulers.prefix_batch import PrefixBatch, PrefixBatchOptions
from tests.engine.world import Shape, Spec, World


def about(document: int, question: int, arrival_time: float = 0.0) -> Request:
    """A question of 2 tokens about a document of 8, "d1q2"."""
    return make_request(
        f"d{document}q{question}",
        prompt=[document] * 8 + [50 + question] * 2,
        prompt_tokens=10,
        arrival_time=arrival_time,
    )


OPTIONS = PrefixBatchOptions(least_tokens=8)


def test_the_group_that_shares_most_goes_first_and_equals_by_arrival() -> None:
    waiting = [
        about(0, 0),
        about(1, 0, 0.1),
        about(2, 0, 0.2),
        about(3, 0, 0.3),
        about(2, 1, 0.4),
        about(1, 1, 0.5),
        about(2, 2, 0.6),
    ]
    done = plan(PrefixBatch, options=OPTIONS, waiting=waiting, cached={})
    assert list(done.granted) == ["d2q0", "d2q1", "d2q2", "d1q0", "d1q1", "d0q0", "d3q0"]


def test_a_group_whose_prefix_is_cached_goes_before_larger_ones() -> None:
    waiting = [about(1, 0), about(1, 1), about(1, 2), about(2, 0, 0.2)]
    done = plan(PrefixBatch, options=OPTIONS, waiting=waiting, cached={"d2q0": 8})
    assert list(done.granted) == ["d2q0", "d1q0", "d1q1", "d1q2"]


def test_who_has_waited_long_enough_goes_first_with_its_group() -> None:
    waiting = [
        about(3, 0, -1.0),
        about(1, 0, 0.0),
        about(2, 0, 9.0),
        about(2, 1, 9.1),
        about(2, 2, 9.2),
        about(1, 1, 9.3),
    ]
    done = plan(
        PrefixBatch,
        options=PrefixBatchOptions(least_tokens=8, patience_s=5.0),
        waiting=waiting,
        now=10.0,
        cached={},
    )
    assert list(done.granted) == ["d3q0", "d1q0", "d1q1", "d2q0", "d2q1", "d2q2"]


def test_without_a_prefix_cache_or_with_other_salts_there_are_no_groups() -> None:
    waiting = [about(1, 0), about(2, 0, 0.1), about(2, 1, 0.2)]
    assert list(plan(PrefixBatch, options=OPTIONS, waiting=waiting).granted) == [
        "d1q0",
        "d2q0",
        "d2q1",
    ]
    waiting = [about(1, 0), about(2, 0, 0.1), about(2, 1, 0.2)]
    for index, request in enumerate(waiting):
        request.cache_keys = (f"salt:{index}",)
    assert list(plan(PrefixBatch, options=OPTIONS, waiting=waiting, cached={}).granted) == [
        "d1q0",
        "d2q0",
        "d2q1",
    ]


def test_more_is_found_in_the_cache_than_with_the_longest_cached_prefix_first() -> None:
    def found(policy: type, options: object) -> int:
        world = World(
            policy, Shape(num_pages=26, token_budget=80, max_num_seqs=4, max_model_len=64), options
        )  # type: ignore[arg-type]
        chance = random.Random(0)
        for i in range(
            60
            # questions about twelve documents of 40 tokens; the pool holds two, and soon all have
            # waited long
        ):
            world.add(
                Spec(
                    f"r{i}",
                    (*([chance.randrange(12)] * 40), 60 + i % 20, 3),
                    max_tokens=4,
                    delay=i * 0.01,
                )
            )
        world.drain()
        return sum(request.cached_tokens for request in world.requests.values())

    assert found(PrefixBatch, PrefixBatchOptions(least_tokens=16, patience_s=0.2)) > 2 * found(
        LPM, LPMOptions(patience_s=0.2)
    )
