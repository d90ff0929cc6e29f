"""DistilBERT (arXiv:1910.01108): BERT without token types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, HeadLayer, ModelInputs, ModelPooling, WeightRule
from dovetail.nn.embedding import Table, VocabParallelEmbedding
from dovetail.nn.layer import LayerList
from dovetail.nn.norm import LayerNorm
from dovetail_models.bert import BertLayer
from dovetail_models.encoder import EncoderArch, rules

_EPS = 1e-12  # of all norms, whatever the config


class DistilBert(EncoderArch):
    """DistilBertModel, DistilBertForSequenceClassification."""

    model_type = "distilbert"
    prefix = "distilbert."
    activation_field = "activation"
    inner_size = "hidden_dim"
    # how the positions of a checkpoint were made; sizes by their other names
    handled = frozenset({"sinusoidal_pos_embds", "dim", "hidden_dim", "n_heads", "n_layers"})

    def classifier(self, config: Any) -> ModelPooling:
        return ModelPooling("cls", (HeadLayer("pre_classifier", "relu"), HeadLayer("classifier")))

    def encoder(
        self, config: Any, specs: list[LayerSpec], context: BuildContext, prefix: str
    ) -> nn.Module:
        return DistilBertEncoder(config, specs, context, prefix)


class DistilBertLayer(BertLayer):
    """A layer of BERT by other names."""

    names = {  # noqa: RUF012 never changed
        "q": "attention.q_lin",
        "k": "attention.k_lin",
        "v": "attention.v_lin",
        "o": "attention.out_lin",
        "attention_norm": "sa_layer_norm",
        "up": "ffn.lin1",
        "down": "ffn.lin2",
        "output_norm": "output_layer_norm",
    }


class DistilBertEncoder(nn.Module):
    """The encoder."""

    def __init__(
        self, config: Any, specs: list[LayerSpec], context: BuildContext, prefix: str
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.words = VocabParallelEmbedding(config.vocab_size, config.hidden_size, context)
        self.positions = Table(config.max_position_embeddings, config.hidden_size, context)
        self.norm = LayerNorm(config.hidden_size, _EPS, context, bias=True)
        inner = config.hidden_dim
        self.layers = LayerList(
            DistilBertLayer(config, spec, context, inner=inner, eps=_EPS) for spec in specs
        )

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """See `CausalLM.forward`. Each row is whole."""
        x = self.norm(self.words(inputs.token_ids) + self.positions(inputs.positions))
        for index, layer in enumerate(self.layers, 1):
            x = layer(x, inputs.wanted if index == len(self.layers) else None)
        return x

    def weights(self) -> Iterator[WeightRule]:
        yield from rules(
            f"{self.prefix}embeddings.",
            {
                "word_embeddings": (self.words, None),
                "position_embeddings": (self.positions, None),
                "LayerNorm": (self.norm, None),
            },
        )
        for index, layer in enumerate(self.layers):
            yield from layer.weights(f"{self.prefix}transformer.layer.{index}.")
