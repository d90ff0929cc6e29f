"""The model architecture: it serves Hugging Face `architectures` names, and builds a module from the layers of `dovetail.nn`.

Granite is a Llama with four factors: on the embedding, on a block's output to the residual stream, on attention scores and on logits.
"""

from collections.abc import Iterator
from typing import Any

import torch
from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, ModelArch, ModelCapabilities, ModelInputs, ParallelGroup, WeightRule
from dovetail.nn.embedding import LMHead, VocabParallelEmbedding
from dovetail.nn.layer import Layer, LayerList
from dovetail.nn.linear import GateUpParallelLinear, QKVParallelLinear, RowParallelLinear
from dovetail.nn.norm import RMSNorm
from dovetail.nn.parameter import kv_share, share
from dovetail.nn.qkv import rope_and_store_kv
from dovetail.nn.rotary import RotaryEmbedding, Rotation, rope_from_config, rope_reasons_against
from torch import nn

PLAIN = {"hidden_act": "silu", "quantization_config": None}  # the values of these fields that are implemented


class AcmeModelArch(ModelArch):
    """The architecture `GraniteForCausalLM`."""

    capabilities = ModelCapabilities(tensor_parallel=True)

    def reasons_against(self, config: Any) -> list[str]:
        if config.model_type != "granite":
            return [f"model_type = {config.model_type!r}, expected 'granite'"]
        fields = vars(config)
        known = {*vars(type(config)()), "model_type", "head_dim"}  # the fields of each such config in transformers, and in files
        reasons = [f"{name} = {fields[name]!r} is not implemented" for name, right in PLAIN.items() if fields.get(name, right) != right]
        reasons += [
            f"{name} = {value!r}: nobody knows this field of a Granite, and it may change the numbers"
            for name, value in fields.items()
            if value and name not in known and name not in PLAIN
        ]
        return reasons + rope_reasons_against(config.rope_parameters or {})

    def layer_specs(self, config: Any, parallel: ParallelGroup) -> list[LayerSpec]:
        return [layer_spec(config, index, parallel) for index in range(config.num_hidden_layers)]

    def build(self, config: Any, context: BuildContext) -> nn.Module:
        return Granite(config, context)


def head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def layer_spec(config: Any, index: int, group: ParallelGroup) -> LayerSpec:
    """Return the shape of an attention layer on this rank."""
    heads = share(config.num_attention_heads, group, "num_attention_heads")
    _, kv_heads = kv_share(config.num_key_value_heads, group)
    return LayerSpec(index, heads, kv_heads, head_size(config), config.attention_multiplier)


class Attention(Layer):
    def __init__(self, index: int, config: Any, context: BuildContext) -> None:
        super().__init__()
        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.head_size = head_size(config)
        bias = config.attention_bias
        self.qkv_proj = QKVParallelLinear(hidden, heads, kv_heads, self.head_size, context, bias=bias)
        self.o_proj = RowParallelLinear(heads * self.head_size, hidden, context, bias=bias)
        self.attn = context.make_attention(layer_spec(config, index, context.parallel))

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_size)  # [tokens, heads + 2 * kv_heads, head_size]
        q = rope_and_store_kv(qkv, None, rotation, self.attn)
        return self.o_proj(self.attn.attend(q).flatten(1))


class FeedForward(Layer):
    def __init__(self, config: Any, context: BuildContext) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = GateUpParallelLinear(hidden, inner, context, bias=config.mlp_bias)
        self.down_proj = RowParallelLinear(inner, hidden, context, bias=config.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj(x))


class Block(Layer):
    def __init__(self, index: int, config: Any, context: BuildContext) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context)
        self.attention = Attention(index, config, context)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context)
        self.mlp = FeedForward(config, context)
        self.multiplier: float = config.residual_multiplier

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        x = x + self.attention(self.input_norm(x), rotation) * self.multiplier
        return x + self.mlp(self.mlp_norm(x)) * self.multiplier

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        """Yield the rules for the checkpoint's tensors whose names begin with `prefix`; a fused layer has several, named by their last word."""
        qkv, gate_up = self.attention.qkv_proj, self.mlp.gate_up_proj
        parts: dict[str, tuple[Layer, str | None]] = {
            "input_layernorm": (self.input_norm, None),
            "self_attn.q_proj": (qkv, "q"),
            "self_attn.k_proj": (qkv, "k"),
            "self_attn.v_proj": (qkv, "v"),
            "self_attn.o_proj": (self.attention.o_proj, None),
            "post_attention_layernorm": (self.mlp_norm, None),
            "mlp.gate_proj": (gate_up, "gate"),
            "mlp.up_proj": (gate_up, "up"),
            "mlp.down_proj": (self.mlp.down_proj, None),
        }
        for name, (layer, part) in parts.items():
            for kind, parameter in layer.named_parameters():  # "weight", and "bias" if it has one
                yield WeightRule(f"{prefix}{name}.{kind}", parameter, part)


class Granite(nn.Module):
    """The whole model; it is a `dovetail.api.model.CausalLM`."""

    def __init__(self, config: Any, context: BuildContext) -> None:
        super().__init__()
        self.embedding_multiplier: float = config.embedding_multiplier
        self.logits_scaling: float = config.logits_scaling
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_size, context)
        rope = rope_from_config(config.rope_parameters, head_size(config))
        self.rotary = RotaryEmbedding(rope, context.max_len or config.max_position_embeddings, device=context.device)
        self.blocks = LayerList(Block(index, config, context) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context)
        tied = self.embedding if config.tie_word_embeddings else None
        self.head = LMHead(config.vocab_size, config.hidden_size, context, tied=tied)

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        x = self.embedding(inputs.token_ids) * self.embedding_multiplier  # [tokens, hidden]
        rotation = self.rotary(inputs.positions)
        for block in self.blocks:
            x = block(x, rotation)
        hidden = self.norm(x)
        return hidden if inputs.wanted is None else hidden[inputs.wanted]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden) / self.logits_scaling

    def weights(self) -> Iterator[WeightRule]:
        """Yield the rules for a Hugging Face checkpoint. A tied head shares the embedding's weight, under either name or both."""
        yield WeightRule("model.embed_tokens.weight", self.embedding.weight)
        yield WeightRule("lm_head.weight", self.head.weight, optional=self.head.weight is self.embedding.weight)
        yield WeightRule("model.norm.weight", self.norm.weight)
        for index, block in enumerate(self.blocks):
            yield from block.weights(f"model.layers.{index}.")
