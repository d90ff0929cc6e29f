"""Mistral's tekken.json by mistral-common, for Dovetail."""

from collections.abc import Iterable

from dovetail.api import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> Iterable[ComponentSpec]:
    yield ComponentSpec(
        kind="tokenizer",
        name="tekken",
        target="dovetail_tekken.tokenizer:TekkenTokenizer",
        api="1.0",
        summary="Mistral's tekken.json, with conversations as mistral-common encodes them",
        requires=("mistral-common>=1.13",),
    )
