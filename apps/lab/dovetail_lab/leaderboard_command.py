"""`dovetail lab leaderboard`: every installed scheduler on fixed traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.errors import ConfigError
from dovetail_lab.experiment_options import Jobs, cores, need, shown_command, wide_console
from dovetail_lab.writing import make_folder

if TYPE_CHECKING:
    from dovetail_lab.leaderboard.standings import Standing


def leaderboard(
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Directory for the page and the finished runs; run again to resume.",
        ),
    ],
    only: Annotated[
        str | None,
        typer.Option(
            "--only", metavar="NAME,…", help="Subset of the schedulers.  [default: all installed]"
        ),
    ] = None,
    traces: Annotated[
        str | None,
        typer.Option(
            "--traces",
            metavar="NAME,…",
            help="Subset of chat, code, agents, overload.  [default: all]",
        ),
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(
            "--seeds", metavar="N", help="Number of runs on each trace, with seeds from 0."
        ),
    ] = 5,
    jobs: Jobs = None,
) -> None:
    """Rank all installed schedulers on fixed traces."""
    need("scipy", "matplotlib", "jinja2")
    from dovetail_lab.leaderboard import board
    from dovetail_lab.leaderboard.results import Results
    from dovetail_lab.leaderboard.standings import rank
    from dovetail_lab.planned_runs import run_all, unchanged
    from dovetail_lab.report.leaderboard_page import Board, write_leaderboard

    if seeds < 2:
        raise ConfigError(f"--seeds: intervals need 2 or more, got {seeds}")
    chosen = board.TRACES if traces is None else _names(traces)
    for name in chosen:
        if name not in board.TRACES:
            raise ConfigError(
                f"--traces: there is no trace {name!r}; there are {', '.join(board.TRACES)}"
            )
    entries = board.entries(() if only is None else _names(only))
    make_folder(out)
    results = Results(out)
    planned = [
        (entry, board.BoardRun(entry.name, trace, seed))
        for seed in range(seeds)
        for trace in chosen
        for entry in entries
    ]
    todo = [(entry, run) for entry, run in planned if results.of(entry, run) is None]
    if len(todo) < len(planned):
        typer.echo(f"{len(planned) - len(todo)} of {len(planned)} runs are in {out} already")
    failures: dict[str, str] = {}
    for (entry, run), made in zip(
        todo, run_all([run for _, run in todo], unchanged, cores(jobs), "leaderboard"), strict=True
    ):
        if isinstance(made, str):
            failures.setdefault(entry.name, f"{run.trace}, seed {run.seed}: {made}")
        else:
            results.add(entry, run, made)
    found = {}
    for entry in entries:
        figures = {
            trace: [
                results.of(entry, board.BoardRun(entry.name, trace, seed)) for seed in range(seeds)
            ]
            for trace in chosen
        }
        if entry.name not in failures:
            found[entry] = {
                trace: [one for one in own if one is not None] for trace, own in figures.items()
            }
    standings = rank(found)
    print_standings(standings, chosen, seeds, failures)
    page = Board(standings, tuple(chosen), seeds, failures, shown_command())
    typer.echo(f"written: {write_leaderboard(page, out)[0]}")


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not name or names.count(name) > 1:
            raise ConfigError(f"expected names with commas between, each once, got {text!r}")
    return names


def print_standings(
    standings: Sequence[Standing], traces: Sequence[str], seeds: int, failures: dict[str, str]
) -> None:
    from rich.table import Table

    from dovetail_lab.leaderboard.standings import ALL, CONFIDENCE
    from dovetail_lab.report.leaderboard_page import score_text

    table = Table("group", "scheduler", ALL, *traces, box=None, pad_edge=False)
    for column in (table.columns[0], *table.columns[2:]):
        column.justify = "right"
    for standing in standings:
        scores = [standing.scores[trace] for trace in (ALL, *traces)]
        table.add_row(str(scores[0].group), standing.entry.name, *map(score_text, scores))
    console = wide_console()
    console.print(table)
    level = f"{100 * CONFIDENCE:g} %"
    console.print(
        f"per cent of requests in time, averaged over clients; {level} intervals over {seeds} "
        f"seeds; * not measurably worse than the best"
    )
    for name, why in failures.items():
        console.print(f"failed: {name}: {why}")
