"""Latent attention (MLA, arXiv:2405.04434): K and V of all heads are linear in one small vector a
token, the latent, and only that is cached.

    latent [kv_rank] = norm(kv_down x)      k_rope [rope] = rotary(kv_down x), shared by all heads
    k of head h = [UK_h latent, k_rope]     v of head h = UV_h latent

Attention runs over the latents themselves (*absorbed*): q_h · (UK_h latent) = (UK_hᵀ q_h) · latent,
and the sum of weighted values is UV_h times the sum of weighted latents. So a layer has one K of
kv_rank + rope numbers a token, whose first kv_rank are V.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, WeightRule
from dovetail.nn.attention import spec_of_rank
from dovetail.nn.layer import Layer
from dovetail.nn.linear import (
    ColumnParallelLinear,
    Columns,
    LatentUpLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from dovetail.nn.norm import Norm, RMSNorm
from dovetail.nn.parameter import weight_rules
from dovetail.nn.residual import Residual
from dovetail.nn.rotary import Rotation, apply_rotary

INNER_EPS = 1e-6  # of the norms of latents, regardless of the config


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Hyperparameters of latent attention, of the whole model. Sizes are those of a head."""

    q_rank: int | None  # of the queries' latent; None: queries are projected from the stream
    kv_rank: int
    plain: int  # numbers of q and k without rotary embedding
    rope: int  # numbers of q and k with rotary embedding
    value: int
    scale: float
    interleaved: bool  # rotary pairs are neighbors: 2i and 2i + 1

    def layer_spec(self, index: int, heads: int) -> LayerSpec:
        """Return layer `index` of the whole model, with `heads` heads."""
        size = self.kv_rank + self.rope
        return LayerSpec(index, heads, 1, size, self.scale, v_in_k=True, v_head_size=self.kv_rank)


class LatentAttention(nn.Module):
    """Attention over the latents of all earlier tokens of the same row. Ranks split the heads; each
    has all latents."""

    name = "self_attn"

    def __init__(
        self,
        hidden: int,
        spec: LayerSpec,
        shape: LatentShape,
        context: BuildContext,
        *,
        bias: bool,
    ) -> None:
        """`spec`: of the whole model, from `LatentShape.layer_spec`. `bias`: of the projections to
        latents and of the output."""
        super().__init__()
        own = spec_of_rank(spec, context.parallel)
        heads = spec.heads
        self.shape = shape
        self.heads = own.heads
        size = shape.plain + shape.rope
        if shape.q_rank is None:
            first = context.parallel.rank * own.heads
            q = Columns(heads * size, first * size, own.heads * size)
        else:
            q = Columns(shape.q_rank, 0, shape.q_rank)
        kv = Columns(shape.kv_rank + shape.rope, 0, shape.kv_rank + shape.rope)
        self.down_proj = MergedColumnParallelLinear(hidden, {"q": q, "kv": kv}, context, bias=bias)
        self.widths = [q.size, shape.kv_rank, shape.rope]
        self.q_norm = self.q_up_proj = None
        if shape.q_rank is not None:
            self.q_norm = RMSNorm(shape.q_rank, INNER_EPS, context)
            self.q_up_proj = ColumnParallelLinear(shape.q_rank, heads * size, context, bias=False)
        self.kv_norm = RMSNorm(shape.kv_rank, INNER_EPS, context)
        self.kv_up = LatentUpLinear(shape.kv_rank, heads, shape.plain, shape.value, context)
        self.o_proj = RowParallelLinear(heads * shape.value, hidden, context, bias=bias)
        self.attn = context.make_attention(own)

    def store(self, residual: Residual, norm: Norm, rotation: Rotation) -> torch.Tensor:
        """Store the latents. Returns the queries [tokens, heads, kv_rank + rope]."""
        return self.store_latents(*self.latents(residual, norm), rotation)

    def latents(
        self, x: torch.Tensor | Residual, norm: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the latents of queries [tokens, q_rank], or queries if they have none, those of K
        and V [tokens, kv_rank], not normed yet, and K's rotary part [tokens, rope]."""
        q, latent, k_rope = torch.split(self.down_proj(x, norm), self.widths, dim=1)
        if self.q_norm is not None:
            q = self.q_norm(q.contiguous())
        return q, latent, k_rope

    def store_latents(
        self, q: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        """Store the latents of K and V, from the result of `latents`. Returns what `store` does."""
        shape = self.shape
        rank = shape.kv_rank
        if self.q_up_proj is not None:
            q = self.q_up_proj(q)
        q_plain, q_rope = torch.split(
            q.view(len(q), self.heads, -1), [shape.plain, shape.rope], dim=2
        )
        query = q.new_empty(len(q), self.heads, rank + shape.rope)
        query[..., :rank] = self.kv_up(q_plain)
        query[..., rank:] = rotated(q_rope, rotation, interleaved=shape.interleaved)
        k_rope = rotated(k_rope[:, None], rotation, interleaved=shape.interleaved)[:, 0]
        k = torch.cat((self.kv_norm(latent.contiguous()), k_rope), dim=1)
        self.attn.write(k[:, None], None)
        return query

    def add_to(
        self,
        residual: Residual,
        norm: Norm,
        rotation: Rotation,
        wanted: torch.Tensor | None = None,
    ) -> None:
        """See `Attention.add_to`."""
        out = self.attn.attend(self.store(residual, norm, rotation))  # [tokens, heads, kv_rank]
        if wanted is not None:
            residual.keep(wanted)
            out = out.index_select(0, wanted)
        values = self.kv_up.values(out)  # [tokens, heads, value]
        self.o_proj.add_to(residual, values.flatten(1))

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        layers: dict[str, Layer | tuple[Layer, *tuple[str, ...]]] = {
            "kv_a_proj_with_mqa": (self.down_proj, "kv"),
            "kv_a_layernorm": self.kv_norm,
            "kv_b_proj": self.kv_up,
            "o_proj": self.o_proj,
        }
        if self.q_norm is None or self.q_up_proj is None:
            layers["q_proj"] = (self.down_proj, "q")
        else:
            layers["q_a_proj"] = (self.down_proj, "q")
            layers["q_a_layernorm"] = self.q_norm
            layers["q_b_proj"] = self.q_up_proj
        yield from weight_rules(prefix, layers)


def rotated(x: torch.Tensor, rotation: Rotation, *, interleaved: bool) -> torch.Tensor:
    """Rotate x [tokens, heads, rope], whose pairs are neighbors if `interleaved`. The order of the
    results' numbers is the same for q and k, and no other matters."""
    if interleaved:
        x = x.reshape(*x.shape[:2], -1, 2).transpose(2, 3).flatten(2)
    return apply_rotary(x, rotation)
