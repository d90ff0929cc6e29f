"""`dovetail plugins test`: check with one command, without code, that a component keeps the
contract of its kind."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.api.component import WAIVER
from dovetail.cli.settings import ComponentName, KindName, TimeLimit
from dovetail.errors import ConfigError, MissingExtraError, shown
from dovetail.registry.doctor.process import TIME_LIMIT_S

if TYPE_CHECKING:
    from dovetail.testing.checks import Waiver

EXTRA = ("pytest", "hypothesis")
SUITES_OF_EXTENSIONS = {
    "route": "dovetail.testing.RouteSuite",
    "routes": "dovetail.testing.RouteSuite",
    "command": "dovetail.testing.CommandSuite",
    "weight_format": "dovetail.testing.WeightFormatSuite",
    "quantization": "dovetail.testing.WeightFormatSuite",
    "router": "dovetail_lab.testing.RouterSuite",
}
MAPPING = "KEY=VALUE|YAML"
EXAMPLE = "scheduler.recompute=evicts too eagerly https://example.org/issues/7"


def run_suite(
    kind: KindName,
    name: ComponentName,
    options: Annotated[
        list[str],
        typer.Option(
            "--options", metavar=MAPPING, help="Options to make it with. May be repeated."
        ),
    ] = [],  # noqa: B006
    waive: Annotated[
        list[str],
        typer.Option(
            "--waive",
            metavar="ID=REASON URL",
            help="A check that may fail, why, and the issue that tracks it. May be repeated.",
        ),
    ] = [],  # noqa: B006
    variant: Annotated[
        list[str],
        typer.Option(
            "--variant",
            metavar=MAPPING,
            help="Of a model: fields of one more config to compare. May be repeated.",
        ),
    ] = [],  # noqa: B006
    settings: Annotated[
        list[str],
        typer.Option(
            "--suite",
            metavar=MAPPING,
            help="Settings of the kind's suite, as its page has them. May be repeated.",
        ),
    ] = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
    badge: Annotated[
        Path | None,
        typer.Option(
            "--badge",
            metavar="FILE",
            help="Also write the verdict as a badge: JSON for shields.io's endpoint.",
            show_default=False,
        ),
    ] = None,
    time_limit_s: TimeLimit = TIME_LIMIT_S,
) -> None:
    """Run the checks of a kind's conformance suite over an installed component. The exit code is 0
    if it is CONFORMANT, else 1."""
    check_is_kind(kind)
    _check_installed()
    from dovetail.testing.runner import run

    if badge is not None and (badge.is_dir() or not badge.parent.is_dir()):
        raise ConfigError(f"--badge: expected a file in a folder that exists, got {badge}")

    own = parse_mappings(settings, "--suite")
    if variant:
        own["variants"] = [parse_mappings([text], "--variant") for text in variant]
    given = parse_mappings(options, "--options")
    verdict = run(
        kind,  # type: ignore[arg-type]
        name,
        given,
        waivers=parse_waivers(waive),
        time_limit_s=time_limit_s,
        settings=own,
    )
    text = json.dumps(verdict.to_json(), indent=2) if as_json else "\n".join(verdict.report())
    # a component's output may not be valid text
    typer.echo(text.encode(errors="backslashreplace").decode())
    if badge is not None:
        try:
            badge.write_text(json.dumps(verdict.badge()) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--badge: {badge} can't be written: {error.strerror}") from None
    if not verdict.conformant:
        raise typer.Exit(1)


def check_is_kind(kind: str) -> None:
    """Raise `ConfigError` for extensions, which aren't components: pytest runs their suites."""
    if (suite := SUITES_OF_EXTENSIONS.get(kind)) is not None:
        raise ConfigError(
            f"{kind} isn't a kind of component: pytest runs its suite, with a class of {suite} in "
            f"the package's tests: python -m pytest tests/test_conformance.py"
        )


def parse_mappings(texts: Sequence[str], flag: str) -> dict[str, Any]:
    """Read the values of a flag. Each text is "key=value", with the value in YAML, or a whole
    mapping in YAML or JSON; of a repeated key the last value counts. Raises `ConfigError`."""
    from dovetail.base.yaml_source import parse_yaml

    values: dict[str, Any] = {}
    for text in texts:
        pair = re.fullmatch(r"\s*(\w+)\s*=(.*)", text, re.DOTALL)
        value = parse_yaml(pair[2] if pair else text, flag).value
        given = {pair[1]: value} if pair else value
        if not isinstance(given, dict):
            raise ConfigError(
                f"{flag}: expected key=value or a mapping in YAML or JSON, got {shown(text)}"
            )
        values |= given
    return values


def parse_waivers(texts: Sequence[str]) -> dict[str, Waiver]:
    """Read "ID=REASON URL", where the URL may be in parentheses, as a report shows it. Raises
    `ConfigError`."""
    from dovetail.testing.checks import declared_waivers

    for text in texts:
        if WAIVER.fullmatch(text) is None:
            raise ConfigError(
                f"--waive: expected a check's id, the reason and the url of an issue, like "
                f"{EXAMPLE!r}, got {shown(text)}"
            )
    return declared_waivers(texts)


def _check_installed() -> None:
    from importlib.util import find_spec

    missing = [package for package in EXTRA if find_spec(package) is None]
    if missing:
        raise MissingExtraError.naming(
            "testing", f"conformance suites need {' and '.join(missing)}"
        )
