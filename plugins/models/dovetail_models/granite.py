"""Granite 4: most layers are Mamba2, the others attention; each has an MLP that all tokens go through, perhaps beside experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dovetail.nn.moe import Stacked
from dovetail.nn.rotary import Rope, rope_from_config, rope_reasons_against
from dovetail.nn.state import Mamba2Shape
from dovetail_models.arch import experts_reasons, head_size, shape_fields
from dovetail_models.decoder import ExpertsShape
from dovetail_models.hybrid import HybridArch, HybridShape, Kind, Mamba

_MULTIPLIERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
)
_NAMES = (
    (".mlp.gate.", ".block_sparse_moe.router.layer."),
    (".mlp.experts.gate_up_proj", ".block_sparse_moe.input_linear.weight"),
    (".mlp.experts.down_proj", ".block_sparse_moe.output_linear.weight"),
    (".mlp.shared_experts.", ".mlp."),
    (".mlp.gate_proj", ".shared_mlp.input_linear"),
    (".mlp.up_proj", ".shared_mlp.input_linear"),
    (".mlp.down_proj", ".shared_mlp.output_linear"),
)


class GraniteMoeHybrid(HybridArch):
    """Serves `GraniteMoeHybridForCausalLM`.

    In transformers a number r multiplies what each layer adds to the stream. The stream here is 1 / r of that one, so that nothing need be
    multiplied: the embeddings are divided by r, and the eps of norms by r²."""

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
                f"position_embedding_type = {kind!r} is not implemented (only None, 'nope' and 'rope')"
            )
        for name in _MULTIPLIERS:
            if not (value := getattr(config, name)) or value < 0:
                reasons.append(f"{name} = {value!r} must be more than 0")
        if config.mamba_n_heads * config.mamba_d_head != config.mamba_expand * config.hidden_size:
            reasons.append(
                f"mamba_expand = {config.mamba_expand}: mamba_n_heads * mamba_d_head must be mamba_expand * hidden_size"
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

    def shape(self, config: Any) -> HybridShape:
        size, bias, r = head_size(config), config.attention_bias, config.residual_multiplier
        rope = (
            rope_from_config(config.rope_parameters, size)
            if config.position_embedding_type == "rope"
            else Rope(1.0, 0)
        )
        return HybridShape(
            **shape_fields(
                config,
                rope=rope,
                norm_eps=config.rms_norm_eps / r**2,
                embedding_scale=config.embedding_multiplier / r,
                scale=config.attention_multiplier,
                logit_divisor=config.logits_scaling,
                qkv_bias=bias,
                output_bias=bias,
                intermediate_size=config.shared_intermediate_size,
                mlp_stacked=True,
                experts=self._experts(config),
            ),
            kinds=self.kinds_of(config),
            mamba=self.recurrent(config),
            renamed=_NAMES,
        )

    def _experts(self, config: Any) -> ExpertsShape | None:
        if not config.num_local_experts:
            return None
        return ExpertsShape(
            frozenset(range(config.num_hidden_layers)),
            config.num_local_experts,
            config.num_experts_per_tok,
            config.intermediate_size,
            normalize=True,
            stacked=Stacked(),
            shared_inner=config.shared_intermediate_size,
        )
