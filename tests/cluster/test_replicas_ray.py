"""Replicas as actors of Ray: with a fake of the few calls, or, if DOVETAIL_TEST_RAY is 1
(`make test-cluster`), with Ray itself on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest

from dovetail.errors import ConfigError, MissingExtraError
from dovetail_cluster import ray_launcher
from dovetail_cluster.interfaces import Replica, ReplicaStatus
from dovetail_cluster.probes import ask
from dovetail_cluster.ray_launcher import AUTH_MODE, RayCalls, RayLauncher, RayReplica
from dovetail_cluster.settings import ClusterSettings
from tests.cluster.replica_ray import FakeCalls

REAL = os.environ.get("DOVETAIL_TEST_RAY") == "1"
PATIENCE_S = 120.0


def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so. Fails if it never is."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05 if REAL else 0)


def ended(replica: Replica) -> ReplicaStatus:
    until(lambda: replica.poll().ended is not None)
    return replica.poll()


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayLauncher]:
    """A launcher with room for two replicas of half of all CPUs each."""
    monkeypatch.delenv("DOVETAIL_API_KEYS", raising=False)
    cpus = (os.cpu_count() or 2) // 2 if REAL else 1
    settings = ClusterSettings.model_validate(
        {"engine": "demo", "place": "ray", "ray": {"cpus": cpus}, "serve": {"drain_timeout_s": 5}}
    )
    launcher = RayLauncher(settings, calls=RayCalls() if REAL else FakeCalls())
    yield launcher
    launcher.close()


def test_a_replica_starts_serves_drains_and_gives_its_room_back(launcher: RayLauncher) -> None:
    first, second = launcher.start("one"), launcher.start("two")
    until(lambda: first.poll().url is not None and second.poll().url is not None)
    assert first.poll().url != second.poll().url
    if REAL:
        assert ask(f"{first.poll().url}/ready", timeout_s=10)[0] == 200
    until(lambda: not launcher.has_room())
    first.drain()
    assert ended(first).ended == "ended with exit code 0"
    until(launcher.has_room)
    assert second.poll().ended is None


def test_a_replica_that_is_killed_has_ended_at_once_and_its_server_too(
    launcher: RayLauncher,
) -> None:
    replica = launcher.start("one")
    until(lambda: replica.poll().url is not None)
    url = replica.poll().url
    replica.kill()
    assert replica.poll() == ReplicaStatus(url, "was killed")
    replica.kill()
    if REAL:
        until(lambda: ask(f"{url}/health")[0] == 0)
    until(launcher.has_room)


def test_the_death_of_an_actor_is_reported(launcher: RayLauncher) -> None:
    replica = launcher.start("one")
    until(lambda: replica.poll().url is not None)
    assert isinstance(replica, RayReplica)
    launcher.calls.kill(replica.actor)
    assert "actor" in str(ended(replica).ended)
    replica.kill()  # what is gone can be killed


def test_a_replica_without_room_waits_without_delaying_others(launcher: RayLauncher) -> None:
    first, second, third = (launcher.start(name) for name in ("one", "two", "three"))
    until(lambda: first.poll().url is not None and second.poll().url is not None)
    begun = time.monotonic()
    assert third.poll() == ReplicaStatus()
    assert time.monotonic() - begun < PATIENCE_S / 4
    first.kill()
    until(lambda: third.poll().url is not None)


def test_a_replica_that_waits_for_room_can_be_killed(launcher: RayLauncher) -> None:
    replicas = [launcher.start(name) for name in ("one", "two", "three")]
    replicas[2].kill()
    assert replicas[2].poll().ended == "was killed"


def test_without_ray_the_error_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_launcher, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'pip install "dovetail-llm\[ray\]"'):
        RayCalls()


def test_without_rays_tokens_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_launcher, "find_spec", lambda name: name)
    monkeypatch.setenv(AUTH_MODE, "disabled")
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE is 'disabled'"):
        RayCalls()
