"""The controller's handling of replicas, with fakes, tick by tick."""

from __future__ import annotations

import random

import pytest

from dovetail.errors import DovetailError
from dovetail_cluster.controller import FUTILE_STARTS, ClusterFailed, State
from tests.cluster.replica_fakes import FakeCluster


def up(replicas: object = 3, **keys: object) -> FakeCluster:
    cluster = FakeCluster(replicas=replicas, **keys)
    cluster.tick(5)
    cluster.fewest = len(cluster.router.ready)
    return cluster


def test_as_many_replicas_as_asked_for_get_requests() -> None:
    cluster = up(3)
    assert cluster.names() == ["replica-0", "replica-1", "replica-2"]
    assert cluster.router.ready == {"http://replica-0", "http://replica-1", "http://replica-2"}
    assert cluster.controller.serves


def test_a_replica_gets_no_request_before_it_is_ready() -> None:
    cluster = FakeCluster(replicas=1)
    cluster.prober.unready.add("http://replica-0")
    cluster.tick(10)
    assert cluster.router.listed == {}
    cluster.prober.unready.clear()
    cluster.tick(3)
    assert cluster.router.ready == {"http://replica-0"}


def test_a_dead_replica_is_taken_from_the_router_at_once_and_replaced() -> None:
    cluster = up(3)
    cluster.launcher.replicas[1].die()
    cluster.tick(serve=False)
    assert "http://replica-1" not in cluster.router.ready
    assert cluster.names(State.STARTING) == ["replica-3"]
    cluster.tick(5)
    assert cluster.names() == ["replica-0", "replica-2", "replica-3"]
    assert cluster.controller.deaths == 1
    assert "replica-1 was killed by SIGKILL" in cluster.said


def test_a_replica_that_doesnt_become_ready_in_time_is_killed_and_replaced() -> None:
    cluster = FakeCluster(replicas=1, start_timeout_s=10)
    cluster.tick(12, serve=False)
    assert cluster.launcher.replicas[0].killed
    cluster.tick(5)
    assert cluster.names() == ["replica-1"]


def test_a_replica_that_is_ill_for_too_long_is_killed_and_replaced() -> None:
    cluster = up(2, unhealthy_after_s=5)
    cluster.prober.ill.add("http://replica-0")
    cluster.tick(3)
    assert cluster.names() == ["replica-0", "replica-1"]
    cluster.tick(8)
    assert cluster.launcher.replicas[0].killed
    assert cluster.names() == ["replica-1", "replica-2"]


def test_replicas_that_die_before_any_has_served_end_the_cluster_with_the_reason() -> None:
    cluster = FakeCluster(replicas=1)

    def starts_that_fail() -> None:
        for _ in range(60):
            cluster.tick(serve=False)
            for replica in cluster.launcher.alive:
                replica.die("ended with exit code 1: no such model")

    with pytest.raises(ClusterFailed, match="no such model"):
        starts_that_fail()
    assert len(cluster.launcher.replicas) == FUTILE_STARTS


def test_once_one_has_served_futile_starts_go_on_with_longer_and_longer_pauses() -> None:
    cluster = up(2)
    cluster.launcher.replicas[0].die()
    for _ in range(300):
        cluster.tick(serve=False)
        for replica in cluster.launcher.alive[1:]:
            replica.die("ended with exit code 1")
    assert cluster.names() == ["replica-1"]
    assert 8 <= len(cluster.launcher.replicas) < 25
    cluster.tick(60)
    assert len(cluster.names()) == 2


def test_a_place_that_refuses_is_asked_again() -> None:
    cluster = FakeCluster(replicas=1)
    cluster.launcher.refuses = True
    cluster.tick(5)
    assert not cluster.members
    cluster.launcher.refuses = False
    cluster.tick(60)
    assert cluster.names() == ["replica-0"]


def test_a_router_that_was_started_again_gets_all_replicas_again() -> None:
    cluster = up(3)
    cluster.router.die()
    cluster.tick(3)
    assert not cluster.controller.router_answers
    cluster.router.listed = {}
    cluster.tick(3)
    assert len(cluster.router.ready) == 3


def test_the_router_is_rid_of_what_it_knows_and_shouldnt() -> None:
    cluster = up(1)
    cluster.router.add("http://stranger")
    cluster.tick(3)
    assert cluster.router.ready == {"http://replica-0"}


def test_a_rolling_restart_replaces_all_and_never_has_fewer_than_before() -> None:
    cluster = up(3)
    cluster.controller.roll()
    cluster.tick(60)
    assert cluster.names() == ["replica-3", "replica-4", "replica-5"]
    assert cluster.fewest == 3
    assert not cluster.controller.is_rolling
    assert not any(replica.killed for replica in cluster.launcher.replicas)
    assert cluster.controller.deaths == 0


def test_a_rolling_restart_of_one_replica_has_always_one() -> None:
    cluster = up(1)
    cluster.controller.roll()
    cluster.tick(30)
    assert cluster.names() == ["replica-1"]
    assert cluster.fewest == 1


def test_without_room_for_one_more_a_rolling_restart_lets_the_old_one_go_first() -> None:
    cluster = FakeCluster(room=3, replicas=3)
    cluster.tick(5)
    cluster.fewest = 3
    cluster.controller.roll()
    cluster.tick(60)
    assert cluster.names() == ["replica-3", "replica-4", "replica-5"]
    assert cluster.fewest == 2


def test_a_replica_is_drained_only_when_the_router_has_let_go_of_it() -> None:
    cluster = up(1)
    cluster.router.busy.add("http://replica-0")
    cluster.controller.roll()
    cluster.tick(10)
    assert cluster.names(State.LEAVING) == ["replica-0"]
    assert not cluster.launcher.replicas[0].drains
    cluster.router.busy.clear()
    cluster.tick(3)
    assert cluster.names() == ["replica-1"]
    assert cluster.launcher.replicas[0].drains


def test_while_the_router_is_gone_a_rolling_restart_lets_go_of_nothing() -> None:
    cluster = up(2)
    cluster.router.die()
    cluster.controller.roll()
    cluster.tick(50)
    assert len(cluster.names()) == 2
    assert not any(replica.drains for replica in cluster.launcher.replicas)


def test_a_death_in_a_rolling_restart_is_made_up_for() -> None:
    cluster = up(3)
    cluster.controller.roll()
    cluster.tick(2)
    cluster.launcher.alive[0].die()
    cluster.tick(80)
    assert len(cluster.names()) == 3
    assert not cluster.controller.is_rolling


def test_a_long_queue_starts_replicas_up_to_the_most_and_an_empty_one_ends_them() -> None:
    cluster = up(
        {"min": 1, "max": 3}, scale={"queue_per_replica": 4, "up_after_s": 5, "down_after_s": 20}
    )
    cluster.prober.waiting = 5
    cluster.tick(60)
    assert len(cluster.names()) == 3
    cluster.prober.waiting = 0
    cluster.tick(15)
    assert len(cluster.names()) == 3
    cluster.tick(100)
    assert len(cluster.names()) == 1
    assert cluster.controller.deaths == 0


def test_the_end_drains_all_and_is_done_when_they_have_ended() -> None:
    cluster = up(3)
    cluster.controller.end()
    cluster.tick()
    assert all(replica.drains for replica in cluster.launcher.replicas)
    assert cluster.router.ready == set()
    cluster.tick(3)
    assert cluster.controller.is_done
    assert len(cluster.launcher.replicas) == 3


def test_a_replica_that_doesnt_end_when_told_to_is_killed() -> None:
    cluster = up(1, serve={"drain_timeout_s": 5})
    cluster.router.busy.add("http://replica-0")
    cluster.controller.end()
    cluster.tick(60)
    assert cluster.launcher.replicas[0].killed
    assert cluster.controller.is_done


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_cluster_is_whole_again_when_it_stops(seed: int) -> None:
    chance = random.Random(seed)
    cluster = up(3)
    for _ in range(200):
        match chance.randrange(12):
            case 0 if cluster.launcher.alive:
                chance.choice(cluster.launcher.alive).die()
            case 1:
                cluster.controller.roll()
            case 2:
                cluster.router.die()
            case 3:
                cluster.prober.ill = {chance.choice(cluster.launcher.replicas).url}
            case 4:
                cluster.launcher.refuses = not cluster.launcher.refuses
        if cluster.router.listed is None and chance.random() < 0.5:
            cluster.router.listed = {}
        cluster.tick(serve=chance.random() < 0.8)
        assert len(cluster.launcher.alive) <= 5
    cluster.launcher.refuses, cluster.prober.ill = False, set()
    cluster.router.listed = cluster.router.listed if cluster.router.listed is not None else {}
    cluster.tick(200)
    assert len(cluster.names()) == 3 == len(cluster.launcher.alive)
    assert cluster.router.ready == {replica.url for replica in cluster.launcher.alive}
    assert not cluster.controller.is_rolling


def test_a_restart_that_can_never_end_is_refused() -> None:
    cluster = FakeCluster(room=1, replicas=1)
    cluster.tick(5)
    with pytest.raises(DovetailError, match="a single replica isn't replaced"):
        cluster.controller.roll()
    assert not cluster.controller.is_rolling
