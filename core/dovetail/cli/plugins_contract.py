"""`dovetail plugins contract`: print the interfaces, or what changed between two versions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dovetail.registry.contract.document import Contract


def contract(
    kind: Annotated[
        str | None,
        typer.Option("--kind", help="Only this kind, or `hooks` or `routes`.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--diff",
            metavar="OLD NEW",
            help="What NEW adds, changes and removes; each is a version or a contract.json.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print what plugins implement and may rely on, by kind: names, signatures, capabilities,
    clauses and checks. With --diff, the exit code is 1 if packages for OLD don't run on NEW."""
    from dovetail.registry.contract.document import shipped

    if diff is not None:
        raise typer.Exit(_print_diff(*diff, kind, as_json))
    chosen = shipped() if kind is None else _of_kind(shipped(), kind)
    typer.echo(chosen.to_json() if as_json else "\n".join(_lines(chosen)), nl=not as_json)


def _of_kind(whole: Contract, kind: str) -> Contract:
    """Return the part of a contract that concerns one kind: its modules, and those it uses; or one
    extension."""
    from dovetail.base.where import did_you_mean
    from dovetail.errors import PluginError

    if kind in whole.extensions:
        return _of_extension(whole, kind)
    if kind not in whole.kinds:
        raise PluginError(
            f"unknown kind {kind!r}{did_you_mean(kind, whole.versions)}; kinds are "
            f"{', '.join(whole.kinds)}, and there are {', '.join(whole.extensions)}"
        )
    one = whole.kinds[kind]
    names = {f"dovetail.api.{kind}", *(used.partition(":")[0] for used in one.uses)}
    modules = {name: module for name, module in whole.modules.items() if name in names}
    return whole.model_copy(
        update={
            "version": one.version,
            "kinds": {kind: one},
            "modules": modules,
            "extensions": {},
        }
    )


def _of_extension(whole: Contract, name: str) -> Contract:
    one = whole.extensions[name]
    return whole.model_copy(
        update={
            "version": one.version,
            "kinds": {},
            "extensions": {name: one},
            "modules": {module: whole.modules[module] for module in one.modules},
            "clauses": whole.clauses if name == "hooks" else {},
            "checks": {},
        }
    )


def _print_diff(old: str, new: str, kind: str | None, as_json: bool) -> int:
    import dataclasses
    import json

    from dovetail.registry.contract.diff import changes_between

    before, after = (_read(one) for one in (old, new))
    if kind is not None:
        before, after = (_of_kind(one, kind) for one in (before, after))
    changes = changes_between(before, after)
    breaking = [change for change in changes if not change.additive]
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(change) for change in changes], indent=2))
    else:
        for change in changes:
            typer.echo(str(change))
        verdict = f"{len(breaking)} break packages" if breaking else "additive"
        typer.echo(f"{old} to {new}: {len(changes)} changes, {verdict}")
    return 1 if breaking else 0


def _read(place: str) -> Contract:
    from dovetail.registry.contract.document import read, shipped

    path = Path(place)
    return read(path) if path.suffix == ".json" or path.is_file() else shipped().at(place)


def _lines(chosen: Contract) -> Iterator[str]:
    from dovetail.registry.contract.text import module_lines

    for name, one in chosen.kinds.items():
        yield f"{name} {one.version}: dovetail.api.{one.base}"
    for name, extension in chosen.extensions.items():
        yield f"{name} {extension.version}: {', '.join(extension.modules)}"
    if chosen.all_checks:
        yield f"suite {chosen.suite}: {len(chosen.all_checks)} checks"
    for name, module in chosen.modules.items():
        yield ""
        yield f"## {name}"
        yield from module_lines(module)
    for name, one in chosen.kinds.items():
        yield ""
        yield f"## Clauses of {name}"
        yield from (f"{id}: {clause.text}" for id, clause in one.clauses.items())
        yield ""
        yield f"## Checks of {name}"
        for id, check in one.checks.items():
            level = "required" if check.capability is None else f"if {check.capability}"
            yield f"{id} ({level}, since {check.since}): {check.help}"
