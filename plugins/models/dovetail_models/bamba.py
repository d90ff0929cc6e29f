"""Bamba: most layers are Mamba2, the others attention that rotates half of each head; each has a
dense feed-forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, WeightRule
from dovetail.nn.attention import Attention
from dovetail.nn.decoder import Block, Decoder, Mixer
from dovetail.nn.feed_forward import GatedFeedForward
from dovetail.nn.parameter import weight_rules
from dovetail.nn.rotary import Rope, rope_from_config
from dovetail.nn.state import Mamba2Shape
from dovetail_models.arch import head_size, partial_rope_reasons
from dovetail_models.hybrid import HybridArch, Kind, Mamba, MambaMixer


class BambaBlock(Block[Mixer]):
    """Block with a checkpoint's names."""

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        yield from weight_rules(
            prefix, {"input_layernorm": self.input_norm, "pre_ff_layernorm": self.mlp_norm}
        )
        yield from self.attention.weights(f"{prefix}{self.attention.name}.")
        yield from self.mlp.weights(f"{prefix}feed_forward.")


class BambaDecoder(Decoder):
    norm_name = "model.final_layernorm"


class Bamba(HybridArch):
    """Serves `BambaForCausalLM`."""

    model_type = "bamba"
    kinds: ClassVar[Mapping[str, Kind]] = {
        "linear_attention": "mamba",
        "full_attention": "attention",
    }
    sizes = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
    decoder = BambaDecoder
    handled = frozenset(
        {
            *(*sizes, "mamba_expand", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit"),
            *("attn_layer_indices", "attention_bias", "mlp_bias"),
            *("mamba_chunk_size", "num_logits_to_keep"),  # of transformers' code
            "z_loss_coefficient",  # only for training
        }
    )

    def rope_reasons(self, config: Any) -> list[str]:
        return partial_rope_reasons(config, config.rope_parameters or {})

    def rope(self, config: Any, index: int) -> Rope:
        return rope_from_config(config.rope_parameters, head_size(config), partial=True)

    def recurrent(self, config: Any) -> Mamba:
        low, high = config.time_step_limit
        return Mamba(
            Mamba2Shape(*(getattr(config, name) for name in self.sizes)),
            config.rms_norm_eps,
            (low, high),
            conv_bias=config.mamba_conv_bias,
            bias=config.mamba_proj_bias,
        )

    def block(self, config: Any, spec: LayerSpec, context: BuildContext) -> BambaBlock:
        hidden = config.hidden_size
        bias = config.attention_bias
        mixer: Mixer
        if self.kinds_of(config)[spec.index] == "attention":
            mixer = Attention(hidden, spec, context, bias=bias, output_bias=bias)
        else:
            mixer = MambaMixer(hidden, spec.index, self.recurrent(config), context)
        inner = config.intermediate_size
        return BambaBlock(
            self.norm(config, context),
            mixer,
            self.norm(config, context),
            GatedFeedForward(hidden, inner, context, bias=config.mlp_bias),
        )
