"""Longest cached prefix first."""

from __future__ import annotations

from dovetail.api.scheduler import Refusal
from dovetail.testing import make_request, plan
from dovetail_schedulers.lpm import LPM, LPMOptions
from tests.engine.world import Shape, Spec, World


def test_the_longest_cached_prefix_goes_first_and_equals_by_arrival() -> None:
    waiting = [
        make_request(id, 20, arrival_time=at)
        for id, at in [("none", 0.0), ("some", 0.1), ("most", 0.2), ("same", 0.3)]
    ]
    done = plan(
        LPM, options=LPMOptions(), waiting=waiting, cached={"some": 8, "most": 16, "same": 8}
    )
    assert done.granted == {"most": 4, "some": 12, "same": 12, "none": 20}
    assert list(done.granted) == ["most", "some", "same", "none"]


def test_who_has_waited_long_enough_goes_first_in_order_of_arrival() -> None:
    waiting = [
        make_request(id, 8, arrival_time=at)
        for id, at in [("old", 0.0), ("older", -1.0), ("new", 9.5)]
    ]
    done = plan(
        LPM,
        options=LPMOptions(patience_s=5.0),
        waiting=waiting,
        now=10.0,
        cached={"new": 4, "old": 4},
    )
    assert list(done.granted) == ["older", "old", "new"]


def test_only_the_window_is_looked_at() -> None:
    waiting = [make_request(f"w{i}", 8, arrival_time=i / 10) for i in range(4)]
    done = plan(LPM, options=LPMOptions(window=2), waiting=waiting, cached={"w1": 4, "w3": 4})
    assert list(done.granted) == ["w1", "w0"]


def test_no_request_passes_one_that_lacks_memory() -> None:
    waiting = [make_request("large", 40), make_request("small", 4, arrival_time=0.1)]
    done = plan(LPM, options=LPMOptions(), waiting=waiting, cached={"large": 8}, free_pages=4)
    assert done.granted == {}
    assert done.refused == {"large": Refusal.MEMORY}


def test_more_tokens_are_found_in_the_cache_than_first_come_first_served_finds() -> None:
    def found(patience_s: float) -> int:
        world = World(
            LPM,
            Shape(num_pages=20, max_num_seqs=2, max_model_len=48),
            LPMOptions(patience_s=patience_s),
        )
        for i in range(24):  # three conversations in turns, in a pool that holds one and a half
            world.add(Spec(f"r{i}", (*[i % 3] * 30, i), max_tokens=4))
        world.drain()
        return world.core.stats.cached_tokens

    assert found(patience_s=1e9) > 2 * found(patience_s=0.0)
