"""DeepSeek Sparse Attention (DeepSeek-V3.2): latent attention to the tokens that a small indexer
selects.

The indexer has one key a token, several queries, and a weight for each of these:

    key [size] = rotary(norm(wk x))     q of head h = rotary(wq_h c), c the queries' latent
    weights [heads] = weights_proj x / sqrt(heads * size)

Only the first numbers of keys and queries rotate, as many as in the attention. Keys and queries
stay in the model's dtype: the Hadamard transform in DeepSeek's code changes no product, and its FP8
is an approximation; transformers has neither. Every rank computes the whole indexer, so that all
select the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from dovetail.api.attention import Indexer, LayerSpec
from dovetail.api.model import BuildContext, WeightRule
from dovetail.nn.layer import Layer
from dovetail.nn.linear import ReplicatedLinear
from dovetail.nn.moe import Router
from dovetail.nn.norm import LayerNorm, Norm
from dovetail.nn.parameter import weight_rules
from dovetail.nn.residual import Residual
from dovetail.nn.rotary import Rotation
from dovetail_models.latent import LatentAttention, LatentShape, rotated

KEY_EPS = 1e-6  # of the keys' norm, regardless of the config


class IndexLayers(nn.Module):
    """Computes the queries, keys and weights of an indexer."""

    def __init__(
        self,
        hidden: int,
        q_rank: int,
        rope: int,
        indexer: Indexer,
        context: BuildContext,
        *,
        interleaved: bool,
    ) -> None:
        """`rope`: numbers of a head that rotate; `interleaved`: as of `LatentShape`."""
        super().__init__()
        self.shape = (indexer.heads, indexer.size)
        self.rope = rope
        self.interleaved = interleaved
        self.wq_b = ReplicatedLinear(q_rank, indexer.heads * indexer.size, context)
        self.wk = ReplicatedLinear(hidden, indexer.size, context)
        self.k_norm = LayerNorm(indexer.size, KEY_EPS, context, bias=True)
        wide = replace(context, dtype=torch.float32)
        self.weights_proj = Router(hidden, indexer.heads, wide)
        self.scale = float((indexer.heads * indexer.size) ** -0.5)

    def keys(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, size]."""
        keys: torch.Tensor = self.k_norm(self.wk(x))
        return self._rotated(keys[:, None], rotation)[:, 0]

    def queries(self, latent: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """latent [tokens, q_rank] -> [tokens, heads, size]."""
        return self._rotated(self.wq_b(latent).view(-1, *self.shape), rotation)

    def head_weights(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, heads] float32."""
        weights: torch.Tensor = self.weights_proj(x.float()) * self.scale
        return weights

    def _rotated(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        first = rotated(x[..., : self.rope], rotation, interleaved=self.interleaved)
        return torch.cat((first, x[..., self.rope :]), dim=-1)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        names: dict[str, Layer | tuple[Layer, *tuple[str, ...]]] = {
            "wq_b": self.wq_b,
            "wk": self.wk,
            "k_norm": self.k_norm,
            "weights_proj": self.weights_proj,
        }
        yield from weight_rules(prefix, names)


class IndexedLatentAttention(LatentAttention):
    """Latent attention to selected tokens, in a layer that selects itself or not."""

    def __init__(
        self,
        hidden: int,
        spec: LayerSpec,
        shape: LatentShape,
        context: BuildContext,
        *,
        bias: bool,
        interleaved: bool,
    ) -> None:
        """As of `LatentAttention`; `interleaved`: rotary pairs of the indexer are neighbors.
        `spec.indexer` and `shape.q_rank` must be given."""
        super().__init__(hidden, spec, shape, context, bias=bias)
        self.indexer: IndexLayers | None = None
        if spec.indexer is not None and spec.indexer.selects:
            assert shape.q_rank is not None
            self.indexer = IndexLayers(
                hidden,
                shape.q_rank,
                shape.rope,
                spec.indexer,
                context,
                interleaved=interleaved,
            )

    def store(self, residual: Residual, norm: Norm, rotation: Rotation) -> torch.Tensor:
        """Store the latents and index keys, and select. Returns what `LatentAttention.store`
        does."""
        if self.indexer is None:
            return super().store(residual, norm, rotation)
        x = residual.read(norm)
        q, latent, k_rope = self.latents(x, None)
        query = self.store_latents(q, latent, k_rope, rotation)
        self.attn.write_index(self.indexer.keys(x, rotation))
        self.attn.select(self.indexer.queries(q, rotation), self.indexer.head_weights(x))
        return query

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        yield from super().weights(prefix)
        if self.indexer is not None:
            yield from self.indexer.weights(f"{prefix}indexer.")
