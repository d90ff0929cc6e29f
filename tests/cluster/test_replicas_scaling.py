"""When the number of replicas changes."""

from __future__ import annotations

from dovetail_cluster.controller import Scaler
from dovetail_cluster.settings import Replicas, Scale


def scaler(**scale: float) -> Scaler:
    return Scaler(
        Replicas(min=1, max=4),
        Scale(**{"queue_per_replica": 4.0, "up_after_s": 10.0, "down_after_s": 60.0, **scale}),
    )


def test_one_more_after_the_queue_was_too_long_for_long_enough() -> None:
    ours = scaler()
    assert [ours.note(now, 1, 5) for now in (0, 5, 9.9, 10)] == [1, 1, 1, 2]


def test_a_queue_of_just_the_bound_is_none_too_long() -> None:
    ours = scaler()
    assert [ours.note(now, 1, 4) for now in range(0, 100, 10)] == [1] * 10


def test_a_moment_without_a_long_queue_begins_the_time_anew() -> None:
    ours = scaler()
    assert [
        ours.note(now, 1, waiting) for now, waiting in ((0, 5), (8, 3), (9, 5), (18, 5), (19, 5))
    ] == [1, 1, 1, 1, 2]


def test_nothing_is_decided_until_what_was_started_serves() -> None:
    ours = scaler()
    ours.note(0, 1, 50)
    assert ours.note(10, 1, 50) == 2
    assert [ours.note(now, 1, 50) for now in (20, 40, 60)] == [2, 2, 2]
    assert [ours.note(now, 2, 50) for now in (61, 70, 71)] == [2, 2, 3]


def test_one_replica_less_after_idle_time_and_never_below_the_minimum() -> None:
    ours = scaler()
    ours.target = 3
    assert [ours.note(now, 3, 0) for now in (0, 59, 60)] == [3, 3, 2]
    assert [ours.note(now, 2, 0) for now in (119, 120)] == [2, 1]
    assert ours.note(1000, 1, 0) == 1


def test_never_above_the_most() -> None:
    ours = scaler()
    ours.target = 4
    assert {ours.note(now, 4, 1000) for now in range(0, 1000, 10)} == {4}
