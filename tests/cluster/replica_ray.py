"""`FakeCalls`: what `RayCalls` does, in this process and without Ray. `test_replicas_ray` makes the
same statements about both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail_cluster.interfaces import ReplicaStatus
from dovetail_cluster.ray_launcher import RayCalls


class FakeActor:
    """A server that serves from the second time that it is asked."""

    def __init__(self, name: str) -> None:
        self.name, self.asked = name, 0
        self.group: FakeGroup | None = None
        self.ended: str | None = None


class FakeGroup:
    def __init__(self, needs: Mapping[str, float]) -> None:
        self.needs, self.has_room = needs, False


class FakeCalls(RayCalls):
    """A cluster of one machine with this many CPUs and GPUs."""

    def __init__(self, cpus: int = 2, gpus: int = 0) -> None:
        self._free = {"CPU": float(cpus), "GPU": float(gpus)}
        self._groups: list[FakeGroup] = []
        self.connected = False

    def connect(self, address: str | None) -> None:
        self.connected = True

    def free(self) -> Mapping[str, float]:
        return {name: count for name, count in self._free.items() if count}

    def reserve(self, cpus: int, gpus: int) -> FakeGroup:
        self._groups.append(FakeGroup({"CPU": cpus, "GPU": gpus}))
        self._give()
        return self._groups[-1]

    def start(
        self,
        group: FakeGroup,
        cpus: int,
        gpus: int,
        name: str,
        settings: Mapping[str, Any],
        api_keys: tuple[str, ...],
    ) -> FakeActor:
        assert group.needs == {"CPU": cpus, "GPU": gpus}
        actor = FakeActor(name)
        actor.group = group
        return actor

    def ask(self, actor: FakeActor) -> FakeActor:
        return actor

    def answer(self, question: FakeActor) -> ReplicaStatus | None:
        actor = question
        if actor.ended is not None:
            return ReplicaStatus(f"http://{actor.name}", actor.ended)
        if actor.group is None or not actor.group.has_room:
            return None
        actor.asked += 1
        return ReplicaStatus(f"http://{actor.name}" if actor.asked > 1 else None)

    def drain(self, actor: FakeActor) -> None:
        actor.ended = "ended with exit code 0"

    def kill(self, actor: FakeActor) -> None:
        actor.ended = actor.ended or "its actor is gone: killed"

    def release(self, group: FakeGroup) -> None:
        self._groups.remove(group)
        if group.has_room:
            for name, count in group.needs.items():
                self._free[name] += count
        self._give()

    def close(self) -> None:
        self.connected = False

    def _give(self) -> None:
        for group in self._groups:
            if not group.has_room and all(
                self._free[name] >= count for name, count in group.needs.items()
            ):
                group.has_room = True
                for name, count in group.needs.items():
                    self._free[name] -= count
