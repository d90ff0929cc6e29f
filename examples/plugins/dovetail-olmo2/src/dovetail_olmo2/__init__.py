"""OLMo 2, for Dovetail."""

from collections.abc import Iterable

from dovetail.api import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> Iterable[ComponentSpec]:
    yield ComponentSpec(
        kind="model",
        name="olmo2",
        target="dovetail_olmo2.model:Olmo2",
        api="1.0",
        summary="OLMo 2, dense",
        requires=("torch>=2.11", "transformers>=5"),
        architectures=("Olmo2ForCausalLM",),
    )
