"""`ServerActor`: the actor of a replica on Ray. It starts the server and reports its status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail_cluster.interfaces import ReplicaStatus
from dovetail_cluster.local_launcher import ServerProcess
from dovetail_cluster.serve_command import keys_variable, serve_command
from dovetail_cluster.settings import ClusterSettings


class ServerActor:
    """A server that ends with the actor's process. Methods are called in the main thread, to which the server is bound."""

    def __init__(self, name: str, settings: Mapping[str, Any], api_keys: tuple[str, ...]) -> None:
        read = ClusterSettings.model_validate(settings)
        host = "127.0.0.1" if read.ray.listen == "loopback" else _address_of_node()
        self._process = ServerProcess(name, serve_command(read, host), keys_variable(api_keys))

    def look(self) -> ReplicaStatus:
        return self._process.look()

    def drain(self) -> None:
        self._process.drain()


def _address_of_node() -> str:
    """Return this machine's address in the Ray cluster."""
    import ray

    return str(ray.util.get_node_ip_address())
