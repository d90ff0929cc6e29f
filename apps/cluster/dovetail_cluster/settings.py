"""`ClusterSettings`: the keys of a cluster file, checked."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from dovetail.config import EngineConfig
from dovetail.errors import ConfigError
from dovetail.where import Where, explain
from dovetail.yaml_source import read_settings
from dovetail_server.settings import ServerSettings

OWN_OPTIONS = ("host", "port", "uds", "api_keys", "tls_cert", "tls_key")  # of `dovetail serve`: the cluster gives these itself
_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

Seconds = Annotated[float, Field(gt=0, le=86_400, strict=False)]
Count = Annotated[int, Field(ge=1, le=1024)]


def _of_number(value: Any) -> Any:
    """A number alone is both bounds."""
    return {"min": value, "max": value} if isinstance(value, int) and not isinstance(value, bool) else value


class Replicas(BaseModel):
    """The number of replicas."""

    model_config = _STRICT

    min: Count
    """The fewest replicas, with which the cluster starts."""

    max: Count
    """The most replicas. A rolling restart may have one more for a moment."""

    @model_validator(mode="after")
    def _consistent(self) -> Replicas:
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, which is more than max, {self.max}")
        return self


class Scale(BaseModel):
    """The conditions under which the number of replicas changes between its bounds."""

    model_config = _STRICT

    queue_per_replica: Annotated[float, Field(gt=0, strict=False)] = 4.0
    """The number of waiting requests for each replica that serves above which one more is started."""

    up_after_s: Seconds = 10.0
    """How long the queue must be longer than that before one more is started, in seconds; each further one takes as long again."""

    down_after_s: Seconds = 300.0
    """How long no request may wait before a replica is drained, in seconds; each further one takes as long again."""


class RouterSettings(BaseModel):
    """The router in front."""

    model_config = _STRICT

    policy: Literal["cache_aware", "round_robin", "random", "power_of_two", "prefix_hash"] = "cache_aware"
    """How a request's replica is chosen; `cache_aware`: the one that has computed the longest part of the prompt, unless it has too much to do."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """The address to listen on. `0.0.0.0` is every address of the machine: set API keys first."""

    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """The TCP port to listen on."""

    metrics_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """The port of loopback on which the router tells its own metrics. null: a free one, which `dovetail cluster status` tells."""

    @model_validator(mode="after")
    def _two_ports(self) -> RouterSettings:
        if self.metrics_port == self.port:
            raise ValueError(f"port and metrics_port are both {self.port}: give them different ones")
        return self


class RaySettings(BaseModel):
    """The cluster of Ray, with `place: ray`."""

    model_config = _STRICT

    address: str | None = None
    """The address of a running cluster of Ray, or `auto`. null: one is started on this machine, which ends with the command."""

    cpus: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of CPUs that Ray sets aside for each replica."""

    listen: Literal["loopback", "node"] = "loopback"
    """The address on which replicas listen: `loopback`, where all are on the router's machine, or `node`: the address by which Ray knows the machine,
    so that everybody on that network reaches them."""


class ClusterSettings(BaseModel):
    """The keys of a cluster file. Paths in it start at the working directory."""

    model_config = _STRICT

    engine: str | dict[str, Any]
    """The config of each replica's engine: a file, a model's name, or the keys of `engine.yaml`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}$")] = "cluster"
    """The cluster's name, which tells several of one user apart."""

    replicas: Annotated[Replicas, BeforeValidator(_of_number)] = Replicas(min=1, max=1)
    """The number of replicas, or `min` and `max`, between which the queue decides."""

    scale: Scale = Scale()
    """When the number of replicas changes between its bounds."""

    gpus: Annotated[int, Field(ge=0, le=64)] = 0
    """Number of GPUs for each replica alone. 0: replicas are told nothing of GPUs, as on a machine without any."""

    place: Literal["here", "ray"] = "here"
    """Where replicas run: `here`, as processes of this machine, or `ray`, as actors of Ray, each in a placement group of its own."""

    ray: RaySettings = RaySettings()
    """The cluster of Ray."""

    serve: dict[str, Any] = {}
    """Options of `dovetail serve` for each replica, by their names in Python: `{max_queued_requests: 512}`."""

    router: RouterSettings = RouterSettings()
    """The router in front."""

    start_timeout_s: Seconds = 1800.0
    """How long a replica may take from its start until it serves, in seconds; then it is killed and counts as dead."""

    unhealthy_after_s: Seconds = 30.0
    """How long a replica that served may leave /health unanswered, or answer that it is ill, before it is killed, in seconds."""

    @property
    def server(self) -> ServerSettings:
        """The options of each replica's server. Raises `ValidationError`."""
        return ServerSettings.model_validate(self.serve)


def load_cluster(name: str) -> ClusterSettings:
    """Read a cluster file. Raises `ConfigError`: a line for each wrong key, with its file and line."""
    settings, where = read_settings(name, ClusterSettings, "engine: demo")
    _check_engine(settings, where)
    _check_serve(settings, where.at("serve"))
    return settings


def _check_engine(settings: ClusterSettings, where: Where) -> None:
    try:
        EngineConfig.load(settings.engine)
    except ConfigError as error:
        raise ConfigError(where.at("engine").says(str(error))) from None


def _check_serve(settings: ClusterSettings, where: Where) -> None:
    for key in OWN_OPTIONS:
        if key in settings.serve:
            told = "keys are given in the environment variable DOVETAIL_API_KEYS" if key == "api_keys" else "the cluster decides this itself"
            raise ConfigError(where.at(key).says(f"{told}: leave this out"))
    try:
        _ = settings.server
    except ValidationError as error:
        raise explain(error, ServerSettings, settings.serve, where, "option") from None
