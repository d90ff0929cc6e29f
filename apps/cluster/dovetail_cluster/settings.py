"""`ClusterSettings`: the keys of a cluster file."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from dovetail import EngineConfig
from dovetail.errors import ConfigError
from dovetail.serving import Where, explain, read_settings
from dovetail_server.settings import ServerSettings

# of `dovetail serve` that the cluster sets
OWN_OPTIONS = (
    "host",
    "port",
    "uds",
    "api_keys",
    "tls_cert",
    "tls_key",
)
_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

Seconds = Annotated[float, Field(gt=0, le=86_400, strict=False)]
Count = Annotated[int, Field(ge=1, le=1024)]


def _of_number(value: Any) -> Any:
    """Expand a bare number to both bounds."""
    return (
        {"min": value, "max": value}
        if isinstance(value, int) and not isinstance(value, bool)
        else value
    )


class Replicas(BaseModel):
    """The number of replicas."""

    model_config = _STRICT

    min: Count
    """The minimum, with which the cluster starts."""

    max: Count
    """The maximum. A rolling restart may temporarily exceed it by one."""

    @model_validator(mode="after")
    def _consistent(self) -> Replicas:
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, which is more than max, {self.max}")
        return self


class Scale(BaseModel):
    """When the number of replicas changes between its bounds."""

    model_config = _STRICT

    queue_per_replica: Annotated[float, Field(gt=0, strict=False)] = 4.0
    """Waiting requests per serving replica above which one more is started."""

    up_after_s: Seconds = 10.0
    """Seconds for which the queue must be longer before a replica is started; each further one
    takes as long again."""

    down_after_s: Seconds = 300.0
    """Seconds for which the queue must be empty before a replica is drained; each further one takes
    as long again."""


class RouterSettings(BaseModel):
    """The router in front."""

    model_config = _STRICT

    policy: Literal["cache_aware", "round_robin", "random", "power_of_two", "prefix_hash"] = (
        "cache_aware"
    )
    """How a request's replica is chosen; `cache_aware`: by the longest known prefix of the prompt,
    unless that replica is overloaded."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """The address to listen on. `0.0.0.0` is every address of the machine: set API keys first."""

    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """The TCP port to listen on."""

    metrics_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """The loopback port of the router's own metrics. null: a free one, shown by
    `dovetail cluster status`."""

    @model_validator(mode="after")
    def _two_ports(self) -> RouterSettings:
        if self.metrics_port == self.port:
            raise ValueError(
                f"port and metrics_port are both {self.port}: give them different ones"
            )
        return self


class RaySettings(BaseModel):
    """The Ray cluster, with `place: ray`."""

    model_config = _STRICT

    address: str | None = None
    """The address of a running Ray cluster, or `auto`. null: start one on this machine, which ends
    with the command."""

    cpus: Annotated[int, Field(ge=1, le=1024)] = 1
    """CPUs that Ray reserves per replica."""

    listen: Literal["loopback", "node"] = "loopback"
    """The address on which replicas listen. `loopback` needs all replicas on the router's machine.
    `node` is the machine's address in the Ray cluster, which is reachable from that network."""


class ClusterSettings(BaseModel):
    """The keys of a cluster file. Paths are relative to the working directory."""

    model_config = _STRICT

    engine: str | dict[str, Any]
    """The config of each replica's engine: a file, a model's name, or the keys of `engine.yaml`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}$")] = "cluster"
    """The cluster's name, which distinguishes several of one user."""

    replicas: Annotated[Replicas, BeforeValidator(_of_number)] = Replicas(min=1, max=1)
    """The number of replicas, or `min` and `max` for scaling by the queue."""

    scale: Scale = Scale()
    """When the number of replicas changes between its bounds."""

    gpus: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs per replica. 0: CUDA_VISIBLE_DEVICES is left as it is."""

    place: Literal["here", "ray"] = "here"
    """The backend that runs replicas: `here` starts them as processes of this machine, `ray` as Ray
    actors, each in its own placement group."""

    ray: RaySettings = RaySettings()
    """The Ray cluster."""

    serve: dict[str, Any] = {}
    """Options of `dovetail serve` for each replica, by their names in Python:
    `{max_queued_requests: 512}`."""

    router: RouterSettings = RouterSettings()
    """The router in front."""

    start_timeout_s: Seconds = 1800.0
    """Seconds that a replica may take until it serves; then it is killed and counts as dead."""

    unhealthy_after_s: Seconds = 30.0
    """Seconds for which /health of a serving replica may fail before the replica is killed."""

    @property
    def server(self) -> ServerSettings:
        """The options of each replica's server. Raises `ValidationError`."""
        return ServerSettings.model_validate(self.serve)


def load_cluster(name: str) -> ClusterSettings:
    """Read a cluster file. Raises `ConfigError` with a line for each invalid key that names its
    file and line."""
    settings, where = read_settings(name, ClusterSettings, "engine: demo")
    _check_engine(settings, where)
    _check_serve(settings, where.at("serve"))
    return settings


def plain_config(config: EngineConfig) -> dict[str, Any]:
    """Return an engine's config as plain values for other machines, with absolute paths: of folders
    that all machines share."""
    plain = config.model_dump(mode="json")
    for key in ("model", "tokenizer"):
        if isinstance(plain[key], str) and os.path.isdir(plain[key]):
            plain[key] = os.path.abspath(plain[key])
    return plain


def _check_engine(settings: ClusterSettings, where: Where) -> None:
    try:
        EngineConfig.load(settings.engine)
    except ConfigError as error:
        raise ConfigError(where.at("engine").says(str(error))) from None


def _check_serve(settings: ClusterSettings, where: Where) -> None:
    for key in OWN_OPTIONS:
        if key in settings.serve:
            hint = (
                "keys are given in the environment variable DOVETAIL_API_KEYS"
                if key == "api_keys"
                else "the cluster decides this itself"
            )
            raise ConfigError(where.at(key).says(f"{hint}: leave this out"))
    try:
        _ = settings.server
    except ValidationError as error:
        raise explain(error, ServerSettings, settings.serve, where, "option") from None
