"""`RayCalls`: the few calls of Ray that replicas need, and nothing else of it. Tests hold a fake of these to what the real ones do."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Protocol

from dovetail.errors import ConfigError, MissingExtraError
from dovetail_cluster.places import Seen

AUTH_MODE = "RAY_AUTH_MODE"
LOOPBACK = "127.0.0.1"


class Calls(Protocol):
    """The calls of Ray that a place makes. A `group` is a placement group, an `actor` a server with its process; both are Ray's own objects."""

    def connect(self, address: str | None) -> None:
        """Join a cluster, or start one of this machine. Raises `ConfigError`."""

    def free(self) -> Mapping[str, float]:
        """Return what nobody has taken in the whole cluster: the numbers of `CPU` and `GPU`, without those of which there are none."""

    def reserve(self, cpus: int, gpus: int) -> Any:
        """Take room for one replica, all on one machine, as soon as there is any, and return the group."""

    def start(self, group: Any, cpus: int, gpus: int, name: str, settings: Mapping[str, Any], api_keys: tuple[str, ...]) -> Any:
        """Start a server there and return the actor, at once: it waits until the group has its room."""

    def ask(self, actor: Any) -> Any:
        """Ask a server how it is, and return the question."""

    def answer(self, question: Any) -> Seen | None:
        """Return a question's answer, or None while there is none. A dead actor's answer says that it has ended. Never waits."""

    def drain(self, actor: Any) -> None:
        """Have a server drain. Never waits."""

    def kill(self, actor: Any) -> None:
        """End an actor and its server at once."""

    def release(self, group: Any) -> None:
        """Give a group's room back."""

    def close(self) -> None:
        """Leave the cluster, and end it if it was started here."""


class RayCalls:
    """The calls of the package `ray`, with its token authentication."""

    def __init__(self) -> None:
        """Raises `MissingExtraError` without the package, `ConfigError` if its authentication is switched off."""
        if find_spec("ray") is None:
            raise MissingExtraError.naming("ray", "place: ray needs Ray")
        if os.environ.setdefault(AUTH_MODE, "token") != "token":
            raise ConfigError(
                f"{AUTH_MODE} is {os.environ[AUTH_MODE]!r}: without tokens everybody who reaches Ray's ports runs what they like; unset it"
            )
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        self._ray: Any = ray

    def connect(self, address: str | None) -> None:
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        here = {} if address else {"_node_ip_address": LOOPBACK, "include_dashboard": False}
        try:
            self._ray.init(address=address or "local", log_to_driver=True, logging_level="ERROR", namespace="dovetail", **here)
        except Exception as error:  # Ray has no family of its own for what goes wrong here
            raise ConfigError(f"ray: address: can't join Ray: {error}") from None
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)  # Ray's own would exit at once, and requests under way with it

    def free(self) -> Mapping[str, float]:
        return dict(self._ray.available_resources())

    def reserve(self, cpus: int, gpus: int) -> Any:
        from ray.util import placement_group

        return placement_group([{"CPU": cpus, **({"GPU": gpus} if gpus else {})}], strategy="STRICT_PACK")

    def start(self, group: Any, cpus: int, gpus: int, name: str, settings: Mapping[str, Any], api_keys: tuple[str, ...]) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from dovetail_cluster.ray_actor import ServerActor

        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        actor = self._ray.remote(ServerActor).options(num_cpus=cpus, num_gpus=gpus, max_restarts=0, scheduling_strategy=where)
        return actor.remote(name, dict(settings), api_keys)

    def ask(self, actor: Any) -> Any:
        return actor.look.remote()

    def answer(self, question: Any) -> Seen | None:
        ready, _ = self._ray.wait([question], timeout=0)
        if not ready:
            return None
        try:
            return Seen(*self._ray.get(question))
        except self._ray.exceptions.RayError as error:
            return Seen(ended=f"its actor is gone: {str(error).strip().splitlines()[0]}")

    def drain(self, actor: Any) -> None:
        actor.drain.remote()

    def kill(self, actor: Any) -> None:
        self._ray.kill(actor)

    def release(self, group: Any) -> None:
        from ray.util import remove_placement_group

        remove_placement_group(group)

    def close(self) -> None:
        self._ray.shutdown()
