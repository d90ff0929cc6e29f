"""`ServerActor`: what runs in Ray's process beside each replica. It starts the server and says how it is. It knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail_cluster.here_places import ServerProcess
from dovetail_cluster.serve_command import keys_variable, serve_command
from dovetail_cluster.settings import ClusterSettings


class ServerActor:
    """A server that ends with this actor's process. Its methods are called in the process's main thread, which the server is bound to."""

    def __init__(self, name: str, settings: Mapping[str, Any], api_keys: tuple[str, ...]) -> None:
        read = ClusterSettings.model_validate(settings)
        host = "127.0.0.1" if read.ray.listen == "loopback" else _address_of_node()
        self._process = ServerProcess(name, serve_command(read, host), keys_variable(api_keys))

    def look(self) -> tuple[str | None, str | None]:
        """Return the fields of `Seen`."""
        seen = self._process.look()
        return seen.url, seen.ended

    def drain(self) -> None:
        self._process.drain()


def _address_of_node() -> str:
    """Return the address by which Ray's other machines reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())
