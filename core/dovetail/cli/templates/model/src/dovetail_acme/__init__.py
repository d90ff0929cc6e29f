"""A model architecture, for Dovetail."""

from collections.abc import Iterable

from dovetail.api import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> Iterable[ComponentSpec]:
    yield ComponentSpec(
        kind="model",
        name="acme",
        target="dovetail_acme.model:AcmeModelArch",
        api="1.0",
        requires=("torch>=2.11", "transformers>=5"),
        architectures=("GraniteForCausalLM",),
        summary="Granite 3, dense",
    )
