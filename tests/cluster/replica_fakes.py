"""Fakes of the controller's clock and interfaces: a launcher, its replicas, a router and a
prober."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dovetail.errors import DovetailError
from dovetail_cluster.controller import Controller, Member, State
from dovetail_cluster.interfaces import Listed, ReplicaStatus, Vitals
from dovetail_cluster.settings import ClusterSettings


class FakeReplica:
    """A server that starts serving when told to, and drains until told that all requests are
    answered."""

    def __init__(self, url: str) -> None:
        self.url, self.status = url, ReplicaStatus()
        self.drains = self.killed = False

    def poll(self) -> ReplicaStatus:
        return self.status

    def drain(self) -> None:
        self.drains = True

    def kill(self) -> None:
        self.killed = True
        self.die("was killed")

    def serve(self) -> None:
        self.status = ReplicaStatus(self.url)

    def die(self, how: str = "was killed by SIGKILL") -> None:
        self.status = replace(self.status, ended=how)


class FakeLauncher:
    """A launcher with room for this many replicas."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.replicas: list[FakeReplica] = []
        self.refuses = False

    @property
    def alive(self) -> list[FakeReplica]:
        return [replica for replica in self.replicas if replica.status.ended is None]

    def start(self, name: str) -> FakeReplica:
        if self.refuses:
            raise DovetailError("no room")
        self.replicas.append(FakeReplica(f"http://{name}"))
        return self.replicas[-1]

    def has_room(self) -> bool:
        return len(self.alive) < self.room

    def close(self) -> None:
        pass


class FakeRouter:
    """A router that adds a replica one poll after it was told to, and removes one once it has no
    requests."""

    def __init__(self) -> None:
        self.listed: dict[str, Listed] | None = {}
        self.busy: set[str] = set()  # URLs with requests under way

    def poll(self) -> Mapping[str, Listed] | None:
        if self.listed is None:
            return None
        told = dict(self.listed)
        self.listed = {
            url: Listed.READY if how is Listed.JOINING else how
            for url, how in told.items()
            if how is not Listed.LEAVING or url in self.busy
        }
        return told

    def add(self, url: str) -> None:
        assert self.listed is not None
        self.listed[url] = Listed.JOINING

    def remove(self, url: str) -> None:
        assert self.listed is not None
        self.listed[url] = Listed.LEAVING

    def die(self) -> None:
        self.listed = None

    @property
    def ready(self) -> set[str]:
        return {url for url, how in (self.listed or {}).items() if how is Listed.READY}


@dataclass
class FakeProber:
    """All replicas are ready and healthy, unless set otherwise."""

    cluster: FakeCluster
    ill: set[str] = field(default_factory=set)
    unready: set[str] = field(default_factory=set)
    waiting: int = 0  # requests at each

    def vitals(self, url: str) -> Vitals | None:
        healthy_at = 0.0 if url in self.ill else self.cluster.now
        return Vitals(url not in self.unready and url not in self.ill, healthy_at, self.waiting, 0)

    def forget(self, url: str) -> None:
        self.ill.discard(url)


class FakeCluster:
    """A controller among fakes. A tick takes a second."""

    def __init__(self, room: int = 100, **keys: Any) -> None:
        self.now = 1000.0
        self.launcher, self.router, self.prober = FakeLauncher(room), FakeRouter(), FakeProber(self)
        self.said: list[str] = []
        self.fewest = 0  # replicas that got requests at any tick since it was last set
        settings = ClusterSettings.model_validate({"engine": "demo", **keys})
        self.controller = Controller(
            settings,
            self.launcher,
            self.router,
            self.prober,
            clock=lambda: self.now,
            say=self.said.append,
        )

    def tick(self, times: int = 1, serve: bool = True) -> None:
        """Advance time by this many seconds. `serve`: starting replicas serve at once, and draining
        ones finish at once."""
        for _ in range(times):
            self.now += 1
            self.controller.tick()
            self.fewest = min(
                self.fewest,
                len(
                    self.router.ready
                    & {replica.url for replica in self.launcher.alive if not replica.drains}
                ),
            )
            for replica in self.launcher.alive:
                if replica.drains and replica.url not in self.router.busy:
                    replica.die("ended")
                elif serve:
                    replica.serve()

    @property
    def members(self) -> tuple[Member, ...]:
        return self.controller.members

    def names(self, state: State = State.SERVING) -> list[str]:
        return [member.name for member in self.members if member.state is state]
