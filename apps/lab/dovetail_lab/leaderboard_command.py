"""`dovetail lab leaderboard`: every installed scheduler on fixed traces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.errors import ConfigError
from dovetail_lab.experiment_options import (
    Budget,
    Jobs,
    TimeBudget,
    cores,
    need,
    shown_command,
    wide_console,
)
from dovetail_lab.writing import make_folder

if TYPE_CHECKING:
    from dovetail_lab.leaderboard.board import Entry, Figures
    from dovetail_lab.leaderboard.results import Results
    from dovetail_lab.leaderboard.standings import Lead, Standing
    from dovetail_lab.planned_runs import Workers


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
    until: Annotated[
        float | None,
        typer.Option(
            "--until",
            metavar="POINTS",
            help="Add seeds until neighbours are told apart, or proven to be within these points.",
        ),
    ] = None,
    budget: Budget = 600.0,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests", metavar="N", help="Only the first N of each trace.  [default: all]"
        ),
    ] = None,
    jobs: Jobs = None,
) -> None:
    """Rank all installed schedulers on fixed traces."""
    need("scipy", "matplotlib", "jinja2")
    from dovetail_lab.leaderboard import board
    from dovetail_lab.leaderboard.results import Results
    from dovetail_lab.leaderboard.standings import leads, rank
    from dovetail_lab.planned_runs import Workers
    from dovetail_lab.report.leaderboard_page import Board, write_leaderboard

    if seeds < 2:
        raise ConfigError(f"--seeds: intervals need 2 or more, got {seeds}")
    if requests is not None and requests < 1:
        raise ConfigError(f"--requests: expected 1 or more, got {requests}")
    if until is not None and not 0 < until < 100:
        raise ConfigError(f"--until: expected points between 0 and 100, got {until:g}")
    rest = TimeBudget(budget)
    chosen = board.TRACES if traces is None else _names(traces, "--traces")
    for name in chosen:
        if name not in board.TRACES:
            raise ConfigError(
                f"--traces: there is no trace {name!r}; there are {', '.join(board.TRACES)}"
            )
    entries = board.entries(() if only is None else _names(only, "--only"))
    make_folder(out)
    with Workers(cores(jobs)) as workers:
        runs = _Runs(entries, chosen, Results(out), workers, requests)
        done, planned = runs.make(range(seeds))
        if done:
            typer.echo(f"{done} of {planned} runs are in {out} already")
        made = 0 if done else seeds
        while until is not None and rest.allows(1, made):
            if not any(lead.is_open(until / 100) for lead in leads(runs.found(seeds))):
                break
            there, _ = runs.make(range(seeds, seeds + 1))
            seeds += 1
            made += not there
    found = runs.found(seeds)
    standings = rank(found)
    print_standings(standings, chosen, seeds, runs.failures)
    print_leads(leads(found), until)
    page = Board(standings, tuple(chosen), seeds, runs.failures, shown_command(), requests)
    typer.echo(f"written: {write_leaderboard(page, out)[0]}")


def print_leads(leads: Sequence[Lead], points: float | None) -> None:
    """Print by how much each scheduler leads the next, and what is still open."""
    for lead in leads:
        said = f"{lead.name} leads {lead.next} by {100 * lead.mean:.1f} ±{100 * lead.half:.1f}"
        if lead.same:
            typer.echo(f"{lead.name} and {lead.next} are the same on these requests")
        elif lead.apart:
            typer.echo(f"{said}: apart")
        elif points is not None and lead.within(points / 100):
            typer.echo(f"{said}: within {points:g} points")
        else:
            typer.echo(f"{said}: open{_decided_after(lead, points)}")


def _decided_after(lead: Lead, points: float | None) -> str:
    """Return after how many seeds the lead is decided, one way or the other; empty for very
    many."""
    within = math.inf if points is None else lead.seeds_within(points / 100)
    seeds = min(lead.seeds, within)
    if math.isinf(seeds):
        return ""
    outcome = f"within {points:g} points" if within < lead.seeds else "apart"
    return f"; {outcome} after {seeds:,} seeds, if the lead stays"


@dataclass(slots=True)
class _Runs:
    """The runs of a board: made where they are missing, and kept in `results`."""

    entries: Sequence[Entry]
    traces: Sequence[str]
    results: Results
    workers: Workers
    requests: int | None  # the first of each trace; None: all
    failures: dict[str, str] = field(default_factory=dict)  # scheduler -> the reason

    def make(self, seeds: range) -> tuple[int, int]:
        """Make the missing runs of some seeds. Returns how many were there, of how many."""
        from dovetail_lab.leaderboard.board import BoardRun
        from dovetail_lab.planned_runs import unchanged

        planned = [
            (entry, BoardRun(entry.name, trace, seed, self.requests))
            for seed in seeds
            for trace in self.traces
            for entry in self.entries
        ]
        todo = [(entry, run) for entry, run in planned if self.results.of(entry, run) is None]
        made_runs = self.workers.run_all([run for _, run in todo], unchanged, "leaderboard")
        for (entry, run), made in zip(todo, made_runs, strict=True):
            if isinstance(made, str):
                self.failures.setdefault(entry.name, f"{run.trace}, seed {run.seed}: {made}")
            else:
                self.results.add(entry, run, made)
        return len(planned) - len(todo), len(planned)

    def found(self, seeds: int) -> dict[Entry, dict[str, list[Figures]]]:
        """Return the runs of seeds 0 to `seeds` - 1, of schedulers that haven't failed."""
        return {
            entry: {trace: self._of_trace(entry, trace, seeds) for trace in self.traces}
            for entry in self.entries
            if entry.name not in self.failures
        }

    def _of_trace(self, entry: Entry, trace: str, seeds: int) -> list[Figures]:
        from dovetail_lab.leaderboard.board import BoardRun

        runs = (
            self.results.of(entry, BoardRun(entry.name, trace, seed, self.requests))
            for seed in range(seeds)
        )
        return [run for run in runs if run is not None]


def _names(text: str, option: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not name or names.count(name) > 1:
            raise ConfigError(
                f"{option}: expected names with commas between, each once, got {text!r}"
            )
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
