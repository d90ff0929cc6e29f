"""`dovetail lab report`: render a report of saved runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.errors import ConfigError
from dovetail_lab.experiment_options import need, shown_command
from dovetail_lab.writing import make_folder

if TYPE_CHECKING:
    from dovetail_lab.records import RunResult
    from dovetail_lab.verdict import Comparison


def report(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="run.json …", help="Runs written by `dovetail lab run --out`."),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="DIR", help="Where to write report.html, its figures and tables."
        ),
    ],
) -> None:
    """Create a report of runs; runs of the same requests under several policies are compared."""
    need("scipy", "matplotlib", "jinja2")
    from dovetail_lab.records import RunResult
    from dovetail_lab.report.page import Report, write_report

    runs = by_policy([(file, RunResult.load(file)) for file in files])
    make_folder(out)
    first = next(iter(runs.values()))[0]
    written = write_report(
        Report(f"{', '.join(runs)} on {first.trace}", shown_command(), runs, _comparison(runs)), out
    )
    typer.echo(f"written: {written[0]}")


def by_policy(loaded: list[tuple[Path, RunResult]]) -> dict[str, list[RunResult]]:
    """Group runs by name, ordered by seed; by file path if a name has two runs with one seed.
    Raises `ConfigError` for duplicate files."""
    paths = [path for path, _ in loaded]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"{path} is given twice")
    keys = [(run.name, run.seed) for _, run in loaded]
    named = len(set(keys)) == len(keys)
    runs: dict[str, list[RunResult]] = {}
    for path, run in loaded:
        runs.setdefault(run.name if named else str(path), []).append(run)
    return {name: sorted(of_policy, key=lambda run: run.seed) for name, of_policy in runs.items()}


def _comparison(runs: dict[str, list[RunResult]]) -> Comparison | None:
    """Return the comparison, or print why the runs can't be paired and return None."""
    from dovetail_lab.compare import compare

    if len(runs) < 2:
        return None
    try:
        return compare(runs)
    except ConfigError as error:
        typer.echo(f"not compared: {error}")
        return None
