"""OLMo 2 (arXiv:2501.00656), after `transformers/models/olmo2/modeling_olmo2.py`.

It is a Llama with two differences. A block norms what attention and the feed-forward give, not what
they take; and q and k are normed before they are rotated, each over all of its heads together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, ModelArch, ModelCapabilities, ModelInputs, ParallelGroup, WeightRule
from dovetail.nn.embedding import LMHead, VocabParallelEmbedding
from dovetail.nn.layer import Layer, LayerList
from dovetail.nn.linear import GateUpParallelLinear, QKVParallelLinear, RowParallelLinear
from dovetail.nn.model_files import model_length
from dovetail.nn.norm import RMSNorm, rms_norm
from dovetail.nn.parameter import Part, Weight, kv_share, share
from dovetail.nn.qkv import rope_and_store_kv
from dovetail.nn.rotary import RotaryEmbedding, Rotation, rope_from_config, rope_reasons_against
from torch import nn

COUNTS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
SIZES = ("vocab_size", "hidden_size", "intermediate_size")


class Olmo2(ModelArch):
    """Serves `Olmo2ForCausalLM`."""

    capabilities = ModelCapabilities(tensor_parallel=True)

    def reasons_against(self, config: Any) -> list[str]:
        if config.model_type != "olmo2":
            return [f"model_type = {config.model_type!r}, expected 'olmo2'"]
        return [*wrong_sizes(config), *unknown_fields(config), *rope_reasons_against(config.rope_parameters or {})]

    def layer_specs(self, config: Any, parallel: ParallelGroup) -> list[LayerSpec]:
        return [layer_spec(config, index, parallel) for index in range(config.num_hidden_layers)]

    def build(self, config: Any, context: BuildContext) -> nn.Module:
        return Olmo2Model(config, context)


def wrong_sizes(config: Any) -> list[str]:
    """Reasons for sizes that no model can have, or that the layers below would get wrong."""
    if reasons := [f"{name} = {getattr(config, name)} must be at least 1" for name in (*COUNTS, *SIZES) if getattr(config, name) < 1]:
        return reasons
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads
    if heads % kv_heads:
        reasons.append(f"num_attention_heads = {heads} is no multiple of num_key_value_heads = {kv_heads}")
    if config.hidden_size % (2 * heads):
        reasons.append(f"hidden_size = {config.hidden_size} can't be shared by num_attention_heads = {heads} so that each has an even size")
    return reasons


def unknown_fields(config: Any) -> list[str]:
    """Reasons for what the module below doesn't read or doesn't know."""
    # what transformers puts into every config of this type; the module reads all that matters
    known = {*vars(type(config)()), "model_type"}
    reasons = [
        f"{name} = {value!r} is no field of an OLMo 2 and may change the numbers; if it doesn't, remove it from config.json"
        for name, value in vars(config).items()
        if value and name not in known
    ]
    if config.hidden_act != "silu":
        reasons.append(f"hidden_act = {config.hidden_act!r} is not implemented, only 'silu' is")
    return reasons


def layer_spec(config: Any, index: int, group: ParallelGroup) -> LayerSpec:
    """The attention layer `index`, with the heads that are this rank's."""
    heads = share(config.num_attention_heads, group, "num_attention_heads")
    _, kv_heads = kv_share(config.num_key_value_heads, group)
    head_size = config.hidden_size // config.num_attention_heads
    return LayerSpec(index, heads, kv_heads, head_size, scale=head_size**-0.5)


class ProjectionNorm(Layer):
    """RMSNorm over all heads of q together, or of k: x [tokens, own heads * head_size] -> the same
    shape.

    A rank has some of the heads. The mean square over all of them is the mean of the ranks' means,
    since each rank has equally many. Where there are more ranks than K heads, several ranks have
    the same head, and each head counts equally often.
    """

    def __init__(self, projection: Part, eps: float, context: BuildContext) -> None:
        """`projection`: which rows of q's or of k's projection this rank has. It has the same of
        the norm's weight."""
        super().__init__()
        self.group = context.parallel
        self.eps = eps
        part = Part(projection.source_shape[:1], 0, projection.start, projection.size)
        self.weight = Weight((part.size,), {None: part}, context, scale=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return rms_norm(x.contiguous(), self.weight, self.eps)
        wide = x.float()
        # [tokens, 1]
        mean_square = self.group.all_reduce(wide.square().mean(-1, keepdim=True)) / self.group.size
        return (wide * torch.rsqrt(mean_square + self.eps) * self.weight).to(x.dtype)


class Attention(Layer):
    def __init__(self, index: int, config: Any, context: BuildContext) -> None:
        super().__init__()
        hidden = config.hidden_size
        bias = config.attention_bias
        self.spec = layer_spec(config, index, context.parallel)
        self.qkv_proj = QKVParallelLinear(hidden, config.num_attention_heads, config.num_key_value_heads, self.spec.head_size, context, bias=bias)
        self.q_norm = ProjectionNorm(self.qkv_proj.weight.parts["q"], config.rms_norm_eps, context)
        self.k_norm = ProjectionNorm(self.qkv_proj.weight.parts["k"], config.rms_norm_eps, context)
        self.o_proj = RowParallelLinear(hidden, hidden, context, bias=bias)
        self.attn = context.make_attention(self.spec)

    def forward(self, x: torch.Tensor, rotation: Rotation, wanted: torch.Tensor | None) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden], or [n, hidden] of the `wanted` ones. K and V of
        all tokens are written."""
        size = self.spec.head_size
        widths = [self.spec.heads * size, self.spec.kv_heads * size, self.spec.kv_heads * size]
        q, k, v = torch.split(self.qkv_proj(x), widths, dim=-1)
        # [tokens, heads + 2 * kv_heads, head_size]
        qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1).view(len(x), -1, size)
        q = rope_and_store_kv(qkv, None, rotation, self.attn)  # [tokens, heads, head_size]
        out = self.attn.attend(q).flatten(1)  # [tokens, own heads * head_size]
        return self.o_proj(out if wanted is None else out[wanted])


class FeedForward(Layer):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Any, context: BuildContext) -> None:
        super().__init__()
        self.gate_up_proj = GateUpParallelLinear(config.hidden_size, config.intermediate_size, context, bias=False)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, context, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj(x))


class Block(Layer):
    def __init__(self, index: int, config: Any, context: BuildContext) -> None:
        super().__init__()
        self.attention = Attention(index, config, context)
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context)
        self.mlp = FeedForward(config, context)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context)

    def forward(self, x: torch.Tensor, rotation: Rotation, wanted: torch.Tensor | None = None) -> torch.Tensor:
        attended = self.attention_norm(self.attention(x, rotation, wanted))
        x = (x if wanted is None else x[wanted]) + attended
        return x + self.mlp_norm(self.mlp(x))

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        """Yield the rules for tensors whose names begin with `prefix`. Several tensors are parts of
        one fused parameter."""
        attention = self.attention
        mlp = self.mlp
        layers: dict[str, tuple[Layer, str | None]] = {
            "self_attn.q_proj": (attention.qkv_proj, "q"),
            "self_attn.k_proj": (attention.qkv_proj, "k"),
            "self_attn.v_proj": (attention.qkv_proj, "v"),
            "self_attn.q_norm": (attention.q_norm, None),
            "self_attn.k_norm": (attention.k_norm, None),
            "self_attn.o_proj": (attention.o_proj, None),
            "post_attention_layernorm": (self.attention_norm, None),
            "mlp.gate_proj": (mlp.gate_up_proj, "gate"),
            "mlp.up_proj": (mlp.gate_up_proj, "up"),
            "mlp.down_proj": (mlp.down_proj, None),
            "post_feedforward_layernorm": (self.mlp_norm, None),
        }
        for name, (layer, part) in layers.items():
            for kind, parameter in layer.named_parameters():  # "weight", and "bias" if it has one
                yield WeightRule(f"{prefix}{name}.{kind}", parameter, part)


class Olmo2Model(nn.Module):
    """The whole model, a `dovetail.api.model.CausalLM`. Its last block computes only the `wanted`
    tokens to the end, and of the others K and V."""

    def __init__(self, config: Any, context: BuildContext) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_size, context)
        rope = rope_from_config(config.rope_parameters, config.hidden_size // config.num_attention_heads)
        self.rotary = RotaryEmbedding(rope, context.max_len or model_length(config), device=context.device)
        self.blocks = LayerList(Block(index, config, context) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context)
        self.head = LMHead(config.vocab_size, config.hidden_size, context, tied=self.embedding if config.tie_word_embeddings else None)

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        # x [tokens, hidden]
        x = self.embedding(inputs.token_ids)
        rotation = self.rotary(inputs.positions)
        *earlier, last = self.blocks
        for block in earlier:
            x = block(x, rotation)
        return self.norm(last(x, rotation, inputs.wanted))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)

    def weights(self) -> Iterator[WeightRule]:
        """Yield the rules for the tensors of a Hugging Face checkpoint. A tied head shares the
        embedding's parameter, under either name or both."""
        yield WeightRule("model.embed_tokens.weight", self.embedding.weight)
        yield WeightRule("lm_head.weight", self.head.weight, optional=self.head.weight is self.embedding.weight)
        yield WeightRule("model.norm.weight", self.norm.weight)
        for index, block in enumerate(self.blocks):
            yield from block.weights(f"model.layers.{index}.")
