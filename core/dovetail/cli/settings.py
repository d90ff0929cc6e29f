"""What several subcommands share: reading a config with `--set`s, and printing tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dovetail.config import EngineConfig

Source = Annotated[str, typer.Argument(metavar="[engine.yaml|MODEL]", help="A config file, or a model: a bundled one, a directory or a hub id.")]
Settings = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set a key, dotted if need be; the value is YAML. May be repeated.")]


def load_config(source: str, settings: Sequence[str]) -> EngineConfig:
    """The config with `--set key=value`s on top. Raises `ConfigError`."""
    from dovetail.config import EngineConfig

    return EngineConfig.load_with(source, EngineConfig.read_settings(settings), origin="--set")


def print_table(rows: Sequence[Sequence[str]], indent: str = "") -> None:
    """Columns as wide as their widest cell; the last isn't padded."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        typer.echo((indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip())
