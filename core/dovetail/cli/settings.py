"""Arguments that subcommands share, and loading a config with `--set` overrides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.api.component import KINDS
from dovetail.cli import completion

if TYPE_CHECKING:
    from dovetail.config.engine import EngineConfig

_SOURCE_HELP = "A config file, or a model: a bundled one, a directory or a hub id."
Source = Annotated[
    str,
    typer.Argument(
        metavar="[engine.yaml|MODEL]", help=_SOURCE_HELP, autocompletion=completion.sources
    ),
]
RequiredSource = Annotated[
    str,
    typer.Argument(
        metavar="engine.yaml|MODEL", help=_SOURCE_HELP, autocompletion=completion.sources
    ),
]
RequiredSources = Annotated[
    list[str],
    typer.Argument(
        metavar="engine.yaml|MODEL...",
        help=f"{_SOURCE_HELP} Several are served side by side.",
        autocompletion=completion.sources,
    ),
]
Settings = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a key, dotted if need be; the value is YAML. May be repeated.",
        autocompletion=completion.settings,
    ),
]
KindName = Annotated[
    str,
    typer.Argument(
        metavar="KIND",
        help=f"{', '.join(KINDS[:-1])} or {KINDS[-1]}.",
        autocompletion=completion.kinds,
    ),
]
TimeLimit = Annotated[
    float,
    typer.Option(
        "--time-limit",
        metavar="S",
        min=0.1,
        max=86_400,
        help="Seconds for each one; what it waits for a CPU that others have isn't counted.",
    ),
]
ComponentName = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help='A name, or "distribution:name".', autocompletion=completion.components
    ),
]


def load_config(source: str, settings: Sequence[str]) -> EngineConfig:
    """Return the config with `--set key=value`s on top. Raises `ConfigError`."""
    from dovetail.config.engine import EngineConfig

    return EngineConfig.load_with(source, EngineConfig.read_settings(settings), origin="--set")
