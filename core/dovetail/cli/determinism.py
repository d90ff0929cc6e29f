"""`dovetail doctor determinism`: try deterministic requests on a model and device."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from dovetail.cli.settings import RequiredSource, Settings, load_config
from dovetail.cli.streams import tell

app = typer.Typer(help="Try what an engine promises, on this machine.", no_args_is_help=True)


@app.callback()
def doctor() -> None:
    """Try what an engine promises, on this machine."""


@app.command()
def determinism(
    source: RequiredSource,
    settings: Settings = [],  # noqa: B006 typer makes a list of its own
    schedules: Annotated[int, typer.Option(min=1, max=1_000_000, help="Random schedules.")] = 50,
    seed: Annotated[int, typer.Option(help="Of the schedules.")] = 0,
) -> None:
    """Serve deterministic requests in random company, and compare each bit with what the same
    request gets alone. Exits with 1 if any differs."""
    config = load_config(source, settings)
    from dovetail.front.determinism import trials
    from dovetail.front.llm_engine import LLMEngine

    compared = 0
    different = 0
    with closing(LLMEngine.from_config(config)) as engine:
        for number, trial in enumerate(trials(engine, schedules, seed)):
            compared += trial.compared
            different += len(trial.different)
            for one in trial.different:
                tell(
                    f"schedule {number}: other bits than alone: {len(one.prompt)} prompt tokens, "
                    f"seed {one.params.seed}, temperature {one.params.temperature}"
                )
    typer.echo(f"{schedules} schedules, {compared} requests compared, {different} different")
    if different:
        raise typer.Exit(1)
