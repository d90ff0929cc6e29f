"""LFM2: most layers are gated short convolutions, the others attention; feed-forwards are dense, or
mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, ParallelGroup, WeightRule
from dovetail.api.state import StateSpec, StateTensor
from dovetail.errors import UnsupportedError
from dovetail.nn.attention import Attention
from dovetail.nn.decoder import Block, Decoder, FeedForward, Mixer
from dovetail.nn.feed_forward import GatedFeedForward
from dovetail.nn.linear import MergedColumnParallelLinear, RowParallelLinear
from dovetail.nn.moe import Experts, SparseFeedForward
from dovetail.nn.norm import Norm, RMSNorm
from dovetail.nn.parameter import share, weight_rules
from dovetail.nn.residual import Residual
from dovetail.nn.rotary import Rotation
from dovetail.nn.state import ShortConv
from dovetail_models.arch import experts_reasons
from dovetail_models.grouped import GroupedRouter, Grouping
from dovetail_models.hybrid import HybridArch, Kind, split


@dataclass(frozen=True, slots=True)
class Convolution:
    """Hyperparameters of gated convolutions. `kernel`: tokens that one sees.

    Raises `UnsupportedError` for sizes that aren't implemented.
    """

    channels: int
    kernel: int
    bias: bool  # of the convolution, and of the projections

    def __post_init__(self) -> None:
        if self.kernel < 2:
            raise UnsupportedError(
                f"a convolution over {self.kernel} tokens is not implemented: at least 2"
            )

    def on_rank(self, group: ParallelGroup) -> Convolution:
        """Return the sizes of this rank. Raises `UnsupportedError` if channels can't be split."""
        return replace(self, channels=share(self.channels, group, "hidden_size"))

    def spec(self, index: int) -> StateSpec:
        """Return the state of layer `index`: the convolution's inputs."""
        inputs = StateTensor(rows=self.channels, row_size=self.kernel - 1, keeps_inputs=True)
        return StateSpec(index=index, tensors=(inputs,), drafts=True)


class GatedConv(nn.Module):
    """out(c * conv(b * x)), where b, c and x are projections of the stream."""

    name = "conv"

    def __init__(
        self, hidden: int, index: int, convolution: Convolution, context: BuildContext
    ) -> None:
        super().__init__()
        own = convolution.on_rank(context.parallel)
        channels = own.channels
        parts = dict(split({"b": channels, "c": channels, "x": channels}, context.parallel))
        bias = own.bias
        self.in_proj = MergedColumnParallelLinear(hidden, parts, context, bias=bias)
        self.conv = ShortConv({"x": channels}, own.kernel, context, bias=bias, activation=None)
        self.out_proj = RowParallelLinear(hidden, hidden, context, bias=bias)
        self.state = context.make_state(own.spec(index))

    def add_to(
        self, residual: Residual, norm: Norm, rotation: Rotation, wanted: torch.Tensor | None
    ) -> None:
        """See `Attention.add_to`."""
        b, c, x = self.in_proj(residual, norm).chunk(3, dim=1)
        self.out_proj.add_to(residual, c * self.conv(b * x, self.state, 0), wanted=wanted)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        in_proj = (self.in_proj, *self.in_proj.weight.parts)
        yield from weight_rules(prefix, {"in_proj": in_proj, "out_proj": self.out_proj})
        yield from self.conv.weights(f"{prefix}conv.")


class Lfm2Attention(Attention):
    """Attention with a checkpoint's names for its output and its norms."""

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        assert self.qk_norm is not None
        yield from weight_rules(
            prefix,
            {
                "q_proj": (self.qkv_proj, "q"),
                "k_proj": (self.qkv_proj, "k"),
                "v_proj": (self.qkv_proj, "v"),
                "out_proj": self.o_proj,
                "q_layernorm": (self.qk_norm, "q"),
                "k_layernorm": (self.qk_norm, "k"),
            },
        )


class Lfm2FeedForward(GatedFeedForward):
    """Dense feed-forward with a checkpoint's names."""

    def weights(
        self, prefix: str, gate: str = "w1", up: str = "w3", down: str = "w2"
    ) -> Iterator[WeightRule]:
        yield from super().weights(prefix, gate, up, down)


class Lfm2SparseFeedForward(SparseFeedForward):
    """Mixture with a checkpoint's names; experts are chosen as DeepSeek-V3's of one group are."""

    def __init__(self, config: Any, context: BuildContext) -> None:
        hidden = config.hidden_size
        count = config.num_experts
        scale = config.routed_scaling_factor
        corrected = config.use_expert_bias
        grouping = Grouping("sigmoid", 1, 1, 1, scale, corrected, eps=1e-6)
        inner = config.moe_intermediate_size
        per_token = config.num_experts_per_tok
        router = GroupedRouter(hidden, count, grouping, context)
        experts = Experts(hidden, inner, count, context, per_token=per_token)
        super().__init__(router, experts, normalize=config.norm_topk_prob)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        assert isinstance(self.router, GroupedRouter)
        yield WeightRule(f"{prefix}gate.weight", self.router.weight)
        correction = self.router.e_score_correction_bias
        if correction is not None:
            yield WeightRule(f"{prefix}expert_bias", correction)
        yield from self.experts.weights(f"{prefix}experts.", "w1", "w3", "w2")


class Lfm2Block(Block[Mixer]):
    """Block with a checkpoint's names for its norms and its feed-forward."""

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        yield from weight_rules(
            prefix, {"operator_norm": self.input_norm, "ffn_norm": self.mlp_norm}
        )
        yield from self.attention.weights(f"{prefix}{self.attention.name}.")
        yield from self.mlp.weights(f"{prefix}feed_forward.")


class Lfm2Decoder(Decoder):
    norm_name = "model.embedding_norm"


class Lfm2(HybridArch):
    """Serves `Lfm2ForCausalLM`."""

    model_type = "lfm2"
    kinds: ClassVar[Mapping[str, Kind]] = {"conv": "conv", "full_attention": "attention"}
    sizes = ("hidden_size", "conv_L_cache")
    decoder = Lfm2Decoder
    handled = frozenset(
        {
            *(*sizes, "conv_bias", "layer_types", "norm_eps"),
            "full_attn_idxs",  # layer_types says it
            *("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"),
            *("block_dim", "conv_dim", "conv_dim_out", "num_heads", "block_norm_eps"),  # checked
            *("block_use_swiglu", "use_pos_enc"),  # checked below
            *("block_mlp_init_scale", "block_out_init_scale"),  # only for training
            *("block_use_xavier_init", "conv_use_xavier_init"),
            "theta",  # rope_parameters says it
        }
    )

    def reasons_against_fields(self, config: Any) -> list[str]:
        expected = {
            **dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out"), config.hidden_size),
            "num_heads": config.num_attention_heads,
            "block_norm_eps": config.norm_eps,
            "block_use_swiglu": True,
            "use_pos_enc": True,
        }
        found = {name: getattr(config, name, value) for name, value in expected.items()}
        return super().reasons_against_fields(config) + [
            f"{name} = {value!r} is not implemented (only {expected[name]!r}): transformers, the "
            f"reference, doesn't read it"
            for name, value in found.items()
            if value != expected[name]
        ]

    def recurrent(self, config: Any) -> Convolution:
        return Convolution(config.hidden_size, config.conv_L_cache, config.conv_bias)

    def norm(self, config: Any, context: BuildContext) -> RMSNorm:
        return RMSNorm(config.hidden_size, config.norm_eps, context)

    def block(self, config: Any, spec: LayerSpec, context: BuildContext) -> Lfm2Block:
        hidden = config.hidden_size
        mixer: Mixer
        if self.kinds_of(config)[spec.index] == "attention":
            mixer = Lfm2Attention(hidden, spec, context, qk_norm_eps=config.norm_eps)
        else:
            mixer = GatedConv(hidden, spec.index, self.recurrent(config), context)
        return Lfm2Block(
            self.norm(config, context),
            mixer,
            self.norm(config, context),
            self.feed_forward(config, spec.index, context),
        )

    def feed_forward(self, config: Any, index: int, context: BuildContext) -> FeedForward:
        """Return the feed-forward of a layer."""
        return Lfm2FeedForward(config.hidden_size, _inner(config), context)


class Lfm2Moe(Lfm2):
    """Serves `Lfm2MoeForCausalLM`."""

    model_type = "lfm2_moe"
    handled = Lfm2.handled | {
        *("num_dense_layers", "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
        *("use_expert_bias", "routed_scaling_factor", "norm_topk_prob"),
        "output_router_logits",  # only for training
    }

    def reasons_against_fields(self, config: Any) -> list[str]:
        return super().reasons_against_fields(config) + experts_reasons(config, "num_experts")

    def feed_forward(self, config: Any, index: int, context: BuildContext) -> FeedForward:
        if index < config.num_dense_layers:
            return Lfm2FeedForward(config.hidden_size, config.intermediate_size, context)
        return Lfm2SparseFeedForward(config, context)


def _inner(config: Any) -> int:
    """Return the size of the feed-forward, which some configs give as that of one without gates."""
    if not config.block_auto_adjust_ff_dim:
        return int(config.intermediate_size)
    inner = int(2 * config.intermediate_size / 3)
    multiple = int(config.block_multiple_of)
    return -(-int(config.block_ffn_dim_multiplier * inner) // multiple) * multiple
