"""`dovetail lab sweep`: run every combination of settings and arrival rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.errors import ConfigError
from dovetail_lab.command_options import (
    Engine,
    ReplicaOptions,
    StepTime,
    TraceArgument,
    open_engine,
)
from dovetail_lab.digits import evenly
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
from dovetail_lab.writing import make_folder

if TYPE_CHECKING:
    from dovetail_lab.sweep import GridResult

TABLE_FILE = "sweep.csv"
_LATENCIES = ("ttft_mean", "ttft_p99", "tpot_p99", "itl_p99", "e2e_mean", "e2e_p99")
_SHOWN = ("arrival_rate", "completed", *_LATENCIES, "output_rate", "tokens_per_step", "slo_met")
_MANY = 10_000  # limit on points


def sweep(
    engine: Engine,
    trace: TraceArgument,
    options: WorkloadOptions,
    routed: ReplicaOptions,
    settings: Annotated[
        list[str],
        typer.Option(
            "--set", metavar="KEY=A,B,…", help="Key of the engine, and its values. May be repeated."
        ),
    ] = [],  # noqa: B006 typer makes a list of its own
    rates: Annotated[
        str | None, typer.Option("--rates", metavar="A,B,…", help="Factors on the trace's rate.")
    ] = None,
    seeds: Seeds = 1,
    slo: Annotated[
        str | None,
        typer.Option(
            "--slo",
            help="Objectives to judge each run by: ttft_p99<0.5,tpot_p99<50ms, or a preset.",
        ),
    ] = None,
    out: Out = None,
    step_time: StepTime = None,
    jobs: Jobs = None,
) -> None:
    """Run every combination of settings and rates."""
    need(*(("matplotlib", "jinja2") if out is not None else ()))
    from dovetail_lab import sweep as sweeping
    from dovetail_lab.planned_runs import PlannedRun, display_names
    from dovetail_lab.slo import parse_slo

    objectives = () if slo is None else parse_slo(slo)
    [routing] = routed.routing(display_names([engine])).values()
    axes = [
        *map(sweeping.parse_axis, settings),
        *([] if rates is None else [sweeping.Axis(sweeping.RATE, _factors(rates))]),
    ]
    if not axes:
        raise ConfigError("nothing to sweep: give --set key=value,value,… or --rates")
    points = list(sweeping.grid(axes, seeds_from(options.seed, seeds)))
    if len(points) > _MANY:
        raise ConfigError(f"the grid has {len(points):,} points: at most {_MANY:,} are supported")
    todo = []
    for point in points:
        chosen = [f"{key}={value}" for key, value in point.values.items() if key != sweeping.RATE]
        factor = point.values.get(sweeping.RATE)
        rate = (
            options.scale_rate
            if factor is None
            else float(factor) * (1.0 if options.scale_rate is None else options.scale_rate)
        )
        job = PlannedRun(
            open_engine(engine, chosen, step_time=step_time),
            trace,
            replace(options, seed=point.seed, scale_rate=rate),
            routing=routing,
        )
        todo.append((point, job))
    if out is not None:
        make_folder(out)
    rows = sweeping.sweep(todo, objectives, cores(jobs))
    means = sweeping.averaged(rows)
    print_rows(means, seeds)
    if out is not None:
        from dovetail_lab.report.curves import Table, write_curves
        from dovetail_lab.report.sweep_page import sweep_page

        table = Table(*_table(means), names=len(axes))
        files = {TABLE_FILE: sweeping.table_of(rows)}
        page = sweep_page(
            display_names([engine])[0],
            trace,
            means,
            objectives,
            seeds,
            table,
            shown_command(),
            files,
        )
        typer.echo(f"written: {write_curves(page, out)[0]}")


def _factors(text: str) -> tuple[str, ...]:
    """Split a list of factors and return them as written. Raises `ConfigError` unless all are
    numbers above 0."""
    parts = tuple(part.strip() for part in text.split(","))
    for part in parts:
        try:
            good = 0 < float(part) < math.inf
        except ValueError:
            good = False
        if not good:
            raise ConfigError(f"--rates: expected numbers above 0, got {part!r}")
        if parts.count(part) > 1:
            raise ConfigError(f"--rates: {part} is given twice")
    return parts


def print_rows(rows: Sequence[GridResult], seeds: int) -> None:
    from rich.table import Table

    header, cells = _table(rows)
    table = Table(*header, box=None, pad_edge=False)
    for column in table.columns:
        column.justify = "right"
    for row in cells:
        table.add_row(*row)
    console = wide_console()
    console.print(table)
    console.print("latencies in seconds" + (f", means over {seeds} seeds" if seeds > 1 else ""))


def _table(rows: Sequence[GridResult]) -> tuple[list[str], list[list[str]]]:
    """Return the header, and a row of texts per point, with equally many decimals within a
    column."""
    drafts = any(row.figures.get("tokens_per_step", 1) > 1 for row in rows)
    shown = [
        name for name in _SHOWN if name in rows[0].figures and (drafts or name != "tokens_per_step")
    ]
    columns = [_column(name, [row.figures[name] for row in rows]) for name in shown]
    cells = zip(*columns, strict=True) if columns else [()] * len(rows)
    return [*rows[0].point.values, *shown], [
        [*row.point.values.values(), *own] for row, own in zip(rows, cells, strict=True)
    ]


def _column(name: str, values: Sequence[float]) -> list[str]:
    if name == "slo_met":
        return [
            "yes" if value == 1 else "no" if value == 0 else f"{100 * value:.0f} % of seeds"
            for value in values
        ]
    if name == "completed" and all(value.is_integer() for value in values):
        return [f"{value:,.0f}" for value in values]
    return evenly(values)
