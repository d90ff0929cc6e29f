"""`dovetail plugins doctor`: find problems of installed plugins, and say what to do about them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dovetail.registry.doctor.findings import Diagnosis, Finding


def doctor(
    ctx: typer.Context,
    distribution: Annotated[str | None, typer.Argument(metavar="[DISTRIBUTION]", help="Look at this one only.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    time_limit: Annotated[float, typer.Option("--time-limit", min=0.1, max=86_400, help="Seconds for each plugin, in a process of its own.")] = 60.0,
) -> None:
    """Find problems of installed plugins, and say what to do about them. The exit code is 1 if there are errors."""
    from dovetail.registry.doctor.examine import examine

    core_commands = getattr(ctx.find_root().command, "commands", {})
    diagnosis = examine(distribution, time_limit_s=time_limit, core_commands=core_commands)
    if as_json:
        typer.echo(json.dumps(_as_json(diagnosis), indent=2))
    else:
        typer.echo("\n".join(_lines(diagnosis)).encode(errors="backslashreplace").decode())  # a plugin's output may not be valid text
    raise typer.Exit(1 if diagnosis.count("error") else 0)


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    for origin, findings in groupby(diagnosis.findings, key=lambda finding: finding.origin):
        yield f"{origin.distribution} {origin.version}" if origin.entry_point == "?" else str(origin)
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
    origin = {"plugin": finding.origin.id, "distribution": finding.origin.distribution, "version": finding.origin.version}
    return origin | {"severity": finding.severity} | {key: value for key, value in dataclasses.asdict(finding).items() if key != "origin"}
