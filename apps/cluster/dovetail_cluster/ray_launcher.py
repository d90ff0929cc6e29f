"""`RayLauncher`: replicas as Ray actors, each in a placement group of its own (`place: ray`)."""

from __future__ import annotations

from typing import Any

from dovetail_cluster.interfaces import Replica, ReplicaStatus
from dovetail_cluster.ray_calls import RayCalls
from dovetail_cluster.settings import ClusterSettings


class RayReplica:
    """A replica in an actor. Its status is the actor's last answer, so that nothing blocks."""

    def __init__(self, calls: RayCalls, group: Any, actor: Any) -> None:
        self.actor = actor
        self._calls, self._group = calls, group
        self._status = ReplicaStatus()
        self._question = calls.ask(actor)

    def look(self) -> ReplicaStatus:
        if self._status.ended is not None:
            return self._status
        answer = self._calls.answer(self._question)
        if answer is not None:
            self._status = answer if answer.ended is None else ReplicaStatus(answer.url or self._status.url, answer.ended)
            if answer.ended is None:
                self._question = self._calls.ask(self.actor)
            else:
                self._release()
        return self._status

    def drain(self) -> None:
        self._calls.drain(self.actor)

    def kill(self) -> None:
        if self._status.ended is None:
            self._status = ReplicaStatus(self._status.url, "was killed")
            self._release()

    def _release(self) -> None:
        self._calls.kill(self.actor)
        self._calls.release(self._group)


class RayLauncher:
    """Starts replicas on the machines of a Ray cluster."""

    def __init__(self, settings: ClusterSettings, api_keys: tuple[str, ...] = (), calls: RayCalls | None = None) -> None:
        """Raises `MissingExtraError` and `ConfigError`."""
        self._settings, self._keys = settings, api_keys
        self.calls = RayCalls() if calls is None else calls
        self.calls.connect(settings.ray.address)
        self._replicas: list[RayReplica] = []

    def start(self, name: str) -> Replica:
        cpus, gpus = self._settings.ray.cpus, self._settings.gpus
        group = self.calls.reserve(cpus, gpus)
        actor = self.calls.start(group, cpus, gpus, name, self._settings.model_dump(mode="json", exclude_unset=True), self._keys)
        replica = RayReplica(self.calls, group, actor)
        self._replicas = [*(one for one in self._replicas if one.look().ended is None), replica]
        return replica

    def has_room(self) -> bool:
        free = self.calls.free()
        return free.get("CPU", 0) >= self._settings.ray.cpus and free.get("GPU", 0) >= self._settings.gpus

    def close(self) -> None:
        for replica in self._replicas:
            replica.kill()
        self.calls.close()
