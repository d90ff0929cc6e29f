"""The built-in model architectures."""

from __future__ import annotations

from dovetail.api.component import BundledModel, ComponentSpec, hookimpl

_NEEDS = ("torch>=2.11", "transformers>=5")


def _model(name: str, target: str, architecture: str, summary: str) -> ComponentSpec:
    return ComponentSpec(
        kind="model",
        name=name,
        target=f"dovetail_models.{name}:{target}",
        api="0.2",
        summary=summary,
        requires=_NEEDS,
        architectures=(architecture,),
    )


@hookimpl
def dovetail_components() -> list[ComponentSpec]:
    return [
        _model("llama", "Llama", "LlamaForCausalLM", "Llama 2 and 3, and models of their shape"),
        _model("mistral", "Mistral", "MistralForCausalLM", "Mistral, with its sliding window"),
        _model("qwen2", "Qwen2", "Qwen2ForCausalLM", "Qwen2 and Qwen2.5, dense"),
        _model("qwen3", "Qwen3", "Qwen3ForCausalLM", "Qwen3, dense"),
    ]


@hookimpl
def dovetail_models() -> list[BundledModel]:
    return [BundledModel("demo", "dovetail_models", "demo")]
