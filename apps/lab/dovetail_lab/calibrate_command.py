"""`dovetail lab calibrate`: measure step times of this machine's engine as a profile for the
executor `simulated`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dovetail import EngineConfig
from dovetail.errors import ConfigError
from dovetail_lab.command_options import Engine, Settings, open_engine, progress_bar
from dovetail_lab.writing import make_folder


def calibrate(
    engine: Engine,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE.json", help="Where to write the profile.")
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure a tiny grid, as a smoke test.")
    ] = False,
    time_limit: Annotated[
        float,
        typer.Option(
            "--time-limit",
            min=1.0,
            metavar="SECONDS",
            help="Time limit, without the engine's start.",
        ),
    ] = 60.0,
    settings: Settings = [],  # noqa: B006 typer makes a list of its own
) -> None:
    """Measure the step times of this machine's engine for simulations."""
    if out.suffix != ".json":
        raise ConfigError(f"--out: expected a .json file, got {out}")
    from dovetail_lab.simulate import is_simulated

    own = EngineConfig.load(engine)
    if is_simulated(own):
        raise ConfigError(
            f"{engine}: the executor {own.executor.label} simulates a device and can't be "
            f"calibrated: choose a real one, such as local"
        )
    config = open_engine(engine, settings, real=True)
    make_folder(out.parent)
    from dovetail_lab.calibrate import calibrate as measure

    with progress_bar("calibrating", unit="cells") as progress:
        made = measure(
            config, name=out.stem, quick=quick, time_limit_s=time_limit, progress=progress
        )
    profile = made.profile
    profile.save(out)
    typer.echo(f"{profile.machine}: {profile.model}, {profile.engine}")
    typer.echo(f"off by {profile.error:.1%} on average ({profile.judged_on})")
    for note in profile.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"written: {out}")
