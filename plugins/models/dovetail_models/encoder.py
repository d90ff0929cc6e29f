"""Encoders: what BERT's and ModernBERT's families share. Their attention sees later tokens, so each
row of a step is a whole prompt."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from dovetail.api.attention import LayerSpec
from dovetail.api.model import (
    BuildContext,
    HeadLayer,
    ModelCapabilities,
    ModelPooling,
    ParallelGroup,
    WeightRule,
)
from dovetail.nn.attention import spec_of_rank
from dovetail.nn.layer import Layer
from dovetail_models.arch import ConfigArch

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


class EncoderArch(ConfigArch):
    """Architecture of an encoder, with or without a head for labels on top."""

    # no draft head reads an encoder
    capabilities = ModelCapabilities(tensor_parallel=True, hidden_tails=True)
    activations = ("gelu",)
    auto_classes = ("AutoModel", "AutoModelForSequenceClassification")
    prefix: str  # of the encoder's tensors in a checkpoint that has a head
    inner_size = "intermediate_size"  # the field of the feed-forward's
    # architectures whose head is a layer for each token, which the checkpoint's other files tell
    late_heads: frozenset[str] = frozenset()

    def size_reasons(self, config: Any) -> list[str]:
        if reasons := [
            f"{name} = {getattr(config, name)} must be at least 1"
            for name in (*_SIZES, self.inner_size)
            if getattr(config, name) < 1
        ]:
            return reasons
        if config.hidden_size % config.num_attention_heads:
            return [
                f"hidden_size ({config.hidden_size}) is no multiple of num_attention_heads "
                f"({config.num_attention_heads})"
            ]
        return []

    def window(self, config: Any, index: int) -> int | None:
        """Return `LayerSpec.window` of a layer."""
        return None

    def kv_heads(self, config: Any) -> int:
        """Return the heads of K and V."""
        return int(config.num_attention_heads)

    def head_size(self, config: Any) -> int:
        """Return the numbers of a head."""
        return int(config.hidden_size // config.num_attention_heads)

    def layer_specs(self, config: Any, parallel: ParallelGroup) -> list[LayerSpec]:
        heads = config.num_attention_heads
        kv_heads = self.kv_heads(config)
        size = self.head_size(config)
        return [
            spec_of_rank(
                LayerSpec(
                    *(index, heads, kv_heads, size, size**-0.5),
                    window=self.window(config, index),
                    causal=False,
                ),
                parallel,
            )
            for index in range(config.num_hidden_layers)
        ]

    def build(self, config: Any, context: BuildContext) -> nn.Module:
        return self.encoder(
            config,
            self.layer_specs(config, context.parallel),
            context,
            self.prefix if _has_head(config) or self.late_heads & {*config.architectures} else "",
        )

    def pooling(self, config: Any) -> ModelPooling:
        """Return the pooling of the architecture's classifier, of texts or of tokens, otherwise
        sentence-transformers' own."""
        if not _has_head(config):
            return ModelPooling("mean")
        return self.tagger(config) if _is_tagger(config) else self.classifier(config)

    @abstractmethod
    def classifier(self, config: Any) -> ModelPooling:
        """Return how a checkpoint with a head for labels pools."""

    def tagger(self, config: Any) -> ModelPooling:
        """Return the head of a checkpoint with labels for each token."""
        return ModelPooling("mean", (HeadLayer("classifier"),))

    @abstractmethod
    def encoder(
        self, config: Any, specs: list[LayerSpec], context: BuildContext, prefix: str
    ) -> nn.Module:
        """Return the encoder. `prefix`: of its tensors' names in the checkpoint."""


def _has_head(config: Any) -> bool:
    of_texts = any(name.endswith("ForSequenceClassification") for name in config.architectures)
    return of_texts or _is_tagger(config)


def _is_tagger(config: Any) -> bool:
    return any(name.endswith("ForTokenClassification") for name in config.architectures)


def rules(prefix: str, layers: Mapping[str, tuple[Layer, str | None]]) -> Iterator[WeightRule]:
    """Yield the rules for weights and biases of layers, by their names in a checkpoint; with the
    part that each has of a merged layer."""
    for name, (layer, shard_id) in layers.items():
        for kind, weight in layer.named_parameters():
            yield WeightRule(f"{prefix}{name}.{kind}", weight, shard_id)


def kept(wanted: torch.Tensor | None, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the values of the tokens that are wanted."""
    return values if wanted is None else tuple(value.index_select(0, wanted) for value in values)


def rows_of(positions: torch.Tensor) -> list[slice]:
    """Return the tokens of each row of a step whose rows are whole. `positions` [tokens] count from
    0. Waits for the device."""
    starts = (positions == 0).nonzero().flatten().tolist()
    return [slice(*ends) for ends in pairwise([*starts, len(positions)])]
