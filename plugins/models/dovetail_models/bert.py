"""BERT (arXiv:1810.04805), RoBERTa (arXiv:1907.11692) and XLM-RoBERTa: post-norm encoders with
learned positions and token types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, HeadLayer, ModelInputs, ModelPooling, WeightRule
from dovetail.nn.embedding import Table, VocabParallelEmbedding
from dovetail.nn.layer import LayerList
from dovetail.nn.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from dovetail.nn.norm import LayerNorm
from dovetail_models.encoder import EncoderArch, kept, rules


class Bert(EncoderArch):
    """BertModel, BertForSequenceClassification."""

    capabilities = replace(EncoderArch.capabilities, types=True)
    model_type = "bert"
    prefix = "bert."
    late_heads = frozenset({"HF_ColBERT"})
    handled = frozenset(
        {
            *(
                "type_vocab_size",
                "layer_norm_eps",
                "position_embedding_type",
                "is_decoder",
                "add_cross_attention",
            ),
            *(
                "directionality",
                "output_past",
                "sentence_transformers",
            ),  # of other heads, of other programs
            *(
                "pooler_fc_size",
                "pooler_num_attention_heads",
                "pooler_num_fc_layers",
                "pooler_size_per_head",
                "pooler_type",
            ),
        }
    )

    def reasons_against_fields(self, config: Any) -> list[str]:
        reasons = super().reasons_against_fields(config)
        if (kind := getattr(config, "position_embedding_type", None)) not in (None, "absolute"):
            reasons.append(
                f"position_embedding_type = {kind!r} is not implemented (only 'absolute')"
            )
        reasons += [
            f"{name} = True: only encoders are served"
            for name in ("is_decoder", "add_cross_attention")
            if getattr(config, name, False)
        ]
        if config.type_vocab_size < 1:
            reasons.append(f"type_vocab_size = {config.type_vocab_size} must be at least 1")
        return reasons

    def classifier(self, config: Any) -> ModelPooling:
        head = (HeadLayer("bert.pooler.dense", "tanh"), HeadLayer("classifier"))
        return ModelPooling("cls", head)

    def encoder(
        self, config: Any, specs: list[LayerSpec], context: BuildContext, prefix: str
    ) -> nn.Module:
        return BertEncoder(config, specs, context, prefix)


class Roberta(Bert):
    """RobertaModel, RobertaForSequenceClassification."""

    model_type = "roberta"
    late_heads = frozenset()
    prefix = "roberta."

    def reasons_against_fields(self, config: Any) -> list[str]:
        reasons = super().reasons_against_fields(config)
        padding = config.pad_token_id
        if padding is None or not 0 <= padding < config.max_position_embeddings - 1:
            reasons.append(
                f"pad_token_id = {padding}: positions begin after it, and max_position_embeddings "
                f"is {config.max_position_embeddings}"
            )
        return reasons

    def classifier(self, config: Any) -> ModelPooling:
        return TWO_LAYERS

    def encoder(
        self, config: Any, specs: list[LayerSpec], context: BuildContext, prefix: str
    ) -> nn.Module:
        return BertEncoder(config, specs, context, prefix, padding=config.pad_token_id)


class XLMRoberta(Roberta):
    """XLMRobertaModel, XLMRobertaForSequenceClassification."""

    model_type = "xlm-roberta"

    def reasons_against_fields(self, config: Any) -> list[str]:
        reasons = super().reasons_against_fields(config)
        if getattr(config, "position_embedding_type", None) == "rotary":
            reasons.append(
                "jina-embeddings-v3 is code of its own in this form; in that of transformers, "
                "JinaEmbeddingsV3 (jinaai/jina-embeddings-v3-hf), it is served"
            )
        return reasons


# the classifier of RoBERTa, and of models that have its head
TWO_LAYERS = ModelPooling(
    "cls", (HeadLayer("classifier.dense", "tanh"), HeadLayer("classifier.out_proj"))
)
NAMES = {  # of a layer's modules in a checkpoint
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "output_norm": "output.LayerNorm",
}


class BertLayer(nn.Module):
    """Attention, then feed-forward; each adds its input, and a norm follows."""

    names: Mapping[str, str] = NAMES

    def __init__(
        self,
        config: Any,
        spec: LayerSpec,
        context: BuildContext,
        *,
        inner: int | None = None,
        eps: float | None = None,
    ) -> None:
        """`inner`, `eps`: of the feed-forward and the norms, where the config has other names."""
        super().__init__()
        hidden = config.hidden_size
        inner = config.intermediate_size if inner is None else inner
        eps = config.layer_norm_eps if eps is None else eps
        heads = config.num_attention_heads
        self.qkv_proj = QKVParallelLinear(hidden, heads, heads, spec.head_size, context, bias=True)
        self.attn = context.make_attention(spec)
        self.o_proj = RowParallelLinear(hidden, hidden, context, bias=True)
        self.attention_norm = LayerNorm(hidden, eps, context, bias=True)
        self.up_proj = ColumnParallelLinear(hidden, inner, context, bias=True)
        self.down_proj = RowParallelLinear(inner, hidden, context, bias=True)
        self.output_norm = LayerNorm(hidden, eps, context, bias=True)

    def forward(self, x: torch.Tensor, wanted: torch.Tensor | None) -> torch.Tensor:
        """x [tokens, hidden] -> the same; with `wanted` [n], only these tokens' [n, hidden]."""
        spec = self.attn.spec
        q, k, v = torch.split(self.qkv_proj(x).view(len(x), -1, spec.head_size), spec.heads, dim=1)
        attended, x = kept(wanted, self.attend(q, k, v).flatten(1), x)
        x = self.attention_norm(self.o_proj(attended).add_(x))
        return self.output_norm(self.down_proj(F.gelu(self.up_proj(x))).add_(x))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the values that each token sees: all are [tokens, heads, head_size]."""
        self.attn.write(k, v)
        return self.attn.attend(q)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        names = self.names
        yield from rules(
            prefix,
            {
                names["q"]: (self.qkv_proj, "q"),
                names["k"]: (self.qkv_proj, "k"),
                names["v"]: (self.qkv_proj, "v"),
                names["o"]: (self.o_proj, None),
                names["attention_norm"]: (self.attention_norm, None),
                names["up"]: (self.up_proj, None),
                names["down"]: (self.down_proj, None),
                names["output_norm"]: (self.output_norm, None),
            },
        )


class BertEncoder(nn.Module):
    """The encoder. `padding`: id of padding in models whose positions begin after it, and leave
    padding out."""

    def __init__(
        self,
        config: Any,
        specs: list[LayerSpec],
        context: BuildContext,
        prefix: str,
        padding: int | None = None,
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.padding = padding
        self.words = VocabParallelEmbedding(config.vocab_size, config.hidden_size, context)
        self.positions = Table(config.max_position_embeddings, config.hidden_size, context)
        self.types = Table(config.type_vocab_size, config.hidden_size, context)
        self.norm = LayerNorm(config.hidden_size, config.layer_norm_eps, context, bias=True)
        self.layers = LayerList(BertLayer(config, spec, context) for spec in specs)

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """See `CausalLM.forward`. Each row is whole. Types are clipped to those that the model
        has."""
        positions, types = inputs.positions, inputs.types
        if self.padding is not None:
            positions = positions_after_padding(inputs.token_ids, positions, self.padding)
        x = self.words(inputs.token_ids) + (
            self.types.weight[0]
            if types is None
            else self.types(types.clamp(max=len(self.types.weight) - 1))
        )
        x = self.norm(x.add_(self.positions(positions)))
        for index, layer in enumerate(self.layers, 1):
            x = layer(x, inputs.wanted if index == len(self.layers) else None)
        return x

    def weights(self) -> Iterator[WeightRule]:
        yield from rules(
            f"{self.prefix}embeddings.",
            {
                "word_embeddings": (self.words, None),
                "position_embeddings": (self.positions, None),
                "token_type_embeddings": (self.types, None),
                "LayerNorm": (self.norm, None),
            },
        )
        for index, layer in enumerate(self.layers):
            yield from layer.weights(f"{self.prefix}encoder.layer.{index}.")
        # of the first token, for labels
        yield WeightRule(f"{self.prefix}pooler.*", None, optional=True)


def positions_after_padding(
    token_ids: torch.Tensor, positions: torch.Tensor, padding: int
) -> torch.Tensor:
    """Return [tokens] int64: `padding` for tokens that are padding, for the others the next number
    that their row doesn't have yet. Rows are whole and `positions` [tokens] count from 0."""
    real = (token_ids != padding).long()
    before = real.cumsum(0) - real  # in this step
    first = torch.arange(len(positions), device=positions.device) - positions  # of the row
    return (before - before[first] + 1) * real + padding
