"""Options of commands that make many runs: the numbers of seeds and processes, and the folder for
results."""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from rich.console import Console

Seeds = Annotated[
    int,
    typer.Option(
        "--seeds",
        metavar="N",
        help="Number of runs per engine, with consecutive seeds from --seed.",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        metavar="N",
        help="Number of processes; doesn't affect results.  [default: one per core]",
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Where to write the results.")
]

Budget = Annotated[
    float,
    typer.Option(
        "--budget", metavar="SECONDS", help="Time after which --until adds no more seeds."
    ),
]

_OF_NO_CONSEQUENCE = ("--out", "--jobs")  # options that don't affect results


def need(*packages: str) -> None:
    """Check for modules of the extra `lab` before hours of simulation. Raises `MissingExtraError`
    with the pip line."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise MissingExtraError.naming("lab", f"this needs {', '.join(missing)}")


def seeds_from(first: int, count: int) -> range:
    """Return `count` seeds from `first` on. Raises `ConfigError` if `count` is less than 1."""
    if count < 1:
        raise ConfigError(f"--seeds: expected 1 or more, got {count}")
    return range(first, first + count)


def cores(jobs: int | None) -> int:
    """Return the number of processes. Raises `ConfigError` if it is less than 1."""
    if jobs is not None and jobs < 1:
        raise ConfigError(f"--jobs: expected 1 or more, got {jobs}")
    return jobs or os.cpu_count() or 1


class TimeBudget:
    """Wall-time budget of a sequential study."""

    def __init__(self, seconds: float) -> None:
        """Start the time. Raises `ConfigError` unless `seconds` is positive and finite."""
        if not 0 < seconds < math.inf:
            raise ConfigError(f"--budget: expected seconds above 0, got {seconds:g}")
        self._seconds = seconds
        self._begun = time.monotonic()

    def allows(self, more: int, done: int) -> int:
        """Return how many of `more` further units fit into the rest, at the mean time of the `done`
        units since the start; if `done` is 0, one while there is time."""
        used = time.monotonic() - self._begun
        left = max(0.0, self._seconds - used)
        return int(min(more, left * done / used)) if done and used else int(left > 0)


def wide_console() -> Console:
    """Return a console for tables that a narrow terminal must not truncate; the terminal wraps the
    lines."""
    from rich.console import Console

    return Console(width=1_000, highlight=False, soft_wrap=True, markup=False)


def shown_command() -> str:
    """Return this process's command line for a report, without options that don't affect results,
    so that equal results give equal reports."""
    kept = []
    arguments = iter(sys.argv[1:])
    for argument in arguments:
        if argument in _OF_NO_CONSEQUENCE:
            next(arguments, None)
        elif not argument.startswith(tuple(f"{option}=" for option in _OF_NO_CONSEQUENCE)):
            kept.append(argument)
    return shlex.join(["dovetail", *kept])
