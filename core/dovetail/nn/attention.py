"""Grouped-query attention of a decoder: projections, rotary embedding, and the attention layer of
the backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, ParallelGroup, WeightRule
from dovetail.nn.layer import Layer
from dovetail.nn.linear import QKVParallelLinear, RowParallelLinear
from dovetail.nn.norm import Norm, QKNorm
from dovetail.nn.parameter import kv_share, share, weight_rules
from dovetail.nn.qkv import rope_and_store_kv
from dovetail.nn.residual import Residual
from dovetail.nn.rotary import Rotation


def spec_of_rank(spec: LayerSpec, group: ParallelGroup) -> LayerSpec:
    """Return the share of a layer of the whole model that a rank computes. Raises
    `UnsupportedError` if its heads can't be split."""
    if group.size == 1:
        return spec
    heads = share(spec.heads, group, "num_attention_heads")
    _, kv_heads = kv_share(spec.kv_heads, group)
    return replace(spec, heads=heads, kv_heads=kv_heads)


class Attention(nn.Module):
    """Attention over the earlier tokens of the same row (arXiv:2305.13245), with rotary embedding.

    A layer whose spec says that it `shares` another's K and V has no projections for them.
    """

    name = "self_attn"  # of the module in a checkpoint
    gated = False  # q has gates beside it: see `QKVParallelLinear`

    def __init__(
        self,
        hidden: int,
        spec: LayerSpec,
        context: BuildContext,
        *,
        bias: bool = False,
        output_bias: bool = False,
        qk_norm_eps: float | None = None,
        zero_centered: bool = False,
        inputs: int | None = None,
    ) -> None:
        """`spec`: of the whole model. `bias`: of q, k and v; `output_bias`: of the
        output. `qk_norm_eps`: norm q and k of each
        head before the rotary embedding; `zero_centered`: as of `RMSNorm`. `inputs`: width of what
        q, k and v are projected from; None: `hidden`."""
        super().__init__()
        own = spec_of_rank(spec, context.parallel)
        stores = spec.shares is None
        self.qkv_proj = QKVParallelLinear(
            inputs or hidden,
            spec.heads,
            spec.kv_heads if stores else 0,
            spec.head_size,
            context,
            bias=bias,
            gated=self.gated,
        )
        self.o_proj = RowParallelLinear(
            spec.heads * spec.head_size, hidden, context, bias=output_bias
        )
        self.qk_norm: QKNorm | None = None
        if qk_norm_eps is not None:
            self.qk_norm = QKNorm(
                own.heads,
                own.kv_heads if stores else 0,
                spec.head_size,
                qk_norm_eps,
                context,
                zero_centered=zero_centered,
            )
        self.attn = context.make_attention(own)

    def add_to(
        self,
        residual: Residual,
        norm: Norm | None,
        rotation: Rotation,
        wanted: torch.Tensor | None = None,
        output_norm: Norm | None = None,
    ) -> None:
        """Add the attention of the stream, read through `norm` if given, to the stream, through
        `output_norm` if given. `wanted` [n] int64: reduce the stream to these tokens once K and V
        of all are stored."""
        q = self.store(residual, norm, rotation)
        self.attend(residual, q, wanted, output_norm)

    def attend(
        self,
        residual: Residual,
        q: torch.Tensor,
        wanted: torch.Tensor | None = None,
        output_norm: Norm | None = None,
    ) -> None:
        """Add the attention of q [tokens, heads, head_size], which `store` returned, to the stream:
        see `add_to`."""
        out = self.attn.attend(q).flatten(1)
        self.o_proj.add_to(residual, out, wanted=wanted, norm=output_norm)

    def store(
        self, x: torch.Tensor | Residual, norm: Norm | None, rotation: Rotation
    ) -> torch.Tensor:
        """Store K and V of x [tokens, inputs]. Returns q [tokens, heads, head_size]."""
        qkv = self.qkv_proj(x, norm)
        qkv = qkv.view(len(qkv), -1, self.attn.spec.head_size)
        return rope_and_store_kv(qkv, self.qk_norm, rotation, self.attn)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        """Yield the rules for tensors whose names begin with `prefix`."""
        of_q = [part for part in self.qkv_proj.weight.parts if part not in ("k", "v")]
        layers: dict[str, Layer | tuple[Layer, *tuple[str, ...]]] = {
            "q_proj": (self.qkv_proj, *of_q),
            "o_proj": self.o_proj,
        }
        stores = self.attn.spec.shares is None
        if stores:
            layers |= {"k_proj": (self.qkv_proj, "k"), "v_proj": (self.qkv_proj, "v")}
        if self.qk_norm is not None:
            layers["q_norm"] = (self.qk_norm, "q")
            if stores:
                layers["k_norm"] = (self.qk_norm, "k")
        yield from weight_rules(prefix, layers)
