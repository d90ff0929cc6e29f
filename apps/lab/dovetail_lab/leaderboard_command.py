"""`dovetail lab leaderboard`: every installed scheduler on fixed traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.errors import ConfigError
from dovetail_lab.experiment_options import Jobs, cores, need, shown_command, wide_console
from dovetail_lab.writing import make_folder

if TYPE_CHECKING:
    from dovetail_lab.leaderboard.board import Entry, Figures
    from dovetail_lab.leaderboard.results import Results
    from dovetail_lab.leaderboard.standings import Standing

TOLD_APART = 0.18  # share of requests in time: differences of which the output gives the seeds


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
    until_apart: Annotated[
        int | None,
        typer.Option(
            "--until-apart",
            metavar="N",
            help="Add seeds, up to N in all, until schedulers of a group are within 2 points.",
            show_default=False,
        ),
    ] = None,
    jobs: Jobs = None,
) -> None:
    """Rank all installed schedulers on fixed traces."""
    need("scipy", "matplotlib", "jinja2")
    from dovetail_lab.leaderboard import board
    from dovetail_lab.leaderboard.results import Results
    from dovetail_lab.leaderboard.standings import have_parted, rank, seeds_needed
    from dovetail_lab.report.leaderboard_page import Board, write_leaderboard

    if seeds < 2:
        raise ConfigError(f"--seeds: intervals need 2 or more, got {seeds}")
    if until_apart is not None and until_apart < seeds:
        raise ConfigError(f"--until-apart: expected --seeds ({seeds}) or more, got {until_apart}")
    chosen = board.TRACES if traces is None else _names(traces)
    for name in chosen:
        if name not in board.TRACES:
            raise ConfigError(
                f"--traces: there is no trace {name!r}; there are {', '.join(board.TRACES)}"
            )
    entries = board.entries(() if only is None else _names(only))
    make_folder(out)
    runs = _Runs(entries, chosen, Results(out), cores(jobs))
    done, planned = runs.make(range(seeds))
    if done:
        typer.echo(f"{done} of {planned} runs are in {out} already")
    while until_apart is not None and seeds < until_apart and not have_parted(runs.found(seeds)):
        runs.make(range(seeds, seeds + 1))
        seeds += 1
    found = runs.found(seeds)
    standings = rank(found)
    print_standings(standings, chosen, seeds, runs.failures)
    if len(found) > 1:
        points = 100 * TOLD_APART
        typer.echo(
            f"in a single trace, {seeds_needed(found, TOLD_APART)} seeds tell {points:g} points "
            f"apart"
        )
    page = Board(standings, tuple(chosen), seeds, runs.failures, shown_command())
    typer.echo(f"written: {write_leaderboard(page, out)[0]}")


@dataclass(slots=True)
class _Runs:
    """The runs of a board: made where they are missing, and kept in `results`."""

    entries: Sequence[Entry]
    traces: Sequence[str]
    results: Results
    jobs: int
    failures: dict[str, str] = field(default_factory=dict)  # scheduler -> the reason

    def make(self, seeds: range) -> tuple[int, int]:
        """Make the missing runs of some seeds. Returns how many were there, of how many."""
        from dovetail_lab.leaderboard.board import BoardRun
        from dovetail_lab.planned_runs import run_all, unchanged

        planned = [
            (entry, BoardRun(entry.name, trace, seed))
            for seed in seeds
            for trace in self.traces
            for entry in self.entries
        ]
        todo = [(entry, run) for entry, run in planned if self.results.of(entry, run) is None]
        made_runs = run_all([run for _, run in todo], unchanged, self.jobs, "leaderboard")
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

        runs = (self.results.of(entry, BoardRun(entry.name, trace, seed)) for seed in range(seeds))
        return [run for run in runs if run is not None]


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
