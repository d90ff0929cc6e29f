"""EuroBERT (arXiv:2503.05500): Llama's layers as an encoder, whose tokens see later ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dovetail.api.attention import LayerSpec
from dovetail.api.model import ModelCapabilities, ModelPooling
from dovetail_models.llama import Llama


class EuroBert(Llama):
    """EuroBertModel."""

    capabilities = ModelCapabilities(tensor_parallel=True)  # as of encoders
    model_type = "eurobert"
    auto_classes = ("AutoModel",)
    handled = Llama.handled | {"classifier_pooling", "mask_token_id", "clf_pooling"}

    def spec(self, config: Any, index: int) -> LayerSpec:
        return replace(super().spec(config, index), causal=False)

    def ties(self, config: Any) -> bool:
        return True  # it has no output layer, and none is computed

    def pooling(self, config: Any) -> ModelPooling:
        return ModelPooling("mean")
