"""A subcommand of `dovetail`."""

from collections.abc import Iterable

from dovetail.api import CommandSpec, hookimpl


@hookimpl
def dovetail_commands() -> Iterable[CommandSpec]:
    yield CommandSpec(
        name="acme",
        target="dovetail_acme.command:count",
        summary="Count the tokens of a text",
    )
