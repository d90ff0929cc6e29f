"""A logits processor, for Dovetail."""

from collections.abc import Iterable

from dovetail.api import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> Iterable[ComponentSpec]:
    yield ComponentSpec(
        kind="logits_processor",
        name="acme",
        target="dovetail_acme.processor:AcmeLogitsProcessor",
        api="1.0",
        requires=("torch>=2.11",),
        summary="Lowers the logits of the last tokens",
    )
