"""Options that the lab's commands share: an engine, a trace, what is done to it. Nothing heavy is imported before a command runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from dovetail import EngineConfig
    from dovetail_lab.simulate import Progress

Engine = Annotated[str, typer.Argument(metavar="engine.yaml", help="The engine: which policy, which KV-cache manager, what sizes.")]
TraceName = Annotated[str, typer.Option("--trace", metavar="FILE|SPEC", help="A trace in any known format, a YAML spec of a workload, or a spec.")]
Format = Annotated[str | None, typer.Option("--format", help="Of the trace.  [default: found by its content]")]
Columns = Annotated[str | None, typer.Option("--columns", metavar="FIELD=COLUMN,…", help="What the columns of an unknown CSV file are.")]
Arrivals = Annotated[str | None, typer.Option("--arrivals", metavar="PROCESS", help='In place of the trace\'s own times, such as "poisson(4)".')]
Slice = Annotated[str | None, typer.Option("--slice", metavar="FROM:TO", help="A part of the trace: 100:200 (requests) or 60s:120s (seconds).")]
ScaleRate = Annotated[float | None, typer.Option("--scale-rate", metavar="FACTOR", help="This many times as many requests a second.")]
MaxTokens = Annotated[str, typer.Option("--max-tokens", metavar="trace|N", help="What policies see as a request's max_tokens.")]
Tokenizer = Annotated[
    str | None, typer.Option("--tokenizer", metavar="FILE.json", help="To count tokens of a trace that holds text.  [default: words are counted]")
]
Predictor = Annotated[
    str | None, typer.Option("--predictor", help="Guesses of output lengths that policies see: oracle, noisy(0.5), bucket(2, 0.8).")
]
Seed = Annotated[int, typer.Option("--seed", help="Of the engine, of synthetic workloads and of predictions.")]
Settings = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the engine, dotted if need be. May be repeated.")]
StepTime = Annotated[str | None, typer.Option("--step-time", metavar="FILE.json|NAME", help="How long steps take.  [default: as the engine says]")]
Real = Annotated[bool, typer.Option("--real", help="On the engine's own executor, in real time, instead of a simulation.")]


def open_engine(source: str, settings: Sequence[str] = (), *, step_time: str | None = None, real: bool = False) -> EngineConfig:
    """The engine's config with `--set`s on top, its executor replaced by the simulated one unless that is what it names, or `real`.

    Raises `ConfigError`.
    """
    from dovetail import EngineConfig
    from dovetail_lab.simulate import SIMULATED

    overrides = EngineConfig.read_settings(settings)
    own = EngineConfig.load_with(source, {key: value for key, value in overrides.items() if not key.startswith("executor")}, "--set")
    if real:
        if own.executor.name in SIMULATED or step_time is not None:
            raise ConfigError("--real runs on the executor that engine.yaml names: it must be another one than simulated, without --step-time")
        return EngineConfig.load_with(source, overrides, "--set")
    replaced = {} if own.executor.name in SIMULATED else {"executor": "simulated"}
    timed = {} if step_time is None else {"executor.step_time": step_time}
    return EngineConfig.load_with(source, {**replaced, **overrides, **timed}, "--set")


@contextmanager
def progress_bar(what: str, unit: str = "req") -> Iterator[Progress]:
    """A bar of finished requests, or of something else, on a terminal's standard error; elsewhere nothing."""
    from tqdm import tqdm

    with tqdm(desc=what, unit=unit, disable=None, leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
