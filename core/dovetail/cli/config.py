"""`dovetail config`: what a config means, whether it is right, and its JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import typer

from dovetail.cli.settings import Settings, Source, load_config
from dovetail.cli.streams import tell
from dovetail.errors import DovetailError, MissingExtraError

if TYPE_CHECKING:
    from dovetail.config import EngineConfig
    from dovetail.parts import Parts
    from dovetail.registry.registry import Registry
    from dovetail.registry.resolved import ResolvedComponent

app = typer.Typer(no_args_is_help=True, help="What a config means, and whether it is right.", rich_markup_mode=None)

DEFAULT_MODEL = "demo"


@app.command()
def show(source: Source = DEFAULT_MODEL, settings: Settings = []) -> None:  # noqa: B006 typer makes a list of its own
    """Print what would run: every key, with qualified names, versions and all options. The output is a config itself."""
    from dovetail.config import COMPONENT_KEYS
    from dovetail.parts import find_parts
    from dovetail.registry.models import locate_model
    from dovetail.registry.registry import Registry

    config = load_config(source, settings)
    registry = Registry.discover(config.plugins)
    parts = find_parts(config, registry)
    notes = {"model": str(locate_model(config.model, registry))}
    values = config.model_dump(mode="json")
    for key in COMPONENT_KEYS:
        values[key], notes[key] = _describe(key, parts)
    for key, value in values.items():
        note = f"  # {notes[key]}" if notes.get(key) else ""
        typer.echo(_yaml_line(key, value) + note)


def _describe(key: str, parts: Parts) -> tuple[Any, str]:
    """A component key's value in full, and who offers it."""
    if key == "observers":
        return [_in_full(part) for part in parts.observers], ", ".join(f"{part.distribution} {part.version}" for part in parts.observers)
    part = getattr(parts, key)
    if key == "attention":
        if len(part) != 1:
            return "auto", "the first without a reason against it: " + (", ".join(f"{p.qualified_name} {p.version}" for p in part) or "none")
        part = part[0]
    return _in_full(part), f"{part.distribution} {part.version}"


def _in_full(part: ResolvedComponent) -> Any:
    options = part.validate_options().model_dump(mode="json")
    return {"name": part.qualified_name, **options} if options else part.qualified_name


def _yaml_line(key: str, value: Any) -> str:
    import yaml

    in_a_list = yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=float("inf"), allow_unicode=True)
    return f"{key}: {in_a_list.strip()[1:-1]}"


@app.command()
def schema() -> None:
    """Print the JSON Schema of engine.yaml for editors, with the components that are installed and their options."""
    from dovetail.config_schema import json_schema
    from dovetail.registry.registry import Registry

    typer.echo(json.dumps(json_schema(Registry.discover(enforce_require=False)), indent=2))


@app.command()
def check(source: Source = DEFAULT_MODEL, settings: Settings = []) -> None:  # noqa: B006
    """Check everything short of loading a model: keys, names, options, and that what is named can be imported."""
    from dovetail.registry.registry import Registry

    config = load_config(source, settings)
    problems = _problems(config, Registry.discover(config.plugins))
    for problem in problems:
        tell(f"error: {problem}")
    if problems:
        raise typer.Exit(2)
    typer.echo(f"{source}: ok")


def _problems(config: EngineConfig, registry: Registry) -> list[str]:
    """One text for each thing that is wrong."""
    from dovetail.config import COMPONENT_KEYS
    from dovetail.registry.models import locate_model

    problems: list[str] = []

    @contextmanager
    def noted() -> Iterator[None]:
        try:
            yield
        except DovetailError as error:
            problems.append(str(error))

    with noted():
        locate_model(config.model, registry)
    with noted():
        for part in config.attention_candidates(registry):
            _check_part(part, noted)
    for key, kind in COMPONENT_KEYS.items():
        if key == "attention":
            continue
        for choice in config.observers if key == "observers" else (getattr(config, key),):
            with noted():
                _check_part(registry.resolve(kind, choice.name, choice.options, choice.where), noted)
    return problems


def _check_part(part: ResolvedComponent, noted: Callable[[], AbstractContextManager[None]]) -> None:
    """Its options, and that it can be imported. An executor may do without sampler and attention (a simulation does), so what these lack is
    only said."""
    with noted():
        part.validate_options()
    with noted():
        try:
            part.load()
        except MissingExtraError as error:
            if part.spec.kind not in ("sampler", "attention"):
                raise
            tell(f"note: {error}")
