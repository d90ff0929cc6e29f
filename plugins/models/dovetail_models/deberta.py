"""DeBERTa V3 (arXiv:2111.09543): BERT whose attention also compares contents with relative
positions, both ways (arXiv:2006.03654)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, HeadLayer, ModelInputs, ModelPooling, WeightRule
from dovetail.errors import UnsupportedError
from dovetail.nn.build import of_runtime
from dovetail.nn.embedding import Table, VocabParallelEmbedding
from dovetail.nn.layer import LayerList
from dovetail.nn.norm import LayerNorm
from dovetail_models.bert import NAMES, BertLayer
from dovetail_models.encoder import EncoderArch, rows_of, rules

_BOTH = ("c2p", "p2c")  # content to position, position to content
# fields of which one value is implemented: that of V3
_OF_V3 = {
    "relative_attention": True,
    "share_att_key": True,
    "position_biased_input": False,
    "norm_rel_ebd": "layer_norm",
}


class DebertaV2(EncoderArch):
    """DebertaV2Model, DebertaV2ForSequenceClassification, of V3's shape."""

    # their attention has a bias, and is their own
    capabilities = replace(EncoderArch.capabilities, hidden_tails=False)
    model_type = "deberta-v2"
    prefix = "deberta."
    handled = frozenset(
        {
            *("layer_norm_eps", "type_vocab_size", "pos_att_type", "max_relative_positions"),
            *("position_buckets", "pooler_hidden_act", "pooler_hidden_size", "legacy"),
            *_OF_V3,
        }
    )

    def reasons_against_fields(self, config: Any) -> list[str]:
        reasons = super().reasons_against_fields(config)
        for name, only in _OF_V3.items():
            if (value := getattr(config, name, None)) != only:
                reasons.append(f"{name} = {value!r} is not implemented (only {only!r})")
        if sorted(config.pos_att_type or ()) != sorted(_BOTH):
            reasons.append(
                f"pos_att_type = {config.pos_att_type!r} is not implemented (only {_BOTH})"
            )
        if config.type_vocab_size:
            reasons.append(
                f"type_vocab_size = {config.type_vocab_size!r} is not implemented (only 0)"
            )
        if config.pooler_hidden_size != config.hidden_size:
            reasons.append(
                f"pooler_hidden_size = {config.pooler_hidden_size} must be hidden_size, "
                f"{config.hidden_size}"
            )
        if 0 < _buckets(config) < 4:
            reasons.append(f"position_buckets = {_buckets(config)} must be at least 4, or -1")
        return reasons

    def classifier(self, config: Any) -> ModelPooling:
        head = (HeadLayer("pooler.dense", config.pooler_hidden_act), HeadLayer("classifier"))
        return ModelPooling("cls", head)

    def encoder(
        self, config: Any, specs: list[LayerSpec], context: BuildContext, prefix: str
    ) -> nn.Module:
        if of_runtime(context).adapters:
            raise UnsupportedError(
                "LoRA adapters of DeBERTa aren't served: they would also change the projections "
                "of relative positions, which belong to no request"
            )
        return DebertaEncoder(config, specs, context, prefix)


class Relative(NamedTuple):
    """Relative positions of a step."""

    rows: Sequence[slice]
    # of a row of the longest length: buckets [longest, longest] of query minus key
    buckets: torch.Tensor
    states: torch.Tensor  # [2 * span, hidden], of the positions from -span on


class DebertaLayer(BertLayer):
    """A layer of BERT, with DeBERTa's attention."""

    names = NAMES | {
        "q": "attention.self.query_proj",
        "k": "attention.self.key_proj",
        "v": "attention.self.value_proj",
    }
    relative: Relative

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows, buckets, states = self.relative
        spec = self.attn.spec
        span = len(states) // 2
        projected = self.qkv_proj(states).view(len(states), -1, spec.head_size)
        # [heads, 2 * span, head_size]
        position_q, position_k, _ = (
            part.transpose(0, 1) for part in torch.split(projected, spec.heads, dim=1)
        )
        scale = (spec.head_size * (1 + len(_BOTH))) ** -0.5
        found = torch.empty_like(q)
        for row in rows:
            own = buckets[: row.stop - row.start, : row.stop - row.start]
            queries, keys, values = (x[row].transpose(0, 1) for x in (q, k, v))
            scores = queries @ keys.transpose(1, 2)  # [heads, queries, keys]
            to_position = queries @ position_k.transpose(1, 2)
            scores += to_position.gather(2, _spread(own + span, span, scores))
            to_content = keys @ position_q.transpose(1, 2)
            scores += to_content.gather(2, _spread(span - own, span, scores)).transpose(1, 2)
            weights = (scores * scale).softmax(-1, dtype=torch.float32).to(values.dtype)
            found[row] = (weights @ values).transpose(0, 1)
        return found


def _spread(places: torch.Tensor, span: int, scores: torch.Tensor) -> torch.Tensor:
    """Return places among the positions, within bounds, for all heads."""
    return places.clamp(0, 2 * span - 1).expand(scores.shape)


class DebertaEncoder(nn.Module):
    """The encoder."""

    def __init__(
        self, config: Any, specs: list[LayerSpec], context: BuildContext, prefix: str
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        eps = config.layer_norm_eps
        self.prefix = prefix
        self.words = VocabParallelEmbedding(config.vocab_size, hidden, context)
        self.norm = LayerNorm(hidden, eps, context, bias=True)
        self.buckets = _buckets(config)
        self.farthest: int = config.max_relative_positions
        if self.farthest < 1:
            self.farthest = config.max_position_embeddings
        span = self.buckets if self.buckets > 0 else self.farthest
        self.positions = Table(2 * span, hidden, context)
        self.positions_norm = LayerNorm(hidden, eps, context, bias=True)
        self.layers = LayerList(DebertaLayer(config, spec, context) for spec in specs)

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """See `CausalLM.forward`. Each row is whole."""
        x = self.norm(self.words(inputs.token_ids))
        rows = rows_of(inputs.positions)
        at = torch.arange(max((row.stop - row.start for row in rows), default=1), device=x.device)
        buckets = bucket_of(at[:, None] - at[None, :], self.buckets, self.farthest)
        relative = Relative(rows, buckets, self.positions_norm(self.positions.weight))
        for index, layer in enumerate(self.layers, 1):
            layer.relative = relative
            x = layer(x, inputs.wanted if index == len(self.layers) else None)
        return x

    def weights(self) -> Iterator[WeightRule]:
        yield from rules(
            self.prefix,
            {
                "embeddings.word_embeddings": (self.words, None),
                "embeddings.LayerNorm": (self.norm, None),
                "encoder.rel_embeddings": (self.positions, None),
                "encoder.LayerNorm": (self.positions_norm, None),
            },
        )
        for index, layer in enumerate(self.layers):
            yield from layer.weights(f"{self.prefix}encoder.layer.{index}.")


def _buckets(config: Any) -> int:
    """Return the buckets of distances on each side; -1: each distance has its own."""
    return int(getattr(config, "position_buckets", -1))


def bucket_of(distances: torch.Tensor, buckets: int, farthest: int) -> torch.Tensor:
    """Return the bucket of each distance, int64: up to half of the buckets the distance itself,
    beyond it grows with the logarithm."""
    if buckets <= 0:
        return distances
    middle = buckets // 2
    far = distances.abs().clamp(min=middle).float()
    growth = torch.log(far / middle) / math.log((farthest - 1) / middle)
    grown = (growth * (middle - 1)).ceil().long() + middle
    return torch.where(distances.abs() <= middle, distances, grown * distances.sign())
