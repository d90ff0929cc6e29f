"""`dovetail lab compare`: compare engines on the same requests."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.errors import ConfigError
from dovetail_lab.command_options import (
    ReplicaOptions,
    SettingsOfSeveral,
    StepTime,
    TraceArgument,
    open_engines,
)
from dovetail_lab.experiment_options import (
    Budget,
    Jobs,
    Out,
    Seeds,
    TimeBudget,
    cores,
    need,
    seeds_from,
    shown_command,
    wide_console,
)
from dovetail_lab.workload_options import WorkloadOptions
from dovetail_lab.writing import make_folder, write_whole

if TYPE_CHECKING:
    from dovetail import EngineConfig
    from dovetail_lab.planned_runs import PlannedRun, Workers
    from dovetail_lab.records import RunResult
    from dovetail_lab.routers import Routing
    from dovetail_lab.step_error import Repeated
    from dovetail_lab.until import Until
    from dovetail_lab.verdict import Comparison


def compare(
    engines: Annotated[
        list[str],
        typer.Argument(
            metavar="a.yaml b.yaml …", help="Two engines or more; all are compared with the first."
        ),
    ],
    trace: TraceArgument,
    options: WorkloadOptions,
    routed: ReplicaOptions,
    seeds: Seeds = 1,
    until: Annotated[
        str | None,
        typer.Option(
            "--until",
            metavar="[FIGURE=]SHARE",
            help="Add seeds until the interval of a figure is this narrow: 5%, or ttft_p99=5%.",
        ),
    ] = None,
    budget: Budget = 600.0,
    out: Out = None,
    confidence: Annotated[
        float, typer.Option("--confidence", help="Confidence level of each interval.")
    ] = 0.95,
    resamples: Annotated[
        int, typer.Option("--resamples", help="Number of resamples of the bootstrap.")
    ] = 2_000,
    decisions: Annotated[
        bool,
        typer.Option(
            "--decisions", help="Write a log of decisions of each run, for Perfetto, into --out."
        ),
    ] = False,
    step_time_error: Annotated[
        float | None,
        typer.Option(
            "--step-time-error",
            metavar="SHARE",
            help="Repeat the comparison with all steps longer and shorter by this share; 0: don't. "
            " [default: the error that the step times state]",
        ),
    ] = None,
    keep_runs: Annotated[
        bool,
        typer.Option("--keep-runs", help="Write each run into --out, for `dovetail lab report`."),
    ] = False,
    step_time: StepTime = None,
    settings: SettingsOfSeveral = [],  # noqa: B006 typer makes a list of its own
    jobs: Jobs = None,
) -> None:
    """Compare policies on the same requests, with confidence intervals and a verdict."""
    need("scipy", *(("matplotlib", "jinja2") if out is not None else ()))
    from dovetail_lab import compare as comparing
    from dovetail_lab.planned_runs import Workers
    from dovetail_lab.step_error import Repeated, StepErrors

    if len(engines) < 2:
        raise ConfigError(
            "a comparison needs two engines or more: dovetail lab compare a.yaml b.yaml --trace …"
        )
    writes_runs = decisions or keep_runs
    if out is None and writes_runs:
        raise ConfigError("--decisions and --keep-runs write files: give --out")
    comparing.check_settings(confidence, resamples)
    configs = open_engines(engines, settings, step_time=step_time)
    routing = routed.routing(list(configs))
    if decisions and any(routing.values()):
        raise ConfigError("--decisions: a log is of one engine: leave it out, or --replicas")
    errors = StepErrors.find(configs, step_time_error)
    scenarios = [configs]
    if errors:
        scenarios += [errors.scaled(configs, longer=longer) for longer in (False, True)]
    with Workers(cores(jobs)) as workers:
        study = _Study(scenarios, trace, options, routing, workers, out if decisions else None)
        goal = study.goal(until, confidence)
        rest = TimeBudget(budget)
        if out is not None:
            make_folder(out)
        study.add(seeds)
        study.add_until(goal, rest)
    found, *others = (
        comparing.compare(runs, resamples=resamples, confidence=confidence, seed=options.seed)
        for runs in study.runs
    )
    repeated = Repeated(errors, found, *others) if others else None
    print_comparison(found, repeated)
    study.print_looks(goal)
    if out is not None:
        for run in chain.from_iterable(study.runs[0].values()) if keep_runs else ():
            run.save(out / file_name(run.name, run.seed))
        write_comparison(found, study.runs[0], out, repeated)


@dataclass(slots=True)
class _Study:
    """The runs of all engines with consecutive seeds; of several scenarios of the same engines, of
    which the first has the step times as they are."""

    scenarios: Sequence[Mapping[str, EngineConfig]]
    trace: str
    options: WorkloadOptions
    routing: Mapping[str, Routing | None]
    workers: Workers
    decisions: Path | None  # folder for logs of decisions of the first scenario
    runs: list[dict[str, list[RunResult]]] = field(init=False)

    def __post_init__(self) -> None:
        self.runs = [{name: [] for name in configs} for configs in self.scenarios]

    def goal(self, text: str | None, confidence: float) -> Until | None:
        """Return what `--until` asks for, if it is given. Raises `ConfigError`, also if seeds
        replay the same requests."""
        from dovetail_lab.planned_runs import cached_workload
        from dovetail_lab.until import Until

        if text is None:
            return None
        until = Until.parse(text, confidence)
        if not cached_workload(self.trace, self.options).seeded:
            raise ConfigError(
                "--until: every seed replays the same requests of this trace, so more seeds prove "
                "nothing: use a synthetic workload, or --arrivals"
            )
        return until

    @property
    def seeds(self) -> int:
        return len(next(iter(self.runs[0].values())))

    def add(self, count: int) -> None:
        """Run all engines with `count` more seeds."""
        from dovetail_lab.planned_runs import PlannedRun, unchanged

        seeds = seeds_from(self.options.seed + self.seeds, count)
        todo = [
            (
                runs[name],
                PlannedRun(
                    config, self.trace, replace(self.options, seed=seed), name, self.routing[name]
                ),
            )
            for configs, runs in zip(self.scenarios, self.runs, strict=True)
            for name, config in configs.items()
            for seed in seeds
        ]
        nominal = len(self.scenarios[0]) * count
        if self.decisions is not None:
            todo[:nominal] = [
                (runs, _with_log(job, self.decisions)) for runs, job in todo[:nominal]
            ]
        for _, job in todo[:nominal]:
            job.check()
        done = self.workers.run_all([job for _, job in todo], unchanged, "compare")
        for index, ((runs, _), run) in enumerate(zip(todo, done, strict=True)):
            has_log = self.decisions is not None and index < nominal
            runs.append(_without_log(run) if has_log else run)

    def add_until(self, goal: Until | None, rest: TimeBudget) -> None:
        """Add seeds until the intervals of all engines are narrow, or the time is up; none without
        a goal."""
        while goal is not None:
            needed = [look.more for look in goal.look(self.runs[0])]
            if not max(needed) > 0 or any(map(math.isnan, needed)):
                return
            more = rest.allows(int(min(max(needed), self.seeds)), self.seeds)
            if not more:
                return
            self.add(more)

    def print_looks(self, goal: Until | None) -> None:
        for look in [] if goal is None else goal.look(self.runs[0]):
            typer.echo(f"--until: {look.says}")


def file_name(name: str, seed: int, what: str = "") -> str:
    """Return the file's name for an engine, which may be named by a path."""
    plain = re.sub(r"[^\w.-]+", "_", name).strip("_")
    return f"{plain}-{seed}{what}.json"


def _with_log(job: PlannedRun, out: Path) -> PlannedRun:
    """Return the run with a decision log added to its engine's observers."""
    from dovetail import EngineConfig

    path = out / file_name(job.name or "", job.options.seed, "-decisions")
    log = {"name": "decision_log", "path": str(path)}
    observers = [*job.config.observers, log]
    return replace(job, config=EngineConfig.load_with(job.config, {"observers": observers}))


def _without_log(run: RunResult) -> RunResult:
    """Return the run without the decision log in its settings, since its path differs between
    runs."""
    config = run.settings["config"]
    return replace(
        run, settings={**run.settings, "config": {**config, "observers": config["observers"][:-1]}}
    )


def write_comparison(
    found: Comparison, runs: Mapping[str, Sequence[RunResult]], out: Path, repeated: Repeated | None
) -> None:
    """Write the report and `comparison.json`."""
    from dovetail_lab.report.page import Report, as_json, write_report

    first = next(iter(runs.values()))[0]
    written = write_report(
        Report(f"{', '.join(runs)} on {first.trace}", shown_command(), runs, found, repeated), out
    )
    write_whole(
        out / "comparison.json",
        json.dumps(as_json(found, repeated), indent=2, ensure_ascii=False) + "\n",
    )
    typer.echo(f"written: {written[0]}")


def print_comparison(found: Comparison, repeated: Repeated | None) -> None:
    """Print verdicts, then the tables behind them."""
    from rich.table import Table

    from dovetail_lab.verdict import change_rows

    console = wide_console()
    for versus in found.versus:
        console.print(f"{versus.verdict}.", style="bold")
    if repeated is not None:
        console.print(f"{repeated.says}:")
        for index in range(len(found.versus)):
            console.print(f"  {repeated.verdict(index)}")
        for warning in repeated.warnings:
            console.print(f"warning: {warning}.")
    short = {"no measurable difference": "~", "no interval": "", "runs too short to tell": "?"}
    for index, versus in enumerate(found.versus):
        level = f"{100 * found.method.confidence:g} %"
        elsewhere = () if repeated is None else ("shorter steps", "longer steps")
        table = Table(
            "", versus.base, versus.other, "change", level, "", *elsewhere, box=None, pad_edge=False
        )
        for column in (*table.columns[1:5], *table.columns[6:]):
            column.justify = "right"
        for line, cells in change_rows(versus.lines):
            others = [] if repeated is None else repeated.cells(index, line)
            unsure = (
                ""
                if repeated is None or repeated.survives(index, line)
                else ", depends on step times"
            )
            needs = line.would_tell(found.method, len(found.seeds))
            outcome = short.get(line.outcome, line.outcome) + (needs and f" {needs}")
            table.add_row(line.label, *cells, outcome + unsure, *others)
        console.print()
        console.print(table)
        sides = (
            f"{metric.upper()} {100 * one.quicker:.0f} % and {100 * one.slower:.0f} %"
            for metric, one in versus.faster.items()
        )
        console.print(
            f"of {versus.compared} requests that both completed, {versus.other} is quicker and "
            f"slower for: {', '.join(sides)}"
        )
    console.print()
    unsure = (
        " ? the runs are too short to tell."
        if any(not line.holds for versus in found.versus for line in versus.lines)
        else ""
    )
    console.print(
        f"~ no measurable difference, and what would probably show one of this size.{unsure} "
        f"{found.method.says}."
    )
    for warning in found.method.warnings:
        console.print(f"warning: {warning}.")
    if repeated is None:
        console.print(
            "Intervals cover the traffic, not errors of step times: --step-time-error 0.04 repeats "
            "with steps 4 % longer and shorter."
        )
    console.print(found.caution)
