"""`dovetail lab run`: replay one trace through one engine, print a summary, and write the run as
JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dovetail.errors import ConfigError
from dovetail_lab.command_options import (
    Engine,
    Real,
    ReplicaOptions,
    Settings,
    StepTime,
    TraceArgument,
    open_engine,
    progress_bar,
)
from dovetail_lab.workload_options import WorkloadOptions
from dovetail_lab.writing import make_folder

RUN_FILE = "run.json"


def run(
    engine: Engine,
    trace: TraceArgument,
    options: WorkloadOptions,
    routed: ReplicaOptions,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help=f"Where to write {RUN_FILE}, with every request and step."
        ),
    ] = None,
    goodput: Annotated[
        str | None,
        typer.Option(
            "--goodput",
            metavar="METRIC<LIMIT,…",
            help='Count the requests that meet limits: "ttft<0.5,tpot<50ms".',
        ),
    ] = None,
    step_time: StepTime = None,
    settings: Settings = [],  # noqa: B006 typer makes a list of its own
    real: Real = False,
) -> None:
    """Replay a trace through an engine."""
    from dovetail_lab.slo import parse_goodput
    from dovetail_lab.workloads import load_workload

    slo = None if goodput is None else parse_goodput(goodput)
    config = open_engine(engine, settings, step_time=step_time, real=real)
    name = Path(engine).stem
    routing = routed.routing([name])[name]
    if routing is not None and real:
        raise ConfigError("--replicas are simulated only: drop --real")
    workload = load_workload(trace, options)
    if out is not None:
        make_folder(out)
    from dovetail_lab.planned_runs import replay_routed
    from dovetail_lab.summary import print_summary

    with progress_bar(workload.name) as progress:
        result = replay_routed(
            config, workload, routing, name=name, seed=options.seed, progress=progress
        )
    print_summary(result, slo)
    if out is not None:
        result.save(out / RUN_FILE)
        typer.echo(f"written: {out / RUN_FILE}")
