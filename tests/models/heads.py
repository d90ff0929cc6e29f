"""Checkpoints of draft heads with random weights, and plain references of them in torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV32Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    LlamaConfig,
    Qwen3Config,
)
from transformers.modeling_layers import MtpModel

from dovetail.testing.suites.model_configs import OF_LATENTS, TINY
from tests.e2e.reference import checkpoint
from tests.models.hybrids import qwen3_5, qwen3_5_moe, qwen3_next

Tensors = dict[str, torch.Tensor]
SIZES = {
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}


def target_config(**fields: Any) -> LlamaConfig:
    """A model for EAGLE-3 heads."""
    return _of(LlamaConfig, TINY | {"num_hidden_layers": 3} | fields)


def glm4_moe(**fields: Any) -> Glm4MoeConfig:
    return _of(
        Glm4MoeConfig,
        TINY
        | SIZES
        | {"use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5}
        | fields,
    )


def deepseek_v3(**fields: Any) -> DeepseekV3Config:
    return _of(DeepseekV3Config, TINY | OF_LATENTS | SIZES | fields)


def glm4_moe_lite(**fields: Any) -> Glm4MoeLiteConfig:
    config = _of(
        Glm4MoeLiteConfig,
        TINY | OF_LATENTS | SIZES | {"mlp_layer_types": ["dense", "sparse"]} | fields,
    )
    config.num_nextn_predict_layers = 1
    return config


def deepseek_v32(**fields: Any) -> DeepseekV32Config:
    config = _of(DeepseekV32Config, TINY | OF_LATENTS | SIZES | fields)
    config.num_nextn_predict_layers = 1
    return config


def _of(kind: Any, values: dict[str, Any]) -> Any:
    known = vars(kind())
    return kind(
        **{
            name: deepcopy(value)
            for name, value in values.items()
            if name in known or name == "partial_rotary_factor"
        }
    )


WITH_MTP = {
    "glm4_moe": glm4_moe,
    "deepseek_v3": deepseek_v3,
    "glm4_moe_lite": glm4_moe_lite,
    "deepseek_v32": deepseek_v32,
    "qwen3_next": qwen3_next,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
}


def numbers(generator: torch.Generator, *shape: int, norm: bool = False) -> torch.Tensor:
    return torch.randn(shape, generator=generator) * 0.2 + norm


def mtp_model(model: Any, seed: int = 1) -> Any:
    """Return transformers' head of a model, with random weights. The model keeps its config."""
    model = copy(model)
    model.config = config = deepcopy(model.config)
    if getattr(config, "num_mtp_layers", None) is None:
        config.num_mtp_layers = 1
    if hasattr(config, "layer_types"):
        config.mtp_layer_types = ["full_attention"]
    if hasattr(config, "mlp_layer_types"):
        config.mtp_mlp_layer_types = ["sparse"]
    if hasattr(config, "mlp_only_layers"):
        config.mlp_only_layers = []
    head, generator = MtpModel(model, 1).eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*head.layers.named_parameters(), *head.layers.named_buffers()):
            tensor.copy_(
                numbers(generator, *tensor.shape, norm="norm" in name and not _is_qwen(config))
            )
    head.main_layers = model.config.num_hidden_layers
    return head


def mtp_tensors(head: Any) -> Tensors:
    """Return the tensors of a head as checkpoints have them."""
    config, tensors = head.config, Tensors()
    is_qwen = _is_qwen(config)
    own, block = (
        ("mtp.", "mtp.layers.0.") if is_qwen else (f"model.layers.{head.main_layers}.",) * 2
    )
    names = dict(zip(("enorm", "hnorm", "eh_proj", "post_norm"), NAMES[is_qwen], strict=True))
    for name, tensor in head.layers[0].state_dict().items():
        first, _, rest = name.partition(".")
        if not rest.startswith("mlp.experts."):
            tensors[f"{own}{names[first]}.{rest}" if first in names else f"{block}{rest}"] = tensor
            continue
        for index, one in enumerate(tensor):
            parts = (
                {"down_proj": one}
                if "down" in rest
                else dict(zip(("gate_proj", "up_proj"), one.chunk(2), strict=True))
            )
            tensors |= {
                f"{block}mlp.experts.{index}.{part}.weight": values
                for part, values in parts.items()
            }
    return tensors


NAMES = (
    ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
)


def add_tensors(directory: Path, tensors: Tensors) -> None:
    """Add tensors to a checkpoint of one file."""
    path = directory / "model.safetensors"
    save_file(
        {**load_file(path), **{name: tensor.contiguous() for name, tensor in tensors.items()}},
        path,
        {"format": "pt"},
    )


def eagle3_fields(target: Any, **changes: Any) -> dict[str, Any]:
    """config.json of a head in the format of `speculators`."""
    layer = {
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000.0,
        "max_position_embeddings": 32,
        "hidden_act": "silu",
        "pretraining_tp": 1,
        "use_cache": True,
    }
    fields = {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": target.vocab_size // 2,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [0, 1, target.num_hidden_layers - 1],
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "target_hidden_size": None,
        "torch_dtype": "bfloat16",
        "transformer_layer_config": layer | changes.pop("layer", {}),
        "transformers_version": "4.53.1",
    }
    return {**fields, **changes}


def layer_of(fields: dict[str, Any]) -> Any:
    own = dict(fields["transformer_layer_config"])
    return {"llama": LlamaConfig, "qwen3": Qwen3Config}[own.pop("model_type")](**own)


def eagle3_tensors(fields: dict[str, Any], *, embedding: bool = True, seed: int = 1) -> Tensors:
    generator, layer, drafted = (
        torch.Generator().manual_seed(seed),
        layer_of(fields),
        fields["draft_vocab_size"],
    )
    hidden, heads, kv_heads, size = (
        layer.hidden_size,
        layer.num_attention_heads,
        layer.num_key_value_heads,
        layer.head_dim,
    )
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(fields["eagle_aux_hidden_state_layer_ids"]) * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (drafted, hidden),
    }
    for index in range(layer.num_hidden_layers):
        prefix, inputs = f"layers.{index}.", hidden if index else 2 * hidden
        shapes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (heads * size, inputs),
            f"{prefix}self_attn.k_proj.weight": (kv_heads * size, inputs),
            f"{prefix}self_attn.v_proj.weight": (kv_heads * size, inputs),
            f"{prefix}self_attn.o_proj.weight": (hidden, heads * size),
            f"{prefix}mlp.gate_proj.weight": (layer.intermediate_size, hidden),
            f"{prefix}mlp.up_proj.weight": (layer.intermediate_size, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, layer.intermediate_size),
        }
        if not index:
            shapes[f"{prefix}hidden_norm.weight"] = (hidden,)
        if layer.model_type == "qwen3":
            shapes |= {f"{prefix}self_attn.{name}_norm.weight": (size,) for name in "qk"}
    if embedding:
        shapes["embed_tokens.weight"] = (layer.vocab_size, hidden)
    tensors = {
        name: numbers(generator, *shape, norm=len(shape) == 1) for name, shape in shapes.items()
    }
    targets = torch.randperm(layer.vocab_size, generator=generator)[:drafted].sort().values
    return tensors | {
        "d2t": targets - torch.arange(drafted),
        "t2d": torch.zeros(layer.vocab_size, dtype=torch.bool).index_fill_(0, targets, True),
    }


def write_eagle3(directory: Path, fields: dict[str, Any], tensors: Tensors) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(fields))
    save_file(tensors, directory / "model.safetensors")
    return directory


def plain_eagle3(
    fields: dict[str, Any], tensors: Tensors, tapped: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states [n, hidden] and logits [n, draft vocabulary] of one sequence: tapped [n, taps *
    hidden], and the tokens after these [n]."""
    return plain_eagle3_layers(fields, tensors, tapped @ tensors["fc.weight"].T, token_ids)


def plain_eagle3_layers(
    fields: dict[str, Any], tensors: Tensors, states: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    layer, embedded = layer_of(fields), tensors["embed_tokens.weight"][token_ids]
    heads, kv_heads, size, count = (
        layer.num_attention_heads,
        layer.num_key_value_heads,
        layer.head_dim,
        len(token_ids),
    )
    frequencies = layer.rope_parameters["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(count)[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], tensors[f"{name}.weight"], layer.rms_norm_eps)

    def turned(x: torch.Tensor) -> torch.Tensor:
        one, two = x.chunk(2, dim=-1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)

    x = states
    for index in range(layer.num_hidden_layers):
        at = f"layers.{index}."
        inputs = norm(x, f"{at}input_layernorm")
        if not index:
            normed = norm(x, f"{at}hidden_norm")
            inputs, x = (
                torch.cat((norm(embedded, f"{at}input_layernorm"), normed), dim=1),
                normed if fields["norm_before_residual"] else x,
            )
        q, k, v = (inputs @ tensors[f"{at}self_attn.{name}_proj.weight"].T for name in "qkv")
        q, k, v = (y.view(count, -1, size) for y in (q, k, v))
        if layer.model_type == "qwen3":
            q, k = norm(q, f"{at}self_attn.q_norm"), norm(k, f"{at}self_attn.k_norm")
        q, k, v = (
            turned(q),
            turned(k).repeat_interleave(heads // kv_heads, 1),
            v.repeat_interleave(heads // kv_heads, 1),
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) * size**-0.5
        weights = scores.masked_fill(
            torch.ones(count, count, dtype=torch.bool).triu(1), -torch.inf
        ).softmax(-1)
        x = (
            x
            + torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
            @ tensors[f"{at}self_attn.o_proj.weight"].T
        )
        inputs = norm(x, f"{at}post_attention_layernorm")
        gate, up = (inputs @ tensors[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ tensors[f"{at}mlp.down_proj.weight"].T
    return x, norm(x, "norm") @ tensors["lm_head.weight"].T


# Heads that must be right

CHAINED = {
    "hidden_size": 32,
    "vocab_size": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
}


@contextmanager
def chained(config: Any, *, mtp: bool = False) -> Iterator[Path]:
    """A checkpoint of a model whose state is the direction of the last token, and in which token t
    is followed by 5 t + 3. It has as many tokens as numbers in a hidden state. `mtp`: with a head
    that passes the embedding through, of which the model's output layer makes the token after
    it."""
    with checkpoint(config) as (directory, model):
        tensors = load_file(directory / "model.safetensors")
        _pass_through(tensors, config)
        one = torch.eye(config.vocab_size)
        tensors["model.embed_tokens.weight"].copy_(one * config.vocab_size**0.5)
        tensors["lm_head.weight"].copy_(_follow(one, 1))
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        if mtp:
            head = mtp_tensors(mtp_model(model))
            _pass_through(head, config)
            projection = (
                "mtp.fc" if _is_qwen(config) else f"model.layers.{config.num_hidden_layers}.eh_proj"
            )
            head[f"{projection}.weight"].copy_(torch.cat((one, torch.zeros_like(one)), dim=1))
            add_tensors(directory, head)
        yield directory


def write_chained_eagle3(directory: Path, config: Any, tap: int, **layer: Any) -> Path:
    """A head for such a model that makes its first draft of the state alone: two tokens after the
    state's own."""
    fields = eagle3_fields(
        config,
        eagle_aux_hidden_state_layer_ids=[tap],
        draft_vocab_size=config.vocab_size,
        layer=layer,
    )
    head = eagle3_tensors(fields, embedding=False)
    _pass_through(head, config)
    head["fc.weight"].copy_(torch.eye(config.hidden_size))
    head["lm_head.weight"].copy_(_follow(torch.eye(config.hidden_size), 2))
    return write_eagle3(directory, fields, head)


def _pass_through(tensors: Tensors, config: Any) -> None:
    """Let layers add nothing, and norms only scale."""
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor.zero_()
        if "norm" in name:
            tensor.fill_(float(not _is_qwen(config)))


def _is_qwen(config: Any) -> bool:
    """Return True if norms multiply by 1 + w, and a head's tensors are named "mtp.*"."""
    return bool(config.model_type.startswith(("qwen3_5", "qwen3_next")))


def _follow(matrix: torch.Tensor, times: int) -> torch.Tensor:
    """Move row t of a matrix to the token that comes `times` tokens after t."""
    index = torch.arange(len(matrix))
    for _ in range(times):
        index = (5 * index + 3) % len(matrix)
    return torch.zeros_like(matrix).index_copy_(0, index, matrix)
