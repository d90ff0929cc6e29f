"""Llama 4, text: most layers attend within chunks of the sequence, the others to all of it without
positions; feed-forwards are dense, or mixtures in which each token has one expert.

Backends know windows, not chunks. A window of a chunk's length leaves the chunk of a query and the
one before it. Two more numbers of a head tell these apart: of k one is 1, the first in even chunks,
the second in odd ones; of q the other one is so far below 0 that keys of the other chunk have no
weight. The scores of keys in the same chunk are what they are without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, WeightRule
from dovetail.nn.attention import Attention
from dovetail.nn.decoder import Block
from dovetail.nn.feed_forward import GatedFeedForward
from dovetail.nn.moe import Experts, Router, SparseFeedForward, Stacked, choose
from dovetail.nn.norm import Norm
from dovetail.nn.parameter import weight_rules
from dovetail.nn.residual import Residual
from dovetail.nn.rotary import NO_ROPE, Rope, Rotation, apply_rotary
from dovetail_models.arch import DecoderArch, experts_reasons, head_size

_MORE = 8  # numbers that a head has more, of which two are used: backends want multiples of 8
_APART = 256.0  # what scores of keys in the other chunk are less
_KINDS = ("chunked_attention", "full_attention")


class Llama4Attention(Attention):
    """Attention within chunks of `chunk` tokens, if there are any; pairs that rotate are
    neighbors."""

    def __init__(self, config: Any, spec: LayerSpec, context: BuildContext) -> None:
        """`spec`: of the whole model, with the numbers that heads have more."""

        def make(own: LayerSpec) -> Any:
            return context.make_attention(replace(own, head_size=spec.head_size))

        size = head_size(config)
        bias = config.attention_bias
        super().__init__(
            config.hidden_size,
            replace(spec, head_size=size),
            replace(context, make_attention=make),
            bias=bias,
            output_bias=bias,
        )
        self.size = size
        self.chunk = spec.window
        self.norm_eps = config.rms_norm_eps if config.use_qk_norm else None
        self.rotates = bool(config.no_rope_layers[spec.index])
        tuned = config.attn_temperature_tuning and not self.rotates
        self.tuning = (config.floor_scale, config.attn_scale) if tuned else None

    def store(
        self, x: torch.Tensor | Residual, norm: Norm | None, rotation: Rotation
    ) -> torch.Tensor:
        spec = self.attn.spec
        qkv = self.qkv_proj(x, norm)
        qkv = qkv.view(len(qkv), -1, self.size)
        qk, v = qkv.tensor_split((spec.heads + spec.kv_heads,), dim=1)
        if self.rotates:
            pairs = qk.reshape(*qk.shape[:2], -1, 2)
            qk = apply_rotary(pairs.transpose(2, 3).flatten(2), rotation)
            if self.norm_eps is not None:
                qk = F.rms_norm(qk.float(), (self.size,), None, self.norm_eps).to(v.dtype)
        q, k = qk.tensor_split((spec.heads,), dim=1)
        positions = rotation.positions
        if self.tuning is not None:
            floor, scale = self.tuning
            steps = torch.floor((positions + 1).float() / floor)
            q = (q * (torch.log1p(steps) * scale + 1)[:, None, None]).to(v.dtype)
        if self.chunk is not None:
            is_odd = positions // self.chunk % 2  # [tokens]
            sides = torch.stack([1 - is_odd, is_odd], dim=-1)
            q = _with_more(q, (sides - 1) * (_APART / spec.scale))
            k = _with_more(k, sides)
            v = F.pad(v, (0, _MORE))
        self.attn.write(k, v)
        return q

    def attend(
        self,
        residual: Residual,
        q: torch.Tensor,
        wanted: torch.Tensor | None = None,
        output_norm: Norm | None = None,
    ) -> None:
        out = self.attn.attend(q)[..., : self.size].flatten(1)
        self.o_proj.add_to(residual, out, wanted=wanted, norm=output_norm)


def _with_more(x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """Return x [tokens, heads, head_size] with two more numbers [tokens, 2] of each head, and
    zeros."""
    last = F.pad(more.to(x.dtype), (0, _MORE - 2))[:, None]
    return torch.cat([x, last.expand(-1, x.shape[1], -1)], dim=-1)


class Llama4Experts(SparseFeedForward):
    """Experts that read a token times the sigmoid of its logit, mostly one of each token, and a
    feed-forward that all go through."""

    router_name = "router"
    shared_name = "shared_expert"
    per_token = 1

    def add_to(self, residual: Residual, norm: Norm) -> None:
        """See `GatedFeedForward.add_to`."""
        x = residual.normed(norm)
        logits = self.router(x)
        ids, _ = choose(logits, self.per_token, normalize=True)
        weights = logits.gather(1, ids.long()).sigmoid().to(x.dtype)
        if self.shared is not None:
            self.shared.down_proj.add_to(residual, self.inner_of_shared(self.shared, x))
        whole = torch.ones_like(ids[:, :1], dtype=torch.float32)
        for one, weight in zip(ids.unbind(1), weights.unbind(1), strict=True):
            self.experts.add_to(residual, x * weight[:, None], one[:, None].contiguous(), whole)


class Llama4Block(Block[Llama4Attention]):
    """Block with a checkpoint's name for its feed-forward."""

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        yield from weight_rules(
            prefix,
            {"input_layernorm": self.input_norm, "post_attention_layernorm": self.mlp_norm},
        )
        yield from self.attention.weights(f"{prefix}self_attn.")
        yield from self.mlp.weights(f"{prefix}feed_forward.")


class Llama4(DecoderArch):
    """Serves `Llama4ForCausalLM`, and the text of `Llama4ForConditionalGeneration`."""

    model_type = "llama4_text"
    handled = frozenset(
        {
            *("attention_bias", "attention_chunk_size", "layer_types", "no_rope_layers"),
            "no_rope_layer_interval",  # no_rope_layers says it
            *("attn_temperature_tuning", "floor_scale", "attn_scale", "use_qk_norm"),
            *("moe_layers", "intermediate_size_mlp", "num_local_experts", "num_experts_per_tok"),
            "interleave_moe_layer_step",  # moe_layers says it
            *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),  # training
        }
    )

    def reasons_against_fields(self, config: Any) -> list[str]:
        reasons = super().reasons_against_fields(config)
        layers = config.num_hidden_layers
        for name in ("layer_types", "no_rope_layers"):
            if len(getattr(config, name)) != layers:
                reasons.append(f"{name} has other than num_hidden_layers = {layers} entries")
        for kind in sorted(set(config.layer_types) - set(_KINDS)):
            reasons.append(f"layer_types: {kind!r} is not implemented (only {', '.join(_KINDS)})")
        if _KINDS[0] in config.layer_types and (config.attention_chunk_size or 0) < 1:
            reasons.append(
                f"attention_chunk_size = {config.attention_chunk_size} must be at least 1"
            )
        if config.attn_temperature_tuning and config.floor_scale <= 0:
            reasons.append(f"floor_scale = {config.floor_scale} must be more than 0")
        if not config.moe_layers:
            return reasons
        return reasons + experts_reasons(config, "num_local_experts", "intermediate_size")

    def spec(self, config: Any, index: int) -> LayerSpec:
        spec = super().spec(config, index)
        if config.layer_types[index] != _KINDS[0]:
            return spec
        size = spec.head_size + _MORE
        return replace(spec, head_size=size, window=config.attention_chunk_size)

    def rope(self, config: Any, index: int) -> Rope:
        return super().rope(config, index) if config.no_rope_layers[index] else NO_ROPE

    def block(self, config: Any, spec: LayerSpec, context: BuildContext) -> Llama4Block:
        hidden = config.hidden_size
        inner = config.intermediate_size
        sparse = spec.index in config.moe_layers
        mlp = GatedFeedForward(hidden, inner if sparse else config.intermediate_size_mlp, context)
        return Llama4Block(
            self.norm(config, context),
            Llama4Attention(config, spec, context),
            self.norm(config, context),
            self.experts(config, mlp, context) if sparse else mlp,
        )

    def experts(
        self, config: Any, shared: GatedFeedForward, context: BuildContext
    ) -> Llama4Experts:
        """Return a mixture beside `shared`."""
        hidden = config.hidden_size
        count = config.num_local_experts
        experts = Experts(
            hidden,
            config.intermediate_size,
            count,
            context,
            stacked=Stacked(transposed=True),
            per_token=1,
        )
        router = Router(hidden, count, context)
        mixture = Llama4Experts(router, experts, normalize=True, shared=shared)
        mixture.per_token = config.num_experts_per_tok
        return mixture
