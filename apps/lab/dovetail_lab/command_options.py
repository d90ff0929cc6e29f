"""Options that the lab's commands share: an engine, a trace, and changes to it. Nothing heavy is imported before a command runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from dovetail.checks import shown
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from dovetail import EngineConfig
    from dovetail_lab.routers import Routing
    from dovetail_lab.simulate import Progress
    from dovetail_lab.workloads.load import WorkloadOptions

Engine = Annotated[str, typer.Argument(metavar="engine.yaml", help="The engine: which policy, which KV-cache manager, what sizes.")]
Settings = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the engine, dotted if need be. May be repeated.")]
SettingsOfSeveral = Annotated[
    list[str],
    typer.Option("--set", metavar="[ENGINE:]KEY=VALUE", help="Set a key of every engine, or of the one of that name. May be repeated."),
]
StepTime = Annotated[str | None, typer.Option("--step-time", metavar="FILE.json|NAME", help="How long steps take.  [default: as the engine says]")]
Real = Annotated[bool, typer.Option("--real", help="On the engine's own executor, in real time, instead of a simulation.")]


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """The options that choose the requests."""

    trace: Annotated[str, typer.Option("--trace", metavar="FILE|SPEC", help="A trace in any known format, a YAML spec of a workload, or a spec.")]
    scale_rate: Annotated[float | None, typer.Option("--scale-rate", metavar="FACTOR", help="This many times as many requests a second.")] = None
    slice: Annotated[
        str | None, typer.Option("--slice", metavar="FROM:TO", help="A part of the trace: 100:200 (requests) or 60s:120s (seconds).")
    ] = None
    arrivals: Annotated[
        str | None, typer.Option("--arrivals", metavar="PROCESS", help='In place of the trace\'s own times, such as "poisson(4)".')
    ] = None
    max_tokens: Annotated[str, typer.Option("--max-tokens", metavar="trace|N", help="What policies see as a request's max_tokens.")] = "trace"
    predictor: Annotated[
        str | None, typer.Option("--predictor", help="Guesses of output lengths that policies see: oracle, noisy(0.5), bucket(2, 0.8).")
    ] = None
    seed: Annotated[int, typer.Option("--seed", help="Of the engine, of synthetic workloads and of predictions.")] = 0
    format: Annotated[str | None, typer.Option("--format", help="Of the trace.  [default: found by its content]")] = None
    columns: Annotated[str | None, typer.Option("--columns", metavar="FIELD=COLUMN,…", help="What the columns of an unknown CSV file are.")] = None
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", metavar="FILE.json", help="To count tokens of a trace that holds text.  [default: words are counted]")
    ] = None
    grammar_share: Annotated[
        float | None, typer.Option("--grammar-share", metavar="SHARE", help="Of requests with a grammar, from 0 to 1.  [default: as the trace says]")
    ] = None

    def workload(self, seed: int, scale_rate: float | None) -> WorkloadOptions:
        """Return the options of the workload, with another seed and rate."""
        from dovetail_lab.workloads.load import WorkloadOptions

        return WorkloadOptions(
            self.format,
            self.columns,
            self.arrivals,
            self.slice,
            scale_rate,
            self.max_tokens,
            self.predictor,
            seed,
            self.tokenizer,
            self.grammar_share,
        )


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """The options that put several equal engines behind a router."""

    replicas: Annotated[int, typer.Option("--replicas", metavar="N", help="Equal engines behind a router.")] = 1
    router: Annotated[
        list[str],
        typer.Option(
            "--router", metavar="[ENGINE:]NAME", help="round_robin, least_tokens, prefix_aware, vllm, or module:Class.  [default: round_robin]"
        ),
    ] = field(default_factory=list)

    def routing(self, names: Sequence[str] = ()) -> dict[str, Routing | None]:
        """Return the routing of each engine by its name. Raises `ConfigError`, also if a router is given without replicas."""
        from dovetail_lab.routers import Routing

        chosen: dict[str, str | None] = dict.fromkeys(names)
        for text in self.router:
            owner = max((name for name in names if text.startswith(f"{name}:")), key=len, default=None)
            for name in names if owner is None else [owner]:
                chosen[name] = text if owner is None else text.removeprefix(f"{owner}:")
        if self.replicas == 1 and not self.router:
            return dict.fromkeys(names)
        if self.replicas == 1:
            raise ConfigError("--router: there is nothing to choose from with one engine: say how many with --replicas")
        return {name: Routing(self.replicas, router or "round_robin") for name, router in chosen.items()}


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with each dataclass parameter replaced by its fields, as typer knows no groups of options."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))
            continue
        own = get_type_hints(groups[name], include_extras=True)
        for one in fields(groups[name]):
            default = Parameter.empty if one.default is MISSING else one.default
            default = default if one.default_factory is MISSING else one.default_factory()
            parameters.append(Parameter(one.name, Parameter.KEYWORD_ONLY, default=default, annotation=own[one.name]))

    @wraps(command)
    def call(**values: Any) -> None:
        made = {name: group(**{one.name: values.pop(one.name) for one in fields(group)}) for name, group in groups.items()}
        command(**made, **values)

    call.__signature__ = signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def open_engines(sources: Sequence[str], settings: Sequence[str], *, step_time: str | None = None) -> dict[str, EngineConfig]:
    """Return the simulated engines by their names in tables. A setting "KEY=VALUE" is for all of them, "ENGINE:KEY=VALUE" for the one of that name.

    Raises `ConfigError`, which names the engine.
    """
    from dovetail_lab.jobs import names_of

    names = names_of(sources)
    wanted: dict[str, list[str]] = {name: [] for name in names}
    for text in settings:
        key = text.partition("=")[0]
        owner = max((name for name in names if key.startswith(f"{name}:")), key=len, default=None)
        if owner is None and ":" in key:
            raise ConfigError(f"--set: {shown(text)}: there is no engine {shown(key.rpartition(':')[0])}; engines are {', '.join(names)}")
        for name in names if owner is None else [owner]:
            wanted[name].append(text if owner is None else text.removeprefix(f"{owner}:"))
    return {
        name: open_engine(source, wanted[name], step_time=step_time, origin=f"{name}: --set") for name, source in zip(names, sources, strict=True)
    }


def open_engine(
    source: str, settings: Sequence[str] = (), *, step_time: str | None = None, real: bool = False, origin: str = "--set"
) -> EngineConfig:
    """Return the engine's config with `--set`s on top, and the simulated executor unless it names that itself, or is `real`.

    Raises `ConfigError`, with `origin` for what is wrong in a `--set`.
    """
    from dovetail import EngineConfig
    from dovetail_lab.simulate import SIMULATED

    overrides = EngineConfig.read_settings(settings)
    own = EngineConfig.load_with(source, {key: value for key, value in overrides.items() if not key.startswith("executor")}, origin)
    if real:
        if own.executor.name in SIMULATED or step_time is not None:
            raise ConfigError("--real runs on the executor that engine.yaml names: it must be another one than simulated, without --step-time")
        return EngineConfig.load_with(source, overrides, origin)
    replaced = {} if own.executor.name in SIMULATED else {"executor": "dovetail:simulated"}
    timed = {} if step_time is None else {"executor.step_time": step_time}
    return EngineConfig.load_with(source, {**replaced, **overrides, **timed}, origin)


@contextmanager
def progress_bar(what: str, unit: str = "req") -> Iterator[Progress]:
    """Show a progress bar of finished requests, or of another `unit`, on standard error if that is a terminal."""
    from tqdm import tqdm

    with tqdm(desc=what, unit=unit, disable=None, leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
