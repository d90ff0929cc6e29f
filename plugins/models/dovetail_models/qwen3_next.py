"""Qwen3-Next and Qwen3.5: most layers are Gated DeltaNets, the others gated attention; feed-forwards are mixtures of experts, or dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dovetail.nn.moe import Stacked
from dovetail.nn.rotary import rope_from_config, rope_reasons_against
from dovetail.nn.state import DeltaShape
from dovetail_models.arch import experts_reasons, head_size, shape_fields
from dovetail_models.decoder import ExpertsShape
from dovetail_models.hybrid import Delta, HybridArch, HybridShape, Kind


class Qwen35(HybridArch):
    """Serves `Qwen3_5ForCausalLM`, and the text of `Qwen3_5ForConditionalGeneration`."""

    model_type = "qwen3_5_text"
    kinds: ClassVar[Mapping[str, Kind]] = {
        "linear_attention": "delta",
        "full_attention": "attention",
    }
    sizes = (
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )
    handled = frozenset(
        {
            *(
                *sizes,
                "attention_bias",
                "layer_types",
                "full_attention_interval",
            ),  # transformers makes layer_types of the last
            *("attn_output_gate", "output_gate_type"),  # checked below
            *(
                "mtp_num_hidden_layers",
                "mtp_use_dedicated_embeddings",
            ),  # of the layers that predict further tokens
            "mamba_ssm_dtype",  # states are float32 unless the engine is told otherwise
        }
    )
    interleaved = False

    def rope_reasons(self, config: Any) -> list[str]:
        parameters, size = self._rope(config), head_size(config)
        if reasons := rope_reasons_against(parameters, partial=True):
            return reasons
        rotated = rope_from_config(parameters, size, partial=True).head_size
        return (
            [
                f"partial_rotary_factor rotates {rotated} of {size} numbers of a head, which must be even"
            ]
            if rotated % 2
            else []
        )

    def _rope(self, config: Any) -> dict[str, Any]:
        """Return `rope_parameters` without those of images: the three positions of a token of text are equal."""
        return {
            key: value
            for key, value in (config.rope_parameters or {}).items()
            if not key.startswith("mrope_")
        }

    def reasons_against_fields(self, config: Any) -> list[str]:
        reasons = super().reasons_against_fields(config)
        if not getattr(config, "attn_output_gate", True):
            reasons.append("attn_output_gate = False is not implemented: attention has a gate")
        if (gate := getattr(config, "output_gate_type", None)) not in (None, "swish", "silu"):
            reasons.append(f"output_gate_type = {gate!r} is not implemented (only 'swish')")
        return reasons

    def recurrent(self, config: Any) -> Delta:
        return Delta(
            DeltaShape(*(getattr(config, name) for name in self.sizes)),
            config.rms_norm_eps,
            self.interleaved,
        )

    def shape(self, config: Any) -> HybridShape:
        bias = config.attention_bias
        fields = shape_fields(
            config,
            rope=rope_from_config(self._rope(config), head_size(config), partial=True),
            experts=self.experts(config),
        )
        gated = {
            "qk_norm": True,
            "qkv_bias": bias,
            "output_bias": bias,
            "gated": True,
            "norms_around_one": True,
        }
        return HybridShape(
            **fields, **gated, kinds=self.kinds_of(config), delta=self.recurrent(config)
        )

    def experts(self, config: Any) -> ExpertsShape | None:
        return None


class Qwen35Moe(Qwen35):
    """Serves `Qwen3_5MoeForCausalLM`, and the text of `Qwen3_5MoeForConditionalGeneration`."""

    model_type = "qwen3_5_moe_text"
    handled = Qwen35.handled | {
        *(
            "num_experts",
            "num_local_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
        ),
        *("router_aux_loss_coef", "output_router_logits"),  # only for training
        *("norm_topk_prob", "mlp_only_layers", "decoder_sparse_step"),  # checked below
    }
    stacked: Stacked | None = Stacked(optional=True)

    def reasons_against_fields(self, config: Any) -> list[str]:
        reasons = super().reasons_against_fields(config)
        if self._sparse(config):
            reasons += experts_reasons(config, "num_experts")
            if (config.shared_expert_intermediate_size or 0) < 1:
                reasons.append(
                    f"shared_expert_intermediate_size = {config.shared_expert_intermediate_size} must be at least 1"
                )
        return reasons + self._fixed(config)

    def _fixed(self, config: Any) -> list[str]:
        """Return the reasons against fields that other such models have, and transformers' code for this one doesn't read."""
        expected = {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1}
        found = {name: getattr(config, name, value) for name, value in expected.items()}
        return [
            f"{name} = {value!r} is not implemented (only {expected[name]!r})"
            for name, value in found.items()
            if value not in (None, expected[name])
        ]

    def _sparse(self, config: Any) -> frozenset[int]:
        """Return the layers with experts."""
        return frozenset(range(config.num_hidden_layers))

    def _normalizes(self, config: Any) -> bool:
        return True

    def experts(self, config: Any) -> ExpertsShape | None:
        return ExpertsShape(
            self._sparse(config),
            config.num_experts,
            config.num_experts_per_tok,
            config.moe_intermediate_size,
            self._normalizes(config),
            stacked=self.stacked,
            shared_inner=config.shared_expert_intermediate_size,
            shared="shared_expert",
            shared_gate=True,
        )


class Qwen3Next(Qwen35Moe):
    """Serves `Qwen3NextForCausalLM`."""

    model_type = "qwen3_next"
    stacked = None
    interleaved = True

    def _fixed(self, config: Any) -> list[str]:
        if (step := config.decoder_sparse_step) < 1:
            return [f"decoder_sparse_step = {step} must be at least 1"]
        return []

    def _rope(self, config: Any) -> dict[str, Any]:
        return dict(config.rope_parameters or {})

    def _sparse(self, config: Any) -> frozenset[int]:
        if not config.num_experts or config.decoder_sparse_step < 1:
            return frozenset()
        every = range(
            config.decoder_sparse_step - 1, config.num_hidden_layers, config.decoder_sparse_step
        )
        return frozenset(every) - set(config.mlp_only_layers)

    def _normalizes(self, config: Any) -> bool:
        return bool(config.norm_topk_prob)

    def experts(self, config: Any) -> ExpertsShape | None:
        return super().experts(config) if config.num_experts else None
