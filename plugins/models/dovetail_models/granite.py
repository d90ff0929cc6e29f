"""Granite 4: most layers are Mamba2, the others attention; each has an MLP that all tokens go
through, perhaps beside experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, WeightRule
from dovetail.nn.attention import Attention
from dovetail.nn.decoder import Block, Mixer
from dovetail.nn.embedding import LMHead, ScaledEmbedding, VocabParallelEmbedding
from dovetail.nn.feed_forward import GatedFeedForward
from dovetail.nn.moe import Experts, Router, SparseFeedForward, Stacked
from dovetail.nn.norm import RMSNorm
from dovetail.nn.parameter import weight_rules
from dovetail.nn.rotary import Rope, rope_reasons_against
from dovetail.nn.state import Mamba2Shape
from dovetail_models.arch import experts_reasons
from dovetail_models.hybrid import HybridArch, Kind, Mamba, MambaMixer

_MULTIPLIERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
)


class GraniteMoeHybrid(HybridArch):
    """Serves `GraniteMoeHybridForCausalLM`.

    In transformers a number r multiplies what each layer adds to the stream. The stream here is 1 /
    r of that one, so that nothing need be multiplied: the embeddings are divided by r, and the eps
    of norms by r²."""

    model_type = "granitemoehybrid"
    kinds: ClassVar[Mapping[str, Kind]] = {
        "linear_attention": "mamba",
        "full_attention": "attention",
    }
    sizes = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
    handled = frozenset(
        {
            *(
                *sizes,
                *_MULTIPLIERS,
                "mamba_expand",
                "mamba_chunk_size",
                "mamba_conv_bias",
                "mamba_proj_bias",
                "time_step_limit",
            ),
            *(
                "attention_bias",
                "layer_types",
                "position_embedding_type",
                "shared_intermediate_size",
            ),
            *(
                "num_local_experts",
                "num_experts_per_tok",
                "output_router_logits",
                "router_aux_loss_coef",
            ),  # the last two are only for training
        }
    )

    def rope_reasons(self, config: Any) -> list[str]:
        return (
            rope_reasons_against(config.rope_parameters or {})
            if config.position_embedding_type == "rope"
            else []
        )

    def reasons_against_fields(self, config: Any) -> list[str]:
        reasons = super().reasons_against_fields(config)
        if (kind := config.position_embedding_type) not in (None, "nope", "rope"):
            reasons.append(
                f"position_embedding_type = {kind!r} is not implemented (only None, 'nope' and "
                f"'rope')"
            )
        for name in _MULTIPLIERS:
            if not (value := getattr(config, name)) or value < 0:
                reasons.append(f"{name} = {value!r} must be more than 0")
        if config.mamba_n_heads * config.mamba_d_head != config.mamba_expand * config.hidden_size:
            reasons.append(
                f"mamba_expand = {config.mamba_expand}: mamba_n_heads * mamba_d_head must be "
                f"mamba_expand * hidden_size"
            )
        if (config.shared_intermediate_size or 0) < 1:
            reasons.append(
                f"shared_intermediate_size = {config.shared_intermediate_size} must be at least 1"
            )
        return reasons + (
            experts_reasons(config, "num_local_experts", "intermediate_size")
            if config.num_local_experts
            else []
        )

    def recurrent(self, config: Any) -> Mamba:
        low, high = config.time_step_limit
        shape = Mamba2Shape(*(getattr(config, name) for name in self.sizes))
        return Mamba(
            shape,
            config.rms_norm_eps,
            (low, high),
            conv_bias=config.mamba_conv_bias,
            bias=config.mamba_proj_bias,
        )

    def rope(self, config: Any, index: int) -> Rope:
        has_rope = config.position_embedding_type == "rope"
        return super().rope(config, index) if has_rope else Rope(1.0, 0)

    def spec(self, config: Any, index: int) -> LayerSpec:
        return replace(super().spec(config, index), scale=config.attention_multiplier)

    def norm(self, config: Any, context: BuildContext) -> RMSNorm:
        eps = config.rms_norm_eps / config.residual_multiplier**2
        return RMSNorm(config.hidden_size, eps, context)

    def embedding(self, config: Any, context: BuildContext) -> VocabParallelEmbedding:
        # Unlike Gemma's, transformers' code multiplies by a number that isn't rounded.
        scale = config.embedding_multiplier / config.residual_multiplier
        if scale == 1:
            return super().embedding(config, context)
        return ScaledEmbedding(config.vocab_size, config.hidden_size, context, scale=scale)

    def head(
        self, config: Any, context: BuildContext, tied: VocabParallelEmbedding | None
    ) -> LMHead:
        if config.logits_scaling == 1:
            return super().head(config, context, tied)
        return DividedHead(config, context, tied)

    def block(self, config: Any, spec: LayerSpec, context: BuildContext) -> GraniteBlock:
        hidden = config.hidden_size
        inner = config.shared_intermediate_size
        bias = config.attention_bias
        mixer: Mixer
        if self.kinds_of(config)[spec.index] == "attention":
            mixer = Attention(hidden, spec, context, bias=bias, output_bias=bias)
        else:
            mixer = MambaMixer(hidden, spec.index, self.recurrent(config), context)
        mlp = GatedFeedForward(hidden, inner, context, stacked=True)
        return GraniteBlock(
            self.norm(config, context),
            mixer,
            self.norm(config, context),
            experts(config, mlp, context) if config.num_local_experts else mlp,
        )

    def skipped(self, config: Any) -> list[str]:
        return ["mtp.*"]


class GraniteBlock(Block[Mixer]):
    """Block with Granite's names."""

    mlp: GatedFeedForward | SparseFeedForward

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        yield from weight_rules(
            prefix,
            {"input_layernorm": self.input_norm, "post_attention_layernorm": self.mlp_norm},
        )
        yield from self.attention.weights(f"{prefix}{self.attention.name}.")
        shared: Any = self.mlp
        if isinstance(self.mlp, SparseFeedForward):
            own = f"{prefix}block_sparse_moe."
            yield from weight_rules(own, {"router.layer": self.mlp.router})
            yield from self.mlp.experts.weights(
                own, both="input_linear.weight", down="output_linear.weight"
            )
            shared = self.mlp.shared
        names = ("input_linear", "input_linear", "output_linear")
        yield from shared.weights(f"{prefix}shared_mlp.", *names)


class DividedHead(LMHead):
    """Output layer whose logits are divided by a number."""

    def __init__(
        self, config: Any, context: BuildContext, tied: VocabParallelEmbedding | None
    ) -> None:
        super().__init__(config.vocab_size, config.hidden_size, context, tied=tied)
        self.divisor = config.logits_scaling

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden).div_(self.divisor)


def experts(config: Any, shared: GatedFeedForward, context: BuildContext) -> SparseFeedForward:
    """Return a mixture beside `shared`."""
    hidden = config.hidden_size
    count = config.num_local_experts
    router = Router(hidden, count, context)
    own = Experts(
        hidden,
        config.intermediate_size,
        count,
        context,
        stacked=Stacked(),
        per_token=config.num_experts_per_tok,
    )
    return SparseFeedForward(router, own, normalize=True, shared=shared)
