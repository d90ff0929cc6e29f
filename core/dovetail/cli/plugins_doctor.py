"""`dovetail plugins doctor`: find problems of installed plugins, and say what to do about them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer
from packaging.utils import canonicalize_name

from dovetail.cli.settings import TimeLimit
from dovetail.errors import DISTRIBUTION
from dovetail.registry.doctor.process import TIME_LIMIT_S

if TYPE_CHECKING:
    from dovetail.registry.doctor.metadata import Diagnosis, Finding


def doctor(
    ctx: typer.Context,
    distribution: Annotated[
        str | None,
        typer.Argument(metavar="[DISTRIBUTION]", help="Look at this one only.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    time_limit_s: TimeLimit = TIME_LIMIT_S,
) -> None:
    """Find problems of installed plugins, each in a process of its own, and say what to do about
    them. The exit code is 1 if there are errors."""
    from dovetail.registry.doctor.examine import examine, look_at_machine

    core_commands = getattr(ctx.find_root().command, "commands", {})
    diagnosis = examine(distribution, time_limit_s=time_limit_s, core_commands=core_commands)
    machine = (
        look_at_machine(time_limit_s)
        if distribution is None or canonicalize_name(distribution) == DISTRIBUTION
        else None
    )
    if as_json:
        typer.echo(json.dumps({**_as_json(diagnosis), "machine": machine}, indent=2))
    else:
        # a plugin's output may not be valid text
        typer.echo("\n".join(_lines(diagnosis)).encode(errors="backslashreplace").decode())
        if machine is not None:
            typer.echo(f"this machine: {machine}")
    raise typer.Exit(1 if diagnosis.count("error") else 0)


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    for origin, findings in groupby(diagnosis.findings, key=lambda finding: finding.origin):
        yield (
            f"{origin.distribution} {origin.version}" if origin.entry_point == "?" else str(origin)
        )
        for finding in findings:
            yield f"  {finding.severity} {finding.problem}: {finding.what}"
            yield f"    to do: {finding.remedy}"
    for origin in diagnosis.denied:
        yield f"{origin} was not looked at: DOVETAIL_PLUGINS denies it"
    yield f"plugins examined: {len(diagnosis.examined)}, errors: {diagnosis.count('error')}, warnings: {diagnosis.count('warning')}"


def _as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "examined": [origin.id for origin in diagnosis.examined],
        "denied": [origin.id for origin in diagnosis.denied],
        "findings": [_finding_as_json(finding) for finding in diagnosis.findings],
    }


def _finding_as_json(finding: Finding) -> dict[str, Any]:
    origin = {
        "plugin": finding.origin.id,
        "distribution": finding.origin.distribution,
        "version": finding.origin.version,
    }
    return (
        origin
        | {"severity": finding.severity}
        | {key: value for key, value in dataclasses.asdict(finding).items() if key != "origin"}
    )
