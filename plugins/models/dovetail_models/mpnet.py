"""MPNet (arXiv:2004.09297): BERT without token types, whose attention adds a bias by the distance of
two tokens, as T5 does (arXiv:1910.10683)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, ModelInputs, ModelPooling, WeightRule
from dovetail.nn.embedding import Table, VocabParallelEmbedding
from dovetail.nn.layer import LayerList
from dovetail.nn.norm import LayerNorm
from dovetail.nn.parameter import Part, Weight, share
from dovetail_models.bert import TWO_LAYERS, BertLayer, positions_after_padding
from dovetail_models.encoder import EncoderArch, rows_of, rules

_PADDING = 1  # id of padding, whatever the config; positions begin after it
_FARTHEST = 128  # tokens; beyond, all distances have one bias


class MPNet(EncoderArch):
    """MPNetModel, MPNetForSequenceClassification."""

    # their attention has a bias, and is their own
    capabilities = replace(EncoderArch.capabilities, hidden_tails=False)
    model_type = "mpnet"
    prefix = "mpnet."
    handled = frozenset({"layer_norm_eps", "relative_attention_num_buckets"})

    def reasons_against_fields(self, config: Any) -> list[str]:
        reasons = super().reasons_against_fields(config)
        buckets = config.relative_attention_num_buckets
        if buckets < 4 or buckets % 2:
            reasons.append(
                f"relative_attention_num_buckets = {buckets} must be an even number of at least 4"
            )
        if config.pad_token_id != _PADDING:
            reasons.append(
                f"pad_token_id = {config.pad_token_id}: transformers counts positions after "
                f"{_PADDING}"
            )
        return reasons

    def classifier(self, config: Any) -> ModelPooling:
        return TWO_LAYERS

    def encoder(
        self, config: Any, specs: list[LayerSpec], context: BuildContext, prefix: str
    ) -> nn.Module:
        return MPNetEncoder(config, specs, context, prefix)


class MPNetLayer(BertLayer):
    """A layer of BERT whose attention has a bias."""

    names = {  # noqa: RUF012 never changed
        "q": "attention.attn.q",
        "k": "attention.attn.k",
        "v": "attention.attn.v",
        "o": "attention.attn.o",
        "attention_norm": "attention.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
        "output_norm": "output.LayerNorm",
    }
    rows: Sequence[slice] = ()  # of the step
    bias: torch.Tensor  # by distance, [heads, 2 * longest - 1]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found = torch.empty_like(q)
        longest = (self.bias.shape[1] + 1) // 2
        for row in self.rows:
            at = torch.arange(row.stop - row.start, device=q.device)
            mask = self.bias[:, at[None, :] - at[:, None] + longest - 1]  # [heads, queries, keys]
            heads = [x[row].transpose(0, 1) for x in (q, k, v)]
            seen = F.scaled_dot_product_attention(
                heads[0], heads[1], heads[2], attn_mask=mask, scale=self.attn.spec.scale
            )
            found[row] = seen.transpose(0, 1)
        return found


class MPNetEncoder(nn.Module):
    """The encoder."""

    def __init__(
        self, config: Any, specs: list[LayerSpec], context: BuildContext, prefix: str
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.words = VocabParallelEmbedding(config.vocab_size, config.hidden_size, context)
        self.positions = Table(config.max_position_embeddings, config.hidden_size, context)
        self.norm = LayerNorm(config.hidden_size, config.layer_norm_eps, context, bias=True)
        heads = config.num_attention_heads
        own = share(heads, context.parallel, "num_attention_heads")
        shape = config.relative_attention_num_buckets, heads
        part = Part(shape, 1, context.parallel.rank * own, own)
        # [buckets of distances, heads]
        self.biases = Weight((shape[0], own), {None: part}, context)
        self.layers = LayerList(MPNetLayer(config, spec, context) for spec in specs)

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """See `CausalLM.forward`. Each row is whole."""
        positions = positions_after_padding(inputs.token_ids, inputs.positions, _PADDING)
        x = self.norm(self.words(inputs.token_ids) + self.positions(positions))
        rows = rows_of(inputs.positions)
        longest = max((row.stop - row.start for row in rows), default=1)
        distances = torch.arange(1 - longest, longest, device=x.device)
        bias = self.biases[bucket_of(distances, len(self.biases))].t()
        for index, layer in enumerate(self.layers, 1):
            layer.rows = rows
            layer.bias = bias
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
        yield WeightRule(f"{self.prefix}encoder.relative_attention_bias.weight", self.biases)
        for index, layer in enumerate(self.layers):
            yield from layer.weights(f"{self.prefix}encoder.layer.{index}.")
        # of the first token, for labels
        yield WeightRule(f"{self.prefix}pooler.*", None, optional=True)


def bucket_of(distances: torch.Tensor, buckets: int) -> torch.Tensor:
    """Return the bucket of each distance, int64, from a query to a key: half of the buckets for
    keys after it. Of each half, the first half is for single distances, the others grow with the
    logarithm up to `_FARTHEST`."""
    half = buckets // 2
    exact = half // 2
    far = distances.abs()
    growth = torch.log(far.clamp(min=1).float() / exact) / math.log(_FARTHEST / exact)
    grown = (exact + (growth * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(far < exact, far, grown) + half * (distances > 0)
