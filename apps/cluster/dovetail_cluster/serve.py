"""`app`: Dovetail's HTTP server as an application of Ray Serve,
`serve run dovetail_cluster.serve:app engine=demo`.

Ray Serve listens, starts and monitors replicas on the cluster's machines, and distributes requests.
Each replica is an engine in a thread beside the routes of `dovetail serve`, which stream through
Ray's proxy.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any, get_origin

from pydantic import ValidationError

from dovetail import EngineConfig
from dovetail.errors import ConfigError, EngineDeadError, MissingExtraError, shown
from dovetail.serving import did_you_mean
from dovetail_cluster.settings import plain_config
from dovetail_server.settings import ServerSettings

OWN = ("engine", "replicas", "gpus")
ELSEWHERE = {  # options of `dovetail serve` that don't apply here, and why
    **dict.fromkeys(
        ("host", "port", "root_path"),
        "Ray Serve listens: set it in its http_options or as the application's route_prefix",
    ),
    **dict.fromkeys(
        ("uds", "tls_cert", "tls_key"), "Ray Serve listens: put a proxy in front of it"
    ),
    "front_ends": "Ray Serve has proxies of its own",
    "drain_timeout_s": "Ray Serve drains replicas: see its graceful_shutdown_timeout_s",
    "batch_directory": "replicas can't share the folder of batches: see `dovetail serve`, or "
    "`dovetail batch run --on ray`",
    "page": "a page would show one replica of several",
}
# requests in a replica: the server itself answers 429 beyond `max_queued_requests`
MOST_ONGOING = 100_000
HEALTH_S = 5.0  # between Ray's health checks


def app(arguments: Mapping[str, Any]) -> Any:
    """Return the application. Ray Serve passes the arguments after the application's name on its
    command line, or `args` of its config.

    `engine`: a model, the path of an `engine.yaml`, or its keys; default "demo". `replicas`: number
    of engines; default 1. `gpus`: number of GPUs of each; default 0. All others are options of
    `dovetail serve`, named as in `ServerSettings`; lists may be comma-separated.

    Raises `ConfigError` naming an invalid argument, and `MissingExtraError` without Ray.
    """
    try:
        from ray import serve
    except ImportError as error:
        raise MissingExtraError.naming(
            "ray", f"dovetail_cluster.serve needs Ray Serve: {error}"
        ) from None
    config = plain_config(EngineConfig.load(arguments.get("engine", "demo")))
    settings = server_settings(arguments)
    replicas = _count(arguments, "replicas", 1, least=1)
    gpus = _count(arguments, "gpus", 0, least=0)
    deployment = serve.deployment(
        name="dovetail",
        num_replicas=replicas,
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus},
        max_ongoing_requests=MOST_ONGOING,
        health_check_period_s=HEALTH_S,
    )
    return deployment(serve.ingress()(ServeReplica)).bind(config, settings.model_dump(mode="json"))


def server_settings(arguments: Mapping[str, Any]) -> ServerSettings:
    """Return the server's options among the arguments. Raises `ConfigError`."""
    options: dict[str, Any] = {"page": False}
    for name, value in arguments.items():
        if name in OWN:
            continue
        if name in ELSEWHERE:
            raise ConfigError(f"{name}: {ELSEWHERE[name]}")
        if (field := ServerSettings.model_fields.get(name)) is None:
            known = [
                *OWN,
                *(known for known in ServerSettings.model_fields if known not in ELSEWHERE),
            ]
            raise ConfigError(
                f"{name}: unknown "
                f"argument{did_you_mean(name, known) or '; known are ' + ', '.join(known)}"
            )
        if value == "null":
            value = None
        options[name] = (
            value.split(",")
            if isinstance(value, str) and get_origin(field.annotation) is tuple
            else value
        )
    try:
        return ServerSettings.model_validate(options)
    except ValidationError as error:
        raise ConfigError(
            "\n".join(
                f"{detail['loc'][0]}: {detail['msg']}, got {shown(detail['input'])}"
                for detail in error.errors()
            )
        ) from None


def _count(arguments: Mapping[str, Any], name: str, default: int, *, least: int) -> int:
    value = arguments.get(name, default)
    try:
        count = int(value) if isinstance(value, str | int) and not isinstance(value, bool) else -1
    except ValueError:
        count = -1
    if count < least:
        raise ConfigError(f"{name}: expected an integer >= {least}, got {shown(value)}")
    return count


class ServeReplica:
    """An engine and the server's routes, in an actor of Ray Serve."""

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """`settings` are those of `ServerSettings`."""
        self._config, self._settings = dict(config), ServerSettings.model_validate(settings)
        self._failure: str | None = None

    async def __serve_build_asgi_app__(self) -> Any:
        """Start the engine and return its app. Ray Serve calls it once, in the event loop of all
        requests. Raises as the engine does."""
        from dovetail.serving import assemble
        from dovetail_server.app import create_app
        from dovetail_server.front_end import log_to_stderr
        from dovetail_server.one_process import HostThread
        from dovetail_server.remote import RemoteEngine

        log_to_stderr()
        assembly = await asyncio.to_thread(assemble, self._config, {})
        await asyncio.to_thread(assembly.prepare_grammars)
        loop = asyncio.get_running_loop()

        def failed(reason: str) -> None:
            loop.call_soon_threadsafe(self._fail, reason)

        self._thread = HostThread(assembly, failed)
        self._engine = await RemoteEngine.connect(self._thread.line, uuid.uuid4().hex)
        return create_app(self._engine, self._settings)

    def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine is dead or hangs in a step: Ray Serve then replaces
        the replica."""
        if self._thread.host.busy_s() > self._settings.step_timeout_s:
            self._fail(
                f"a step took longer than {self._settings.step_timeout_s:g} s (step_timeout_s)"
            )
        if self._failure is not None:
            raise EngineDeadError(self._failure)

    def __del__(self) -> None:
        """Ray Serve calls this when the replica has no more requests."""
        if self._failure is None and hasattr(self, "_thread"):
            self._thread.close()

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
            self._engine.fail(reason)
