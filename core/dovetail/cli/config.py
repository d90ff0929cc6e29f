"""`dovetail config`: show a config in full, check it, and print its JSON Schema."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from dovetail.cli.settings import Settings, Source
from dovetail.cli.streams import tell
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from dovetail.config.parts import Parts
    from dovetail.errors import DovetailError

app = typer.Typer(no_args_is_help=True, help="Show and validate configs.", rich_markup_mode=None)

DEFAULT_MODEL = "demo"


@app.command()
def show(source: Source = DEFAULT_MODEL, settings: Settings = []) -> None:  # noqa: B006 typer makes a list of its own
    """Print what would run: every key, with qualified names, versions and all options. The output
    is a config itself."""
    from dovetail.config.engine import COMPONENT_KEYS, EngineConfig
    from dovetail.config.parts import read_parts
    from dovetail.registry.models import locate_model

    config, registry, parts = read_parts(
        source, EngineConfig.read_settings(settings), origin="--set"
    )
    notes = {"model": str(locate_model(config.model.path, registry))}
    for key in COMPONENT_KEYS:
        notes[key.partition(".")[0]] = _offered_by(key, parts)
    for key, value in config.in_full(registry).items():
        note = f"  # {notes[key]}" if notes.get(key) else ""
        typer.echo(_yaml_line(key, value) + note)


def _offered_by(key: str, parts: Parts) -> str:
    """Return which plugin offers a component key's value."""
    from dovetail.config.engine import LISTS

    if key in LISTS:
        return ", ".join(f"{part.distribution} {part.version}" for part in getattr(parts, key))
    if key == "speculation.drafter":
        return (
            "" if parts.drafter is None else f"{parts.drafter.distribution} {parts.drafter.version}"
        )
    part = getattr(parts, key)
    if key == "tokenizer" and part is None:
        return ""
    if key == "attention":
        if len(part) != 1:
            return "the first without a reason against it: " + (
                ", ".join(f"{p.qualified_name} {p.version}" for p in part) or "none"
            )
        part = part[0]
    return "none is there" if part is None else f"{part.distribution} {part.version}"


def _yaml_line(key: str, value: Any) -> str:
    import yaml

    in_a_list = yaml.safe_dump(
        [value], default_flow_style=True, sort_keys=False, width=float("inf"), allow_unicode=True
    )
    return f"{key}: {in_a_list.strip()[1:-1]}"


@app.command()
def schema() -> None:
    """Print the JSON Schema of engine.yaml for editors, with the components that are installed and
    their options."""
    from dovetail.config.schema import json_schema
    from dovetail.registry.registry import Registry

    typer.echo(json.dumps(json_schema(Registry.discover(enforce_require=False)), indent=2))


@app.command()
def check(source: Source = DEFAULT_MODEL, settings: Settings = []) -> None:  # noqa: B006
    """Check everything short of loading a model: keys, names, options, and that what is named can
    be imported."""
    from dovetail.base.where import LISTED, and_more
    from dovetail.config.engine import EngineConfig
    from dovetail.config.parts import find_problems
    from dovetail.registry.registry import Registry

    config, wrong = EngineConfig.load_what_is_right(
        source, EngineConfig.read_settings(settings), origin="--set"
    )
    problems: list[DovetailError] = [wrong] if wrong else []
    if config is not None:
        try:
            problems += find_problems(
                config, Registry.discover(config.plugins), note=lambda lack: tell(f"note: {lack}")
            )
        except ConfigError as unmet:  # plugins.require
            problems.append(unmet)
    for problem in problems[:LISTED]:
        tell(f"error: {problem}")
    for line in and_more(len(problems)):
        tell(line)
    if problems:
        raise typer.Exit(2)
    typer.echo(f"{source}: ok")
