"""A parser of tool calls, for Dovetail."""

from collections.abc import Iterable

from dovetail.api import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> Iterable[ComponentSpec]:
    yield ComponentSpec(
        kind="parser",
        name="acme",
        target="dovetail_acme.parser:AcmeParser",
        api="1.0",
        options="dovetail_acme.parser:AcmeOptions",
        summary="Tool calls in lines that begin with a mark",
    )
