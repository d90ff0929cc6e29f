"""A limit of requests for each client."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from dovetail.request import Request
from dovetail.testing import make_request, plan
from dovetail_schedulers.rpm import RPM, RPMOptions
from tests.engine.world import Shape, Spec, World

TWO = RPMOptions(limit=2, window_s=10.0)
TWO_DEFERRED = RPMOptions(limit=2, window_s=10.0, over="defer")


def from_a(times: Sequence[float]) -> list[Request]:
    return [make_request(f"a{time:g}", 4, client="a", arrival_time=time) for time in times]


def test_those_above_the_limit_are_rejected_with_the_reason() -> None:
    done = plan(
        RPM,
        options=TWO,
        waiting=[*from_a([0.0, 0.1, 0.2]), make_request("b", 4, client="b", arrival_time=0.3)],
    )
    assert list(done.granted) == ["a0", "a0.1", "b"]
    assert done.rejected == {"a0.2": "its client 'a' sent more than 2 requests in 10 s"}


def test_the_limit_holds_in_any_window_and_those_rejected_do_not_count() -> None:
    done = plan(RPM, options=TWO, waiting=from_a([0.0, 5.0, 9.9, 10.0, 14.9, 15.0]), now=20.0)
    assert list(done.rejected) == ["a9.9", "a14.9"]


def test_a_client_is_let_in_again_after_a_window() -> None:
    policy = plan(RPM, options=TWO, waiting=from_a([0.0, 0.1])).policy
    assert plan(policy, waiting=from_a([9.0]), now=9.0).rejected
    assert list(plan(policy, waiting=from_a([10.5]), now=10.5).granted) == ["a10.5"]


def test_the_deferred_wait_and_the_engine_is_woken_for_them() -> None:
    done = plan(RPM, options=TWO_DEFERRED, waiting=from_a([0.0, 0.1, 0.2]), now=1.0)
    assert list(done.granted) == ["a0", "a0.1"]
    assert not done.rejected
    assert done.wake_at == 11.0
    assert done.notes == (("a0.2", "its client 'a' is over its limit until 11.000 s"),)


@pytest.mark.parametrize("window_s", [0.1, 0.3, 1 / 3])
def test_all_deferred_are_answered_no_faster_than_the_limit(window_s: float) -> None:
    world = World(RPM, Shape(), RPMOptions(limit=1, window_s=window_s, over="defer"))
    for i in range(8):
        world.add(Spec(f"r{i}", (i,) * 4, max_tokens=2, client="a"))
    world.drain()
    begun = sorted(request.first_scheduled_time or 0.0 for request in world.requests.values())
    assert all(later - earlier >= window_s - 1e-9 for earlier, later in pairwise(begun))
