"""`dovetail lab tune`: search a policy's options."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.errors import ConfigError, MissingExtraError
from dovetail_lab.command_options import Settings, StepTime, TraceArgument, open_engine
from dovetail_lab.experiment_options import need
from dovetail_lab.workload_options import WorkloadOptions
from dovetail_lab.writing import make_folder, write_whole

if TYPE_CHECKING:
    from dovetail_lab.statistics import Change
    from dovetail_lab.traces import Trace
    from dovetail_lab.tuning import Search

MOST_TRIALS = 10_000


def tune(
    policy: Annotated[str, typer.Argument(metavar="POLICY", help="The scheduler.")],
    trace: TraceArgument,
    options: WorkloadOptions,
    engine: Annotated[
        str, typer.Option("--engine", metavar="engine.yaml", help="The engine around it.")
    ],
    out: Annotated[
        Path,
        typer.Option("--out", metavar="DIR", help="Folder for the trials; run again to resume."),
    ],
    objective: Annotated[
        str, typer.Option("--objective", help="goodput, or a figure such as ttft_p99.")
    ] = "goodput",
    goodput: Annotated[
        str | None,
        typer.Option(
            "--goodput", metavar="METRIC<LIMIT,…", help='What goodput counts: "ttft<0.5,tpot<50ms".'
        ),
    ] = None,
    ranges: Annotated[
        list[str],
        typer.Option(
            "--range", metavar="NAME=LOW..HIGH", help="Range of an option. May be repeated."
        ),
    ] = [],  # noqa: B006 typer makes a list of its own
    trials: Annotated[int, typer.Option("--trials", metavar="N", help="Number of trials.")] = 40,
    held_out: Annotated[
        float,
        typer.Option(
            "--held-out", metavar="SHARE", help="Share of the trace, at its end, that is held out."
        ),
    ] = 0.3,
    step_time_error: Annotated[
        float | None,
        typer.Option(
            "--step-time-error",
            metavar="SHARE",
            help="Repeat the verdict with all steps longer and shorter by this share.  [default: "
            "the error that the step times state]",
        ),
    ] = None,
    step_time: StepTime = None,
    settings: Settings = [],  # noqa: B006 typer makes a list of its own
) -> None:
    """Search a policy's options, and evaluate the gain on requests that the search hasn't seen."""
    need("scipy")
    try:
        from dovetail_lab.tuning import Goal, Search
    except ImportError as error:
        raise MissingExtraError.naming("tune", f"this needs {error.name}") from None
    from dovetail_lab.option_space import parse_ranges, space_of
    from dovetail_lab.planned_runs import scheduler_options
    from dovetail_lab.slo import parse_goodput
    from dovetail_lab.workloads import load_workload

    if not 1 <= trials <= MOST_TRIALS:
        raise ConfigError(f"--trials: expected 1 to {MOST_TRIALS:,}, got {trials}")
    goal = Goal(objective, None if goodput is None else parse_goodput(goodput))
    config = open_engine(engine, settings, step_time=step_time)
    if config.scheduler.name != policy:
        config = open_engine(engine, [f"scheduler={policy}", *settings], step_time=step_time)
    defaults = scheduler_options(config)
    space, unbounded = space_of(type(defaults), parse_ranges(ranges))
    if unbounded:
        typer.echo(f"not searched, for lack of bounds (--range): {', '.join(unbounded)}")
    seen, unseen = _parts(load_workload(trace, options), held_out)
    present = defaults.model_dump()
    search = Search(config, policy, present, space, goal, seen, options.seed)
    make_folder(out)
    study = search.run(out, trials)
    ended = study.get_trials(deepcopy=False)
    results = [trial for trial in ended if trial.value is not None]
    typer.echo(f"{len(results)} trials with a result, {len(seen)} requests each")
    if not results:
        raise ConfigError("no trial has a result: see why with `dovetail lab run`")
    best = dict(study.best_params)
    verdict = _verdict(search, best, unseen, step_time_error)
    for line in (*(f"  {name}: {_shown(value)}" for name, value in best.items()), *verdict["says"]):
        typer.echo(line)
    write_whole(
        out / "tune.json",
        json.dumps({"policy": policy, "objective": objective, "best": best, **verdict}, indent=2)
        + "\n",
    )


def _parts(trace: Trace, held_out: float) -> tuple[Trace, Trace]:
    """Split a trace. Raises `ConfigError` unless both parts have requests."""
    from dovetail_lab.traces.transform import slice_trace

    if not 0 < held_out < 1:
        raise ConfigError(f"--held-out: expected a share between 0 and 1, got {held_out:g}")
    count = round(len(trace) * (1 - held_out))
    if not 0 < count < len(trace):
        raise ConfigError(f"{trace.name} has {len(trace)} requests: too few to hold some out")
    return slice_trace(trace, f"0:{count}"), slice_trace(trace, f"{count}:")


def _verdict(
    search: Search, best: Mapping[str, Any], unseen: Trace, step_time_error: float | None
) -> dict[str, Any]:
    """Return whether the gain survives on held-out requests, also with the step times scaled by
    their error."""
    from dovetail_lab.simulate import replay
    from dovetail_lab.step_error import StepErrors

    engines = {"present": search.config({}), "tuned": search.config(best)}
    errors = StepErrors.find(engines, step_time_error)
    scenarios = {"held out": engines}
    if errors:
        scenarios |= {
            f"held out, steps {errors.words} {'longer' if longer else 'shorter'}": errors.scaled(
                engines, longer=longer
            )
            for longer in (True, False)
        }
    found: dict[str, Change] = {}
    for name, scenario in {"searched": engines, **scenarios}.items():
        trace = search.trace if name == "searched" else unseen
        sides = [replay(config, trace, seed=search.seed) for config in scenario.values()]
        found[name] = search.goal.change(*sides)
    survives = all(search.goal.better(found[name]) for name in scenarios)
    says = [f"{search.goal.says}, {name}: {_change(change)}" for name, change in found.items()]
    unknown = "" if errors else "; the step times state no error (--step-time-error)"
    says.append(f"the gain {'survives' if survives else 'does not survive'}{unknown}")
    return {"survives": survives, "says": says}


def _change(change: Change) -> str:
    text = f"{_shown(change.a)} to {_shown(change.b)} ({100 * change.relative:+.1f} %"
    if math.isnan(change.low):
        return f"{text}, without an interval)"
    return f"{text} [{100 * change.low:+.1f}, {100 * change.high:+.1f}])"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
