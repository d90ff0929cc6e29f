"""`place: ray`: each replica is an actor of Ray in a placement group of its own, which has the replica's GPUs."""

from __future__ import annotations

from typing import Any

from dovetail_cluster.places import Replica, Seen
from dovetail_cluster.ray_calls import Calls, RayCalls
from dovetail_cluster.settings import ClusterSettings


class RayReplica:
    """A replica of Ray's. What is told of it is the last answer of its actor, so that nobody waits for one."""

    def __init__(self, calls: Calls, group: Any, actor: Any) -> None:
        self._calls, self._group, self._actor = calls, group, actor
        self._seen = Seen()
        self._question = calls.ask(actor)

    def look(self) -> Seen:
        if self._seen.ended is not None:
            return self._seen
        answer = self._calls.answer(self._question)
        if answer is not None:
            self._seen = answer if answer.ended is None else Seen(answer.url or self._seen.url, answer.ended)
            if answer.ended is None:
                self._question = self._calls.ask(self._actor)
            else:
                self._give_back()
        return self._seen

    def drain(self) -> None:
        self._calls.drain(self._actor)

    def kill(self) -> None:
        if self._seen.ended is None:
            self._seen = Seen(self._seen.url, "was killed")
            self._give_back()

    def _give_back(self) -> None:
        self._calls.kill(self._actor)
        self._calls.release(self._group)


class RayPlace:
    """The machines of a cluster of Ray."""

    def __init__(self, settings: ClusterSettings, api_keys: tuple[str, ...] = (), calls: Calls | None = None) -> None:
        """Raises `MissingExtraError` and `ConfigError`."""
        self._settings, self._keys = settings, api_keys
        self._calls = RayCalls() if calls is None else calls
        self._calls.connect(settings.ray.address)
        self._replicas: list[RayReplica] = []

    def start(self, name: str) -> Replica:
        cpus, gpus = self._settings.ray.cpus, self._settings.gpus
        group = self._calls.reserve(cpus, gpus)
        actor = self._calls.start(group, cpus, gpus, name, self._settings.model_dump(mode="json", exclude_unset=True), self._keys)
        replica = RayReplica(self._calls, group, actor)
        self._replicas = [*(one for one in self._replicas if one.look().ended is None), replica]
        return replica

    def has_room(self) -> bool:
        free = self._calls.free()
        return free.get("CPU", 0) >= self._settings.ray.cpus and free.get("GPU", 0) >= self._settings.gpus

    def close(self) -> None:
        for replica in self._replicas:
            replica.kill()
        self._calls.close()
