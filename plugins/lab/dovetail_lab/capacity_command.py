"""`dovetail lab capacity`: the highest rate at which engines meet their objectives."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.errors import ConfigError
from dovetail_lab.command_options import (
    Settings,
    StepTime,
    TraceOptions,
    open_engine,
)
from dovetail_lab.experiment_options import Jobs, Out, Seeds, cores, seeds_from, wide_console
from dovetail_lab.writing import make_folder, write_whole

if TYPE_CHECKING:
    from dovetail import EngineConfig
    from dovetail_lab.capacity import Capacity
    from dovetail_lab.records import RunResult
    from dovetail_lab.slo import Objective
    from dovetail_lab.workloads.load import WorkloadOptions

TABLE_FILE = "capacity.csv"


def capacity(
    engines: Annotated[list[str], typer.Argument(metavar="engine.yaml …", help="One engine or more; all are set beside the first.")],
    requests: TraceOptions,
    slo: Annotated[str, typer.Option("--slo", help='"ttft_p99<0.5,tpot_p99<50ms", or a preset such as mlperf-llama3.1-8b.')],
    tolerance: Annotated[float, typer.Option("--tolerance", help="How exactly to find the rate, as a share of it.")] = 0.02,
    seeds: Seeds = 1,
    out: Out = None,
    step_time: StepTime = None,
    settings: Settings = [],  # noqa: B006 typer makes a list of its own
    jobs: Jobs = None,
) -> None:
    """Find the highest rate of arrivals that meets objectives; the search starts at --scale-rate."""
    from dovetail_lab.capacity import find_capacity
    from dovetail_lab.jobs import names_of
    from dovetail_lab.slo import parse_slo

    objectives = parse_slo(slo)
    names = names_of(engines)
    configs = [open_engine(engine, settings, step_time=step_time) for engine in engines]
    options = [requests.workload(one, None) for one in seeds_from(requests.seed, seeds)]
    own_rate = _own_rate(requests.trace, options)
    if out is not None:
        make_folder(out)
    found = {}
    for name, config in zip(names, configs, strict=True):
        runner = _Runner(name, config, requests.trace, options, cores(jobs))
        found[name] = find_capacity(runner, objectives, tolerance=tolerance, start=1.0 if requests.scale_rate is None else requests.scale_rate)
        _print_one(name, found[name], objectives, own_rate)
    first = found[names[0]].scale
    for name in names[1:]:
        own = found[name].scale
        if first is not None and own is not None:
            typer.echo(f"{name} bears {own / first:.2f} times the rate of {names[0]}")
    if out is not None:
        write_whole(out / TABLE_FILE, _as_csv(found, objectives, own_rate))
        typer.echo(f"written: {out / TABLE_FILE}")


class _Runner:
    """Runs of all seeds at a rate."""

    def __init__(self, name: str, config: EngineConfig, trace: str, options: Sequence[WorkloadOptions], processes: int) -> None:
        from dovetail_lab.jobs import Job

        self._jobs = [Job(config, trace, one, name) for one in options]
        self._name, self._processes = name, processes
        self._jobs[0].check()

    def __call__(self, scale: float) -> list[RunResult]:
        from dovetail_lab.jobs import keep, run_jobs

        scaled = [replace(job, options=replace(job.options, scale_rate=scale)) for job in self._jobs]
        return list(run_jobs(scaled, keep, self._processes, f"{self._name} at {scale:.3g} times the rate"))


def _own_rate(trace: str, options: Sequence[WorkloadOptions]) -> float:
    """Return the workload's own rate in requests a second, averaged over seeds. Raises `ConfigError` if it has none."""
    from dovetail_lab.jobs import cached_workload

    rates = []
    for one in options:
        workload = cached_workload(trace, one)
        if len(workload) < 2 or workload.duration_s <= 0:
            raise ConfigError(f"{trace}: {len(workload)} request(s), all at one instant: there is no rate to scale")
        rates.append((len(workload) - 1) / workload.duration_s)
    return sum(rates) / len(rates)


def _print_one(name: str, found: Capacity, objectives: Sequence[Objective], own_rate: float) -> None:
    from rich.table import Table

    table = Table("requests/s", "x rate", *(f"{objective.name}, s" for objective in objectives), "", box=None, pad_edge=False)
    for column in table.columns[:-1]:
        column.justify = "right"
    for trial in found.trials:
        values = ("-" if math.isnan(value) else f"{value:.4g}" for value in trial.values)
        table.add_row(f"{trial.scale * own_rate:.4g}", f"{trial.scale:.4g}", *values, "met" if trial.met else "missed")
    console = wide_console()
    console.print(table)
    console.print(f"{name}: {answer(found, objectives, own_rate)}", style="bold")
    if not found.monotone:
        console.print(
            "beware: a higher rate met what a lower one missed. The answer is below every miss; a longer trace or more seeds would tell better."
        )


def answer(found: Capacity, objectives: Sequence[Objective], own_rate: float) -> str:
    """Return the outcome as a sentence."""
    wanted = ", ".join(map(str, objectives))
    if found.scale is None:
        return f"misses {wanted} even at {found.trials[0].scale * own_rate:.4g} requests/s"
    rate = found.scale * own_rate
    if found.open_ended:
        return f"meets {wanted} even at {rate:.4g} requests/s, the highest rate tried: so few requests can't show where it ends"
    return f"{rate:.4g} requests/s ({found.scale:.4g} times the trace's own) meet {wanted}; tolerance {100 * found.tolerance:g} %"


def _as_csv(found: dict[str, Capacity], objectives: Sequence[Objective], own_rate: float) -> str:
    """Return the trials as CSV, one a line."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["policy", "scale_rate", "requests_per_s", *(f"{objective.name}_s" for objective in objectives), "met", "capacity"])
    for name, of_engine in found.items():
        for trial in of_engine.trials:
            chosen = "yes" if trial.scale == of_engine.scale else "no"
            writer.writerow([name, trial.scale, trial.scale * own_rate, *trial.values, "yes" if trial.met else "no", chosen])
    return text.getvalue()
