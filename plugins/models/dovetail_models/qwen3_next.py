"""Qwen3-Next and Qwen3.5: most layers are Gated DeltaNets, the others gated attention;
feed-forwards are mixtures of experts, or dense."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, WeightRule
from dovetail.nn.activation import sigmoid_mul
from dovetail.nn.attention import Attention
from dovetail.nn.build import of_runtime
from dovetail.nn.decoder import Block, FeedForward, Mixer
from dovetail.nn.feed_forward import GatedFeedForward
from dovetail.nn.moe import Experts, Router, SharedFeedForward, SparseFeedForward, Stacked
from dovetail.nn.norm import Norm, RMSNorm
from dovetail.nn.parameter import weight_rules
from dovetail.nn.qkv import rope_and_store_kv
from dovetail.nn.residual import Residual
from dovetail.nn.rotary import Rope, Rotation, rope_from_config
from dovetail.nn.state import DeltaShape
from dovetail_models.arch import experts_reasons, head_size, partial_rope_reasons
from dovetail_models.hybrid import Delta, DeltaMixer, HybridArch, Kind


class GatedAttention(Attention):
    """Attention whose output is multiplied by the sigmoid of a gate, which the checkpoint has with
    q."""

    gated = True

    def add_to(
        self,
        residual: Residual,
        norm: Norm | None,
        rotation: Rotation,
        wanted: torch.Tensor | None = None,
        output_norm: Norm | None = None,
    ) -> None:
        qkv, gate = self._projected(residual, norm)
        q = rope_and_store_kv(qkv, self.qk_norm, rotation, self.attn)
        out = sigmoid_mul(self.attn.attend(q).flatten(1), gate.flatten(1))
        self.o_proj.add_to(residual, out, wanted=wanted, norm=output_norm)

    def store(
        self, x: torch.Tensor | Residual, norm: Norm | None, rotation: Rotation
    ) -> torch.Tensor:
        return rope_and_store_kv(self._projected(x, norm)[0], self.qk_norm, rotation, self.attn)

    def _projected(self, x: torch.Tensor | Residual, norm: Norm | None) -> tuple[torch.Tensor, ...]:
        """Return q, k and v of all heads, and the gates [tokens, heads, head_size]."""
        spec = self.attn.spec
        projected = self.qkv_proj(x, norm)
        projected = projected.view(len(projected), -1, spec.head_size)
        return projected.tensor_split((-spec.heads,), dim=1)


class QwenSparseFeedForward(SparseFeedForward):
    """Mixture beside a feed-forward that all tokens go through, each multiplied by the sigmoid of a
    logit. If that is as large as an expert it is computed as one more."""

    shared_name = "shared_expert"

    def __init__(
        self, config: Any, stacked: Stacked | None, context: BuildContext, *, normalize: bool
    ) -> None:
        hidden = config.hidden_size
        count = config.num_experts
        inner = config.moe_intermediate_size
        shared_inner = config.shared_expert_intermediate_size
        # Adapters can't change experts, which aren't linear layers.
        merged = shared_inner == inner and not of_runtime(context).adapters
        super().__init__(
            Router(hidden, count, context, shared=merged),
            Experts(
                hidden,
                inner,
                count,
                context,
                stacked=stacked,
                per_token=config.num_experts_per_tok,
                shared=merged,
            ),
            normalize=normalize,
            shared=None if merged else GatedFeedForward(hidden, shared_inner, context),
        )
        self.shared_gate = None if merged else Router(hidden, 1, context)

    def inner_of_shared(self, shared: SharedFeedForward, x: torch.Tensor) -> torch.Tensor:
        assert self.shared_gate is not None
        return shared.inner(x).mul_(self.shared_gate(x).sigmoid_())

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        yield from super().weights(prefix)
        gate = self.shared_gate or (self.router, "shared")
        yield from weight_rules(prefix, {f"{self.shared_name}_gate": gate})


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
        return partial_rope_reasons(config, self._rope(config))

    def _rope(self, config: Any) -> dict[str, Any]:
        """Return `rope_parameters` with those of positions on three axes, which transformers' code
        fixes, or has a default for."""
        own = {"mrope_section": [11, 11, 10], **(config.rope_parameters or {})}
        return own | {"mrope_interleaved": True}

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

    def rope(self, config: Any, index: int) -> Rope:
        return rope_from_config(self._rope(config), head_size(config), partial=True)

    def norm(self, config: Any, context: BuildContext) -> RMSNorm:
        return RMSNorm(config.hidden_size, config.rms_norm_eps, context, zero_centered=True)

    def block(self, config: Any, spec: LayerSpec, context: BuildContext) -> Block[Mixer]:
        mixer: Mixer
        if self.kinds_of(config)[spec.index] == "attention":
            mixer = self.attention(config, spec, context)
        else:
            delta = self.recurrent(config)
            mixer = DeltaMixer(config.hidden_size, spec.index, delta, context)
        sparse = spec.index in self._sparse(config)
        return Block(
            self.norm(config, context),
            mixer,
            self.norm(config, context),
            self.feed_forward(config, context, sparse=sparse),
        )

    def mtp_block(
        self, config: Any, spec: LayerSpec, context: BuildContext
    ) -> Block[GatedAttention]:
        """Return the layer that predicts further tokens."""
        return Block(
            self.norm(config, context),
            self.attention(config, spec, context),
            self.norm(config, context),
            self.feed_forward(config, context, sparse=self._has_experts(config)),
        )

    def attention(self, config: Any, spec: LayerSpec, context: BuildContext) -> GatedAttention:
        return GatedAttention(
            config.hidden_size,
            spec,
            context,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm_eps=config.rms_norm_eps,
            zero_centered=True,
        )

    def feed_forward(self, config: Any, context: BuildContext, *, sparse: bool) -> FeedForward:
        return GatedFeedForward(config.hidden_size, config.intermediate_size, context)

    def skipped(self, config: Any) -> list[str]:
        return ["mtp.*"]  # predicts further tokens

    def _has_experts(self, config: Any) -> bool:
        return False

    def _sparse(self, config: Any) -> frozenset[int]:
        """Return the layers with experts."""
        return frozenset()


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
                    f"shared_expert_intermediate_size = {config.shared_expert_intermediate_size} "
                    f"must be at least 1"
                )
        return reasons + self._fixed(config)

    def _fixed(self, config: Any) -> list[str]:
        """Return the reasons against fields that other such models have, and transformers' code for
        this one doesn't read."""
        expected = {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1}
        found = {name: getattr(config, name, value) for name, value in expected.items()}
        return [
            f"{name} = {value!r} is not implemented (only {expected[name]!r})"
            for name, value in found.items()
            if value not in (None, expected[name])
        ]

    def _has_experts(self, config: Any) -> bool:
        return True

    def _sparse(self, config: Any) -> frozenset[int]:
        return frozenset(range(config.num_hidden_layers))

    def _normalizes(self, config: Any) -> bool:
        return True

    def feed_forward(self, config: Any, context: BuildContext, *, sparse: bool) -> FeedForward:
        if not sparse:
            return super().feed_forward(config, context, sparse=False)
        normalize = self._normalizes(config)
        return QwenSparseFeedForward(config, self.stacked, context, normalize=normalize)


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

    def _has_experts(self, config: Any) -> bool:
        return bool(config.num_experts)
