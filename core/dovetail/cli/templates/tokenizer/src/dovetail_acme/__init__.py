"""A tokenizer, for Dovetail."""

from collections.abc import Iterable

from dovetail.api import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> Iterable[ComponentSpec]:
    yield ComponentSpec(
        kind="tokenizer",
        name="acme",
        target="dovetail_acme.tokenizer:AcmeTokenizer",
        api="1.0",
        summary="A token for each byte of UTF-8, and four special ones",
    )
