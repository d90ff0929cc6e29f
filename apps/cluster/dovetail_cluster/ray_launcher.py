"""`RayLauncher`: replicas as Ray actors, each in a placement group of its own (`place: ray`). Tests
have a fake of `RayCalls`, and hold both to the same statements."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from dovetail.errors import ConfigError, MissingExtraError
from dovetail_cluster.interfaces import Replica, ReplicaStatus
from dovetail_cluster.local_launcher import LOOPBACK, ServerProcess, keys_variable, serve_command
from dovetail_cluster.settings import ClusterSettings

AUTH_MODE = "RAY_AUTH_MODE"


class ServerActor:
    """A server that ends with the actor's process. Methods are called in the main thread, to which
    the server is bound."""

    def __init__(self, name: str, settings: Mapping[str, Any], api_keys: tuple[str, ...]) -> None:
        read = ClusterSettings.model_validate(settings)
        host = LOOPBACK if read.ray.listen == "loopback" else _address_of_node()
        self._process = ServerProcess(name, serve_command(read, host), keys_variable(api_keys))

    def poll(self) -> ReplicaStatus:
        return self._process.poll()

    def drain(self) -> None:
        self._process.drain()


def _address_of_node() -> str:
    """Return this machine's address in the Ray cluster."""
    import ray

    return str(ray.util.get_node_ip_address())


class RayCalls:
    """Calls of the package `ray`, with token authentication. Groups and actors are Ray's own
    objects."""

    def __init__(self) -> None:
        """Raises `MissingExtraError` without the package, `ConfigError` if authentication is
        disabled."""
        if find_spec("ray") is None:
            raise MissingExtraError.naming("ray", "place: ray needs Ray")
        if os.environ.setdefault(AUTH_MODE, "token") != "token":
            raise ConfigError(
                f"{AUTH_MODE} is {os.environ[AUTH_MODE]!r}: without tokens, anybody who reaches "
                f"Ray's ports can run code; unset it"
            )
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        self._ray: Any = ray

    def connect(self, address: str | None) -> None:
        """Join a cluster, or start one on this machine. Raises `ConfigError`."""
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        here = {} if address else {"_node_ip_address": LOOPBACK, "include_dashboard": False}
        try:
            self._ray.init(
                address=address or "local",
                log_to_driver=True,
                logging_level="ERROR",
                namespace="dovetail",
                **here,
            )
        except Exception as error:  # Ray has no base class for these errors
            raise ConfigError(f"ray: address: can't join Ray: {error}") from None
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)  # Ray's exit at once, without draining

    def free(self) -> Mapping[str, float]:
        """Return the cluster's free `CPU` and `GPU` counts, without those that are 0."""
        return dict(self._ray.available_resources())

    def reserve(self, cpus: int, gpus: int) -> Any:
        """Reserve one machine's resources for a replica as soon as they are free, and return the
        placement group."""
        from ray.util import placement_group

        return placement_group(
            [{"CPU": cpus, **({"GPU": gpus} if gpus else {})}], strategy="STRICT_PACK"
        )

    def start(
        self,
        group: Any,
        cpus: int,
        gpus: int,
        name: str,
        settings: Mapping[str, Any],
        api_keys: tuple[str, ...],
    ) -> Any:
        """Start a server in a placement group, once that has its resources, and return the actor.
        Never blocks."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        actor = self._ray.remote(ServerActor).options(
            num_cpus=cpus, num_gpus=gpus, max_restarts=0, scheduling_strategy=where
        )
        return actor.remote(name, dict(settings), api_keys)

    def ask(self, actor: Any) -> Any:
        """Request a server's status, for `answer`."""
        return actor.poll.remote()

    def answer(self, question: Any) -> ReplicaStatus | None:
        """Return a requested status; None: no answer yet. A dead actor has ended. Never blocks."""
        ready, _ = self._ray.wait([question], timeout=0)
        if not ready:
            return None
        try:
            status: ReplicaStatus = self._ray.get(question)
            return status
        except self._ray.exceptions.RayError as error:
            return ReplicaStatus(ended=f"its actor is gone: {str(error).strip().splitlines()[0]}")

    def drain(self, actor: Any) -> None:
        """Drain a server. Never blocks."""
        actor.drain.remote()

    def kill(self, actor: Any) -> None:
        """Kill an actor and its server."""
        self._ray.kill(actor)

    def release(self, group: Any) -> None:
        """Release a placement group."""
        from ray.util import remove_placement_group

        remove_placement_group(group)

    def close(self) -> None:
        """Leave the cluster, and end it if it was started here."""
        self._ray.shutdown()


class RayReplica:
    """A replica in an actor. Its status is the actor's last answer, so that nothing blocks."""

    def __init__(self, calls: RayCalls, group: Any, actor: Any) -> None:
        self.actor = actor
        self._calls = calls
        self._group = group
        self._status = ReplicaStatus()
        self._question = calls.ask(actor)

    def poll(self) -> ReplicaStatus:
        if self._status.ended is not None:
            return self._status
        answer = self._calls.answer(self._question)
        if answer is not None:
            self._status = (
                answer
                if answer.ended is None
                else ReplicaStatus(answer.url or self._status.url, answer.ended)
            )
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

    def __init__(
        self,
        settings: ClusterSettings,
        api_keys: tuple[str, ...] = (),
        calls: RayCalls | None = None,
    ) -> None:
        """Raises `MissingExtraError` and `ConfigError`."""
        self._settings = settings
        self._keys = api_keys
        self.calls = RayCalls() if calls is None else calls
        self.calls.connect(settings.ray.address)
        self._replicas: list[RayReplica] = []

    def start(self, name: str) -> Replica:
        cpus = self._settings.ray.cpus
        gpus = self._settings.gpus
        group = self.calls.reserve(cpus, gpus)
        actor = self.calls.start(
            group,
            cpus,
            gpus,
            name,
            self._settings.model_dump(mode="json", exclude_unset=True),
            self._keys,
        )
        replica = RayReplica(self.calls, group, actor)
        self._replicas = [*(one for one in self._replicas if one.poll().ended is None), replica]
        return replica

    def has_room(self) -> bool:
        free = self.calls.free()
        return (
            free.get("CPU", 0) >= self._settings.ray.cpus
            and free.get("GPU", 0) >= self._settings.gpus
        )

    def close(self) -> None:
        for replica in self._replicas:
            replica.kill()
        self.calls.close()
