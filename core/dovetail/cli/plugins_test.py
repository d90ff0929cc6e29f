"""`dovetail plugins test`: check with one command, without code, that a component keeps the contract of its kind."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from dovetail.checks import shown
from dovetail.cli.settings import ComponentName, KindName, TimeLimit
from dovetail.errors import ConfigError, MissingExtraError
from dovetail.registry.doctor.own_time import TIME_LIMIT_S

EXTRA = ("pytest", "hypothesis")


def run_suite(
    kind: KindName,
    name: ComponentName,
    options: Annotated[list[str], typer.Option("--options", metavar="KEY=VALUE|YAML", help="Options to make it with. May be repeated.")] = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
    time_limit_s: TimeLimit = TIME_LIMIT_S,
) -> None:
    """Run the checks of a kind's conformance suite over an installed component. The exit code is 0 if it is CONFORMANT, else 1."""
    _check_installed()
    from dovetail.testing.runner import run

    verdict = run(kind, name, parse_options(options), time_limit_s=time_limit_s)  # type: ignore[arg-type]
    text = json.dumps(verdict.to_json(), indent=2) if as_json else "\n".join(verdict.report())
    typer.echo(text.encode(errors="backslashreplace").decode())  # a component's output may not be valid text
    if not verdict.conformant:
        raise typer.Exit(1)


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """Read options. Each text is "key=value", with the value in YAML, or a whole mapping in YAML or JSON; of a repeated key the last value counts.
    Raises `ConfigError`."""
    from dovetail.yaml_source import parse_yaml

    options: dict[str, Any] = {}
    for text in texts:
        pair = re.fullmatch(r"\s*(\w+)\s*=(.*)", text, re.DOTALL)
        value = parse_yaml(pair[2] if pair else text, "--options").value
        given = {pair[1]: value} if pair else value
        if not isinstance(given, dict):
            raise ConfigError(f"--options: expected key=value or a mapping in YAML or JSON, got {shown(text)}")
        options |= given
    return options


def _check_installed() -> None:
    from importlib.util import find_spec

    missing = [package for package in EXTRA if find_spec(package) is None]
    if missing:
        raise MissingExtraError.naming("testing", f"conformance suites need {' and '.join(missing)}")
