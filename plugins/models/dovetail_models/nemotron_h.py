"""Nemotron-H: each layer is only one of Mamba2, attention without positions, a feed-forward, or a
mixture of experts, neither with gates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, WeightRule
from dovetail.nn.activation import RELU2
from dovetail.nn.attention import Attention
from dovetail.nn.decoder import AnyBlock, Decoder, FeedForward, Mixer
from dovetail.nn.linear import ColumnParallelLinear, RowParallelLinear
from dovetail.nn.norm import Norm, RMSNorm
from dovetail.nn.parameter import weight_rules
from dovetail.nn.residual import Residual
from dovetail.nn.rotary import NO_ROPE, Rope, Rotation
from dovetail.nn.state import Mamba2Shape
from dovetail_models.arch import experts_reasons
from dovetail_models.grouped import group_reasons, grouped_feed_forward, sigmoid_grouping
from dovetail_models.hybrid import HybridArch, Kind, Mamba, MambaMixer

# fields that transformers' code for this model doesn't read -> the only value implemented
_FIXED: dict[str, Any] = {
    "attention_bias": False,
    "mamba_proj_bias": False,
    "n_shared_experts": 1,
    "residual_in_fp32": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "time_step_limit": (0.0, math.inf),
}


class MixerBlock(nn.Module):
    """Layer that mixes tokens."""

    mixes = True

    def __init__(self, norm: Norm, mixer: Mixer) -> None:
        super().__init__()
        self.norm = norm
        self.mixer = mixer

    def add_to(
        self, residual: Residual, rotation: Rotation, wanted: torch.Tensor | None = None
    ) -> None:
        """See `Block.add_to`."""
        self.mixer.add_to(residual, self.norm, rotation, wanted)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        yield from weight_rules(prefix, {"norm": self.norm})
        yield from self.mixer.weights(f"{prefix}mixer.")


class FeedForwardBlock(nn.Module):
    """Layer that computes on tokens individually."""

    mixes = False

    def __init__(self, norm: Norm, mlp: FeedForward) -> None:
        super().__init__()
        self.norm = norm
        self.mlp = mlp

    def add_to(
        self, residual: Residual, rotation: Rotation, wanted: torch.Tensor | None = None
    ) -> None:
        """See `Block.add_to`."""
        self.mlp.add_to(residual, self.norm)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        yield from weight_rules(prefix, {"norm": self.norm})
        yield from self.mlp.weights(f"{prefix}mixer.")


class SquaredReluFeedForward(nn.Module):
    """down(relu(up(x))²)."""

    def __init__(self, hidden: int, inner: int, context: BuildContext, *, bias: bool) -> None:
        super().__init__()
        self.up_proj = ColumnParallelLinear(hidden, inner, context, bias=bias)
        self.down_proj = RowParallelLinear(inner, hidden, context, bias=bias)

    def add_to(self, residual: Residual, norm: Norm) -> None:
        """See `GatedFeedForward.add_to`."""
        self.down_proj.add_to(residual, self.inner(residual, norm))

    def inner(self, x: torch.Tensor | Residual, norm: Norm | None = None) -> torch.Tensor:
        """Return the input of `down_proj`."""
        return self.up_proj(x, norm).relu_().square_()

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        yield from weight_rules(prefix, {"up_proj": self.up_proj, "down_proj": self.down_proj})


class NemotronDecoder(Decoder):
    embedding_name = "backbone.embeddings"
    layers_name = "backbone.layers"
    norm_name = "backbone.norm_f"


class NemotronH(HybridArch):
    """Serves `NemotronHForCausalLM`."""

    model_type = "nemotron_h"
    kinds: ClassVar[Mapping[str, Kind]] = {
        "linear_attention": "mamba",
        "full_attention": "attention",
        "mlp": "mlp",
        "moe": "experts",
    }
    sizes = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
    decoder = NemotronDecoder
    activation_field = "mlp_hidden_act"
    activations = (RELU2,)
    handled = frozenset(
        {
            *(
                *sizes,
                *_FIXED,
                "layers_block_type",
                "layer_norm_epsilon",
                "mlp_bias",
                "use_bias",
                "use_conv_bias",
                "time_step_min",
            ),
            *("mamba_hidden_act", "moe_latent_size"),  # checked below
            *(
                "n_routed_experts",
                "num_experts_per_tok",
                "moe_intermediate_size",
                "moe_shared_expert_intermediate_size",
            ),
            *("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"),
            *(
                "expand",
                "chunk_size",
                "use_mamba_kernels",
                "moe_shared_expert_overlap",
                "num_logits_to_keep",
            ),  # of other code
            "mamba_ssm_cache_dtype",  # states are float32 unless the engine is told otherwise
            *(
                "time_step_max",
                "time_step_floor",
                "rescale_prenorm_residual",
                "output_router_logits",
            ),  # only for training
            *(
                "num_nextn_predict_layers",
                "mtp_layers_block_type",
            ),  # of the layers that predict further tokens
        }
    )

    def rope_reasons(self, config: Any) -> list[str]:
        return []

    def reasons_against_fields(self, config: Any) -> list[str]:
        reasons = super().reasons_against_fields(config)
        for name, only in _FIXED.items():
            value = getattr(config, name)
            if (tuple(value) if isinstance(value, list) else value) != only:
                reasons.append(
                    f"{name} = {value!r} is not implemented (only {only!r}): transformers, the "
                    f"reference, doesn't read it"
                )
        if config.mamba_hidden_act != "silu":
            reasons.append(
                f"mamba_hidden_act = {config.mamba_hidden_act!r} is not implemented (only 'silu')"
            )
        if "moe" in config.layers_block_type:
            if config.moe_latent_size is not None:
                reasons.append(
                    f"moe_latent_size = {config.moe_latent_size}: experts of a smaller size than "
                    f"the stream are not implemented"
                )
            if config.moe_shared_expert_intermediate_size < 1:
                reasons.append(
                    f"moe_shared_expert_intermediate_size = "
                    f"{config.moe_shared_expert_intermediate_size} must be at least 1"
                )
            reasons += experts_reasons(config, "n_routed_experts") or group_reasons(config, 2)
        return reasons

    def recurrent(self, config: Any) -> Mamba:
        shape = Mamba2Shape(*(getattr(config, name) for name in self.sizes))
        # transformers limits steps to this minimum in prompts, and not where it decodes with a
        # cache; here they always are
        limits = (config.time_step_min, math.inf)
        return Mamba(
            shape,
            config.layer_norm_epsilon,
            limits,
            conv_bias=config.use_conv_bias,
            bias=config.use_bias,
        )

    def rope(self, config: Any, index: int) -> Rope:
        return NO_ROPE

    def norm(self, config: Any, context: BuildContext) -> RMSNorm:
        return RMSNorm(config.hidden_size, config.layer_norm_epsilon, context)

    def block(self, config: Any, spec: LayerSpec, context: BuildContext) -> AnyBlock:
        norm = self.norm(config, context)
        match self.kinds_of(config)[spec.index]:
            case "attention":
                return MixerBlock(norm, Attention(config.hidden_size, spec, context))
            case "mamba":
                mamba = self.recurrent(config)
                return MixerBlock(norm, MambaMixer(config.hidden_size, spec.index, mamba, context))
            case "experts":
                return FeedForwardBlock(norm, self.experts(config, context))
            case _:
                inner = config.intermediate_size
                return FeedForwardBlock(norm, self.dense(config, inner, context))

    def dense(self, config: Any, inner: int, context: BuildContext) -> SquaredReluFeedForward:
        return SquaredReluFeedForward(config.hidden_size, inner, context, bias=config.mlp_bias)

    def experts(self, config: Any, context: BuildContext) -> FeedForward:
        return grouped_feed_forward(
            config,
            sigmoid_grouping(config),
            context,
            normalize=bool(config.norm_topk_prob),
            shared=self.dense(config, config.moe_shared_expert_intermediate_size, context),
            activation=RELU2,
        )

    def skipped(self, config: Any) -> list[str]:
        return ["mtp.*"]  # predicts further tokens
