"""The command `dovetail batch`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.errors import ConfigError, shown

if TYPE_CHECKING:
    from dovetail_batch.open_job import Summary

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def batch() -> None:
    """Put a file of prompts through one engine or several, each row exactly once."""


@app.command()
def run(
    job: Annotated[
        str,
        typer.Argument(
            metavar="job.yaml",
            help="The job: `engine`, `input`, `output` and what docs/batch.md lists.",
        ),
    ],
    anew: Annotated[
        bool,
        typer.Option(
            "--anew",
            help="Delete the answers that are in the output folder, and begin with the first row.",
        ),
    ] = False,
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="ray",
            help="Where the engines run: `ray` is a cluster of Ray. Default: here.",
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            help="The cluster's address, such as 10.0.0.5:6379; `auto`: that of this machine's. "
            "Default: RAY_ADDRESS.",
        ),
    ] = None,
) -> None:
    """Run a job, or go on with it where it was interrupted.

    The exit code is 0 when every row has its answer, or says in `error` why it has none.
    """
    from dovetail_batch.job import load_plan

    run_job = _runner(on, address)
    plan = load_plan(job)
    try:
        _print_summary(plan.job.output.path, run_job(plan, anew=anew))
    except KeyboardInterrupt:
        typer.echo(
            f"interrupted: what is computed is in {plan.job.output.path}, and the same command "
            f"goes on with the job",
            err=True,
        )
        raise


def _runner(on: str | None, address: str | None) -> Callable[..., Summary]:
    """Return the function that runs a job there. Raises `ConfigError` for an unknown place."""
    if on is None:
        if address is not None:
            raise ConfigError(
                "--address: it belongs to --on ray: without that, engines run on this machine"
            )
        from dovetail_batch.runner import run

        return run
    if on != "ray":
        raise ConfigError(
            f"--on: expected ray, got {shown(on)}; without it, engines run on this machine"
        )
    # by name: batch doesn't depend on cluster
    return partial(resolve_name("dovetail_cluster.ray_jobs:run"), address=address)


def _print_summary(path: str, summary: Summary) -> None:
    """Print the result of a run."""
    if summary.earlier == summary.rows:
        typer.echo(f"{path}: {_rows(summary.rows)}, all of them computed before")
        return
    earlier = f", {summary.earlier:,} of them before" if summary.earlier else ""
    typer.echo(f"{path}: {_rows(summary.rows)}{earlier}")
    speed = (
        f"{summary.output_tokens:,} tokens in {summary.seconds:.1f} s: "
        f"{summary.tokens_per_s:,.0f} tok/s"
    )
    typer.echo(f"computed now: {_rows(summary.rows - summary.earlier)}, {speed}")
    if summary.failed:
        more = "; …" if summary.failed > len(summary.failures) else ""
        typer.echo(
            f"failed: {_rows(summary.failed)}; `error` says why: "
            f"{'; '.join(summary.failures)}{more}"
        )


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"
