"""`dovetail lab report`: a page of runs that were made before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.errors import ConfigError
from dovetail_lab.experiment_options import need, shown_command
from dovetail_lab.writing import make_folder

if TYPE_CHECKING:
    from dovetail_lab.compare import Comparison
    from dovetail_lab.records import RunResult


def report(
    files: Annotated[list[Path], typer.Argument(metavar="run.json …", help="Runs, as `dovetail lab run --out` writes them.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where to write report.html, its figures and tables.")],
) -> None:
    """Make a report of runs; runs of the same requests under several policies are compared."""
    need("scipy", "matplotlib", "jinja2")
    from dovetail_lab.records import RunResult
    from dovetail_lab.report.page import Report, write_report

    runs = by_policy([(file, RunResult.load(file)) for file in files])
    make_folder(out)
    first = next(iter(runs.values()))[0]
    written = write_report(Report(f"{', '.join(runs)} on {first.trace}", shown_command(), runs, _comparison(runs)), out)
    typer.echo(f"written: {written[0]}")


def by_policy(loaded: list[tuple[Path, RunResult]]) -> dict[str, list[RunResult]]:
    """Runs under the names that they have, by seed; under their files' where that isn't one run a seed. Raises `ConfigError` for a file twice."""
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
    """None, with the reason said, where there is nothing to pair."""
    from dovetail_lab.compare import compare

    if len(runs) < 2:
        return None
    try:
        return compare(runs)
    except ConfigError as error:
        typer.echo(f"not compared: {error}")
        return None
