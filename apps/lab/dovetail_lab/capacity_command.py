"""`dovetail lab capacity`: the highest rate at which engines meet their objectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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
from dovetail_lab.digits import evenly, significant
from dovetail_lab.experiment_options import (
    Jobs,
    Out,
    Seeds,
    cores,
    need,
    seeds_from,
    shown_command,
    wide_console,
)
from dovetail_lab.workload_options import WorkloadOptions
from dovetail_lab.writing import as_csv, make_folder

if TYPE_CHECKING:
    from dovetail import EngineConfig
    from dovetail_lab.capacity import Capacity
    from dovetail_lab.records import RunResult
    from dovetail_lab.report.engine import Engine
    from dovetail_lab.routers import Routing
    from dovetail_lab.slo import Objective

TABLE_FILE = "capacity.csv"


def capacity(
    engines: Annotated[
        list[str],
        typer.Argument(
            metavar="engine.yaml …", help="One or more engines; all are compared with the first."
        ),
    ],
    trace: TraceArgument,
    options: WorkloadOptions,
    routed: ReplicaOptions,
    slo: Annotated[
        str,
        typer.Option(
            "--slo", help='"ttft_p99<0.5,tpot_p99<50ms", or a preset such as mlperf-llama3.1-8b.'
        ),
    ],
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="Relative tolerance of the rate.")
    ] = 0.02,
    seeds: Seeds = 1,
    out: Out = None,
    step_time: StepTime = None,
    settings: SettingsOfSeveral = [],  # noqa: B006 typer makes a list of its own
    jobs: Jobs = None,
) -> None:
    """Find the highest rate of arrivals that meets objectives; the search starts at
    --scale-rate."""
    need(*(("matplotlib", "jinja2") if out is not None else ()))
    from dovetail_lab.capacity import find_capacity
    from dovetail_lab.slo import parse_slo

    objectives = parse_slo(slo)
    configs = open_engines(engines, settings, step_time=step_time)
    routing = routed.routing(list(configs))
    of_seeds = [
        replace(options, seed=one, scale_rate=None) for one in seeds_from(options.seed, seeds)
    ]
    own_rate = _own_rate(trace, of_seeds)
    if out is not None:
        make_folder(out)
    found = {}
    engines_run = []
    said = []
    cautions = []
    for name, config in configs.items():
        runner = _Runner(name, config, trace, of_seeds, routing[name], cores(jobs))
        found[name] = find_capacity(
            runner,
            objectives,
            tolerance=tolerance,
            start=1.0 if options.scale_rate is None else options.scale_rate,
        )
        said.append(f"{name}: {answer(found[name], objectives, own_rate)}")
        cautions += [f"{name}: {text}" for text in _cautions(found[name], runner.seeded)]
        engines_run.append(runner.engine)
        _print_one(
            found[name], objectives, own_rate, said[-1], _cautions(found[name], runner.seeded)
        )
    compared = list(_compared(found))
    for text in compared:
        typer.echo(text)
    if out is not None:
        from dovetail_lab.report.capacity_page import capacity_page
        from dovetail_lab.report.curves import Table, write_curves

        table = Table(
            ["engine", *_header(objectives)],
            [
                [name, *row]
                for name, of_engine in found.items()
                for row in _rows(of_engine, own_rate)
            ],
        )
        page = capacity_page(
            found,
            objectives,
            own_rate,
            engines_run,
            trace=trace,
            answers=[*said, *compared],
            cautions=cautions,
            table=table,
            command=shown_command(),
            files={TABLE_FILE: _as_csv(found, objectives, own_rate)},
        )
        typer.echo(f"written: {write_curves(page, out)[0]}")


class _Runner:
    """Runs all seeds at a rate. After the first, also knows the engine's details, and whether seeds
    change the traffic."""

    engine: Engine
    seeded: bool

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        trace: str,
        options: Sequence[WorkloadOptions],
        routing: Routing | None,
        processes: int,
    ) -> None:
        from dovetail_lab.planned_runs import PlannedRun

        self._jobs = [PlannedRun(config, trace, one, name, routing) for one in options]
        self._name = name
        self._processes = processes
        self._jobs[0].check()

    def __call__(self, scale: float) -> list[RunResult]:
        from dovetail_lab.planned_runs import run_all, unchanged
        from dovetail_lab.report.engine import Engine

        scaled = [
            replace(job, options=replace(job.options, scale_rate=scale)) for job in self._jobs
        ]
        runs = list(
            run_all(
                scaled, unchanged, self._processes, f"{self._name} at {scale:.3g} times the rate"
            )
        )
        self.engine = Engine.of(self._name, runs)
        self.seeded = runs[0].seeded
        return runs


def _own_rate(trace: str, options: Sequence[WorkloadOptions]) -> float:
    """Return the workload's own rate in requests per second, averaged over seeds. Raises
    `ConfigError` if it has none."""
    from dovetail_lab.planned_runs import cached_workload

    rates = []
    for one in options:
        workload = cached_workload(trace, one)
        if len(workload) < 2 or workload.duration_s <= 0:
            raise ConfigError(
                f"{trace}: {len(workload)} request(s), all at one instant: there is no rate to "
                f"scale"
            )
        rates.append((len(workload) - 1) / workload.duration_s)
    return sum(rates) / len(rates)


def _compared(found: Mapping[str, Capacity]) -> Iterator[str]:
    """Yield a sentence about each engine's rate relative to the first engine's."""
    (first, base), *others = found.items()
    for name, own in others:
        if base.scale is not None and own.scale is not None:
            yield f"{name} sustains {own.scale / base.scale:.2f} times the rate of {first}"


def _header(objectives: Sequence[Objective]) -> list[str]:
    return ["requests/s", "x rate", *(f"{objective.name}, s" for objective in objectives), ""]


def _rows(found: Capacity, own_rate: float) -> list[list[str]]:
    """Return a row of texts per trial, with equally many decimals within an objective's column."""
    values = zip(
        *(
            evenly(own)
            for own in zip(
                *([one.value for one in trial.judged] for trial in found.trials), strict=True
            )
        ),
        strict=True,
    )
    return [
        [
            significant(trial.scale * own_rate),
            significant(trial.scale),
            *own,
            "met" if trial.met else "missed",
        ]
        for trial, own in zip(found.trials, values, strict=True)
    ]


def _cautions(found: Capacity, seeded: bool) -> list[str]:
    if found.monotone:
        return []
    remedy = "a longer trace or more seeds" if seeded else "a longer trace"
    return [
        f"a higher rate met objectives that a lower one missed. The answer is below every miss; "
        f"{remedy} would make it more reliable"
    ]


def _print_one(
    found: Capacity,
    objectives: Sequence[Objective],
    own_rate: float,
    said: str,
    cautions: Sequence[str],
) -> None:
    from rich.table import Table

    table = Table(*_header(objectives), box=None, pad_edge=False)
    for column in table.columns[:-1]:
        column.justify = "right"
    for row in _rows(found, own_rate):
        table.add_row(*row)
    console = wide_console()
    console.print(table)
    console.print(said, style="bold")
    for caution in cautions:
        console.print(f"warning: {caution}.")


def answer(found: Capacity, objectives: Sequence[Objective], own_rate: float) -> str:
    """Return the outcome as a sentence."""
    wanted = ", ".join(map(str, objectives))
    if found.scale is None:
        return f"misses {wanted} even at {significant(found.trials[0].scale * own_rate)} requests/s"
    rate = found.scale * own_rate
    if found.open_ended:
        return (
            f"meets {wanted} even at {significant(rate)} requests/s, the highest rate tried: "
            f"the trace is too short to show the limit"
        )
    return (
        f"{significant(rate)} requests/s ({significant(found.scale)} times the trace's own) "
        f"meet {wanted}; tolerance {100 * found.tolerance:g} %"
    )


def _as_csv(found: Mapping[str, Capacity], objectives: Sequence[Objective], own_rate: float) -> str:
    """Return CSV with a line for each trial."""
    names = [
        name
        for objective in objectives
        for name in (f"{objective.name}_s", f"{objective.name}_within")
    ]
    return as_csv(
        ["policy", "scale_rate", "requests_per_s", *names, "met", "capacity"],
        (
            [
                name,
                trial.scale,
                trial.scale * own_rate,
                *(figure for one in trial.judged for figure in (one.value, one.share)),
                "yes" if trial.met else "no",
                "yes" if trial.scale == of_engine.scale else "no",
            ]
            for name, of_engine in found.items()
            for trial in of_engine.trials
        ),
    )
