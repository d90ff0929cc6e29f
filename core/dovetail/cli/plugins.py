"""`dovetail plugins`: list installed components, and failed plugins with the reason."""

from __future__ import annotations

import dataclasses
import json
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from dovetail.cli import plugins_contract, plugins_doctor, plugins_new, plugins_test
from dovetail.cli.settings import ComponentName, KindName
from dovetail.cli.streams import print_table
from dovetail.errors import DovetailError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from dovetail.registry.plugin import PluginFailure
    from dovetail.registry.registry import Registry
    from dovetail.registry.resolved import ResolvedCommand, ResolvedComponent

app = typer.Typer(
    no_args_is_help=True, help="What is installed, and what failed.", rich_markup_mode=None
)
app.command(name="new")(plugins_new.new)
app.command(name="test")(plugins_test.run_suite)
app.command(name="doctor")(plugins_doctor.doctor)
app.command(name="contract")(plugins_contract.contract)


@app.command(name="list")
def list_plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    failed: Annotated[
        bool, typer.Option("--failed", help="Only plugins that failed, with traceback and output.")
    ] = False,
) -> None:
    """List components, commands, routes, routers and quantizations of all plugins, and the plugins
    that failed or were denied."""
    from dovetail.registry.registry import Registry

    registry = Registry.discover(enforce_require=False)
    if as_json:
        typer.echo(json.dumps(_as_json(registry, failed), indent=2))
        return
    if failed:
        for failure in registry.failures:
            _print_failure(failure)
        if not registry.failures:
            typer.echo("no plugin failed")
        return
    rows = [("KIND", "NAME", "FROM", "SUMMARY")]
    rows += [
        (c.spec.kind, _name(c, registry), f"{c.plugin_id} {c.version}", _summary(c))
        for c in registry.components()
    ]
    rows += [
        ("command", _name(command, registry), str(command.origin), command.spec.summary)
        for command in registry.commands()
    ]
    rows += [
        ("routes", routes.qualified_name, str(routes.origin), routes.spec.summary)
        for routes in registry.routes()
    ]
    rows += [
        ("router", router.qualified_name, str(router.origin), router.spec.summary)
        for router in registry.routers()
    ]
    rows += [
        ("quantization", known.spec.name, str(known.origin), known.spec.summary)
        for known in registry.quantizations()
    ]
    rows += [
        ("bundled model", model.name, str(plugin.origin), "")
        for plugin in registry.plugins
        for model in plugin.models
    ]
    print_table(rows, headed=True)
    for title, missing in (("failed", registry.failures), ("denied", registry.denied)):
        if missing:
            typer.echo(f"\n{len(missing)} {title}:")
            for plugin in missing:
                typer.echo(f"  {plugin}")
    if registry.failures:
        typer.echo("`dovetail plugins list --failed` shows more.")


@app.command()
def info(
    kind: KindName,
    name: ComponentName,
) -> None:
    """Show one component: its options, its capabilities, and where it comes from."""
    from dovetail.base.where import Where
    from dovetail.registry.registry import Registry
    from dovetail.registry.requirements import missing_requirements

    plugins_test.check_is_kind(kind)
    registry = Registry.discover(enforce_require=False)
    component = registry.resolve(kind, name, where=Where(("plugins info",)))  # type: ignore[arg-type]
    spec = component.spec
    missing = {str(lack.requirement): str(lack) for lack in missing_requirements(spec.requires)}
    typer.echo(f"{spec.kind} {component.qualified_name} {component.version}")
    if spec.summary:
        typer.echo(f"  {spec.summary}")
    facts = [("plugin", component.plugin_id), ("api", spec.api), ("target", spec.target)]
    facts += (
        [("requires", ", ".join(missing.get(text, text) for text in spec.requires))]
        if spec.requires
        else []
    )
    facts += [("architectures", ", ".join(spec.architectures))] if spec.architectures else []
    facts += (
        [("quantizations", ", ".join(known.spec.name for known in registry.quantizations()))]
        if spec.kind == "model"
        else []
    )
    facts += _capabilities(component)
    print_table(facts, indent="  ")
    _print_fields("options", component.options_model)
    if spec.kind == "logits_processor":
        _print_fields("arguments of requests", lambda: component.load().Arguments)


def _capabilities(component: ResolvedComponent) -> list[tuple[str, str]]:
    try:
        value = getattr(component.load(), "capabilities", None)
    except DovetailError as error:
        return [("capabilities", f"unknown: {error}")]
    if value is None:
        return []  # a drafter has none
    return [
        (f"capabilities.{field.name}", str(getattr(value, field.name)))
        for field in dataclasses.fields(value)
    ]


def _print_fields(title: str, model: Callable[[], type[BaseModel]]) -> None:
    typer.echo(f"{title}:")
    try:
        fields = model().model_fields
    except DovetailError as error:
        typer.echo(f"  unknown: {error}")
        return
    if not fields:
        typer.echo("  none")
        return
    rows = [("NAME", "TYPE", "DEFAULT", "DESCRIPTION")]
    for name, field in fields.items():
        default = (
            "required"
            if field.is_required()
            else repr(field.get_default(call_default_factory=True, validated_data={}))
        )
        rows.append(
            (
                field.alias or name,
                _type_name(field.annotation),
                default,
                " ".join((field.description or "").split()),
            )
        )
    print_table(rows, indent="  ", headed=True)


def _type_name(annotation: Any) -> str:
    def field() -> None: ...

    field.__annotations__["type"] = annotation
    annotation = get_type_hints(field)["type"]  # without `Annotated`, also inside
    plain = isinstance(annotation, type) and not getattr(annotation, "__args__", None)
    return annotation.__name__ if plain else str(annotation).replace("typing.", "")


def _name(offer: ResolvedComponent | ResolvedCommand, registry: Registry) -> str:
    """Return the name that a config or a command line must use."""
    return offer.qualified_name if registry.needs_full_name(offer) else offer.spec.name


def _summary(component: ResolvedComponent) -> str:
    problem = component.api_problem()
    return component.spec.summary if problem is None else f"CAN'T BE USED: {problem}"


def _print_failure(failure: PluginFailure) -> None:
    typer.echo(f"{failure.origin} failed, phase {failure.phase!r}:")
    lines = "".join(traceback.format_exception(failure.error)).splitlines()
    typer.echo("\n".join(f"  {line}" for line in lines))
    if failure.output:
        typer.echo("  its output:")
        typer.echo("\n".join(f"    {line}" for line in failure.output.splitlines()))


def _as_json(registry: Registry, failed: bool) -> dict[str, Any]:
    failures = [
        {
            **_origin(f.origin),
            "phase": f.phase,
            "error": type(f.error).__name__,
            "message": str(f.error),
            "output": f.output,
        }
        for f in registry.failures
    ]
    if failed:
        return {"failures": failures}
    components = [
        {
            **_origin(c.origin),
            "kind": c.spec.kind,
            "name": c.spec.name,
            "qualified_name": c.qualified_name,
            "api": c.spec.api,
            "summary": c.spec.summary,
            "ambiguous": registry.needs_full_name(c),
            "problem": c.api_problem(),
        }
        for c in registry.components()
    ]
    commands = [
        {**_origin(c.origin), "name": c.spec.name, "summary": c.spec.summary}
        for c in registry.commands()
    ]
    models = [
        {**_origin(plugin.origin), "name": model.name}
        for plugin in registry.plugins
        for model in plugin.models
    ]
    quantizations = [
        {**_origin(q.origin), "name": q.spec.name, "summary": q.spec.summary}
        for q in registry.quantizations()
    ]
    routes = [
        {
            **_origin(r.origin),
            "name": r.spec.name,
            "qualified_name": r.qualified_name,
            "summary": r.spec.summary,
        }
        for r in registry.routes()
    ]
    routers = [
        {
            **_origin(r.origin),
            "name": r.spec.name,
            "qualified_name": r.qualified_name,
            "summary": r.spec.summary,
        }
        for r in registry.routers()
    ]
    denied = [{**_origin(d.origin), "reason": d.reason} for d in registry.denied]
    return {
        "components": components,
        "commands": commands,
        "models": models,
        "quantizations": quantizations,
        "routes": routes,
        "routers": routers,
        "failures": failures,
        "denied": denied,
    }


def _origin(origin: Any) -> dict[str, str]:
    return {"plugin": origin.id, "distribution": origin.distribution, "version": origin.version}
