"""`dovetail lab`: commands by name, each imported when called."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from dovetail_lab.command_options import flat

COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {  # name -> "module:function", one line
        "run": (
            "dovetail_lab.run_command:run",
            "Replay a trace through an engine and print latencies and throughput",
        ),
        "compare": (
            "dovetail_lab.compare_command:compare",
            "Compare engines on the same requests, with confidence intervals",
        ),
        "sweep": (
            "dovetail_lab.sweep_command:sweep",
            "Run every combination of settings and arrival rates",
        ),
        "capacity": (
            "dovetail_lab.capacity_command:capacity",
            "Find the highest arrival rate that meets objectives",
        ),
        "tune": (
            "dovetail_lab.tune_command:tune",
            "Search a policy's options, and judge the gain on held-out requests",
        ),
        "calibrate": (
            "dovetail_lab.calibrate_command:calibrate",
            "Measure the step times of this machine's engine for simulations",
        ),
        "leaderboard": (
            "dovetail_lab.leaderboard_command:leaderboard",
            "Rank all installed schedulers on fixed traces",
        ),
        "report": (
            "dovetail_lab.report_command:report",
            "Render a report of saved runs: figures, tables, settings",
        ),
    }
)


class LabGroup(TyperGroup):
    """Lists commands without importing them."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return list(COMMANDS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        if cmd_name not in COMMANDS:
            return None
        summary = COMMANDS[cmd_name][1]
        return TyperCommand(cmd_name, help=summary, short_help=summary)

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        name, command, rest = super().resolve_command(ctx, args)
        return name, _load(name) if name is not None and name in COMMANDS else command, rest


def _load(name: str) -> Any:
    module, _, function = COMMANDS[name][0].partition(":")
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name=name)(flat(getattr(import_module(module), function)))
    return typer.main.get_command(app)


app = typer.Typer(
    cls=LabGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def lab() -> None:
    """Develop a scheduling policy on a laptop, validate it on a GPU."""
