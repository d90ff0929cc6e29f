"""Options that the lab's commands share: an engine, a trace, and changes to it. Nothing heavy is
imported before a command runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from dovetail.errors import ConfigError, shown

if TYPE_CHECKING:
    from dovetail import EngineConfig
    from dovetail_lab.routers import Routing
    from dovetail_lab.simulate import Progress

Engine = Annotated[
    str, typer.Argument(metavar="engine.yaml", help="The engine: policy, KV-cache manager, sizes.")
]
Settings = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a key of the engine, dotted if nested. May be repeated.",
    ),
]
SettingsOfSeveral = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="[ENGINE:]KEY=VALUE",
        help="Set a key of all engines, or of the named one. May be repeated.",
    ),
]
StepTime = Annotated[
    str | None,
    typer.Option(
        "--step-time",
        metavar="FILE.json|NAME",
        help="Step times of the device.  [default: the engine's]",
    ),
]
TraceArgument = Annotated[
    str,
    typer.Option(
        "--trace",
        metavar="FILE|SPEC",
        help="A trace in any known format, a YAML spec of a workload, or a spec.",
    ),
]
Real = Annotated[
    bool,
    typer.Option(
        "--real", help="On the engine's own executor, in real time, instead of a simulation."
    ),
]


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Options for several identical engines behind a router."""

    replicas: Annotated[
        int,
        typer.Option(
            "--replicas", metavar="N", help="Number of identical engines behind a router."
        ),
    ] = 1
    router: Annotated[
        list[str],
        typer.Option(
            "--router",
            metavar="[ENGINE:]NAME",
            help="round_robin, least_tokens, prefix_aware, sticky, cache_aware, vllm, or "
            "module:Class.  [default: round_robin]",
        ),
    ] = field(default_factory=list)

    def routing(self, names: Sequence[str] = ()) -> dict[str, Routing | None]:
        """Return the routing of each engine by its name. Raises `ConfigError`, also if a router is
        given without replicas."""
        from dovetail_lab.routers import Routing

        chosen: dict[str, str | None] = dict.fromkeys(names)
        for text in self.router:
            owners, router = _addressed(text, names)
            chosen |= dict.fromkeys(owners, router)
        if self.replicas == 1 and not self.router:
            return dict.fromkeys(names)
        if self.replicas == 1:
            raise ConfigError("--router needs two or more engines: give --replicas")
        return {
            name: Routing(self.replicas, router or "round_robin") for name, router in chosen.items()
        }


def _addressed(text: str, names: Sequence[str]) -> tuple[Sequence[str], str]:
    """Split "ENGINE:VALUE" into that engine and the value; without a known engine, the value is for
    all of `names`."""
    owner = max((name for name in names if text.startswith(f"{name}:")), key=len, default=None)
    return (names, text) if owner is None else ([owner], text.removeprefix(f"{owner}:"))


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with each dataclass parameter replaced by its fields, as typer knows no
    groups of options."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if name not in groups:
            parameters.append(
                parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name])
            )
            continue
        own = get_type_hints(groups[name], include_extras=True)
        for one in fields(groups[name]):
            default = Parameter.empty if one.default is MISSING else one.default
            default = default if one.default_factory is MISSING else one.default_factory()
            parameters.append(
                Parameter(
                    one.name, Parameter.KEYWORD_ONLY, default=default, annotation=own[one.name]
                )
            )

    @wraps(command)
    def call(**values: Any) -> None:
        made = {
            name: group(**{one.name: values.pop(one.name) for one in fields(group)})
            for name, group in groups.items()
        }
        command(**made, **values)

    call.__signature__ = signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def open_engines(
    sources: Sequence[str], settings: Sequence[str], *, step_time: str | None = None
) -> dict[str, EngineConfig]:
    """Return the simulated engines by display name. A setting "KEY=VALUE" applies to all of them,
    "ENGINE:KEY=VALUE" to the named one.

    Raises `ConfigError`, which names the engine.
    """
    from dovetail_lab.planned_runs import display_names

    names = display_names(sources)
    wanted: dict[str, list[str]] = {name: [] for name in names}
    for text in settings:
        owners, setting = _addressed(text, names)
        key = setting.partition("=")[0]
        if owners is names and ":" in key:
            raise ConfigError(
                f"--set: {shown(text)}: there is no engine {shown(key.rpartition(':')[0])}; "
                f"engines are {', '.join(names)}"
            )
        for name in owners:
            wanted[name].append(setting)
    return {
        name: open_engine(source, wanted[name], step_time=step_time, origin=f"{name}: --set")
        for name, source in zip(names, sources, strict=True)
    }


def open_engine(
    source: str,
    settings: Sequence[str] = (),
    *,
    step_time: str | None = None,
    real: bool = False,
    origin: str = "--set",
) -> EngineConfig:
    """Return the engine's config with `--set`s applied, and the executor `simulated` unless the
    config's own simulates a device, or `real` is set.

    Raises `ConfigError`, with `origin` for errors in a `--set`.
    """
    from dovetail import EngineConfig
    from dovetail_lab.simulate import is_simulated

    overrides = EngineConfig.read_settings(settings)
    own = EngineConfig.load_with(
        source,
        {key: value for key, value in overrides.items() if not key.startswith("executor")},
        origin,
    )
    if real:
        if is_simulated(own) or step_time is not None:
            raise ConfigError(
                "--real uses the executor in engine.yaml, which must not be simulated, and "
                "excludes --step-time"
            )
        return EngineConfig.load_with(source, overrides, origin)
    replaced = {} if is_simulated(own) else {"executor": "dovetail:simulated"}
    timed = {} if step_time is None else {"executor.step_time": step_time}
    return EngineConfig.load_with(source, {**replaced, **overrides, **timed}, origin)


@contextmanager
def progress_bar(what: str, unit: str = "req") -> Iterator[Progress]:
    """Show a progress bar of finished requests, or of another `unit`, on standard error if that is
    a terminal."""
    from tqdm import tqdm

    with tqdm(desc=what, unit=unit, disable=None, leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
