"""Nemotron-H: each layer is only one of Mamba2, attention without positions, a feed-forward, or a mixture of experts, neither with gates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from dovetail.nn.activation import RELU2
from dovetail.nn.rotary import Rope
from dovetail.nn.state import Mamba2Shape
from dovetail_models.arch import experts_reasons, shape_fields
from dovetail_models.decoder import ExpertsShape
from dovetail_models.grouped import Grouping, group_reasons
from dovetail_models.hybrid import HybridArch, HybridShape, Kind, Mamba

_NAMES = (
    ("model.embed_tokens.", "backbone.embeddings."),
    ("model.norm.", "backbone.norm_f."),
    ("model.layers.", "backbone.layers."),
    (".input_layernorm.", ".norm."),
    (".post_attention_layernorm.", ".norm."),
    (".self_attn.", ".mixer."),
    (".mamba.", ".mixer."),
    (".mlp.", ".mixer."),
)
_FIXED: dict[
    str, Any
] = {  # fields that transformers' code for this model doesn't read -> the only value implemented
    "attention_bias": False,
    "mamba_proj_bias": False,
    "n_shared_experts": 1,
    "residual_in_fp32": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "time_step_limit": (0.0, math.inf),
}


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
                    f"{name} = {value!r} is not implemented (only {only!r}): transformers, the reference, doesn't read it"
                )
        if config.mamba_hidden_act != "silu":
            reasons.append(
                f"mamba_hidden_act = {config.mamba_hidden_act!r} is not implemented (only 'silu')"
            )
        if "moe" in config.layers_block_type:
            if config.moe_latent_size is not None:
                reasons.append(
                    f"moe_latent_size = {config.moe_latent_size}: experts of a smaller size than the stream are not implemented"
                )
            if config.moe_shared_expert_intermediate_size < 1:
                reasons.append(
                    f"moe_shared_expert_intermediate_size = {config.moe_shared_expert_intermediate_size} must be at least 1"
                )
            reasons += experts_reasons(config, "n_routed_experts") or group_reasons(config, 2)
        return reasons

    def recurrent(self, config: Any) -> Mamba:
        shape = Mamba2Shape(*(getattr(config, name) for name in self.sizes))
        # transformers limits steps to this minimum in prompts, and not where it decodes with a cache; here they always are
        limits = (config.time_step_min, math.inf)
        return Mamba(
            shape,
            config.layer_norm_epsilon,
            limits,
            conv_bias=config.use_conv_bias,
            bias=config.use_bias,
        )

    def shape(self, config: Any) -> HybridShape:
        fields = shape_fields(
            config,
            rope=Rope(1.0, 0),
            norm_eps=config.layer_norm_epsilon,
            activation=config.mlp_hidden_act,
            mlp_bias=config.mlp_bias,
            experts=self._experts(config),
        )
        return HybridShape(
            **fields,
            kinds=self.kinds_of(config),
            mamba=self.recurrent(config),
            single=True,
            renamed=_NAMES,
        )

    def _experts(self, config: Any) -> ExpertsShape | None:
        layers = frozenset(
            index for index, kind in enumerate(config.layers_block_type) if kind == "moe"
        )
        if not layers:
            return None
        return ExpertsShape(
            layers,
            config.n_routed_experts,
            config.num_experts_per_tok,
            config.moe_intermediate_size,
            bool(config.norm_topk_prob),
            activation=RELU2,
            shared_inner=config.moe_shared_expert_intermediate_size,
            grouping=Grouping(
                "sigmoid",
                config.n_group or 1,
                config.topk_group or 1,
                2,
                config.routed_scaling_factor,
                corrected=True,
            ),
        )
