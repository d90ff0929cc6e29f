"""Real model shapes as checkpoint directories: without weights, for `load_format: dummy`, which
uses random ones; or with weights.

The shapes themselves are read where torch is missing, too.
"""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Delta:
    """Sizes of the layers that are Gated DeltaNets: all but every `every`-th, which has attention
    with an output gate."""

    k_heads: int
    v_heads: int
    size: int  # of a head's keys and values
    kernel: int
    every: int
    share_rotated: float  # of a head of attention

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return (2 * self.k_heads + self.v_heads) * self.size

    @property
    def state_bytes(self) -> int:
        """Bytes of a request's state in one layer."""
        return 4 * self.v_heads * self.size**2 + 2 * self.channels * (self.kernel - 1)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model that decide how much a step computes."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab: int
    tied: bool
    max_len: int
    rope_theta: float
    experts: int = 0  # of each layer, `intermediate` wide; 0: the feed-forwards are dense
    experts_per_token: int = 0
    # of every second layer, beginning with the first; of Gemma 3, of five in six
    window: int | None = None
    delta: Delta | None = None
    shared: int = 0  # inner size of the expert that all tokens go through

    @property
    def attention_layers(self) -> int:
        return self.layers if self.delta is None else self.layers // self.delta.every

    @property
    def state_bytes(self) -> int:
        """Bytes of a request's states."""
        return (
            0
            if self.delta is None
            else (self.layers - self.attention_layers) * self.delta.state_bytes
        )

    @property
    def dense_weights(self) -> int:
        """Weights of all layers that every token goes through, without embedding and head."""
        gates = 0 if self.delta is None else self.heads
        mixing = (
            self.attention_layers
            * self.hidden
            * self.head_size
            * (2 * self.heads + 2 * self.kv_heads + gates)
        )
        if self.delta is not None:
            values = self.delta.v_heads * self.delta.size
            mixing += (
                (self.layers - self.attention_layers)
                * self.hidden
                * (self.delta.channels + 2 * values + 2 * self.delta.v_heads)
            )
        return mixing + self.layers * self.hidden * (
            self.experts + 3 * self.shared or 3 * self.intermediate
        )

    @property
    def expert_weights(self) -> int:
        """Weights of one expert, in all layers together."""
        return self.layers * 3 * self.hidden * self.intermediate if self.experts else 0

    def distinct_experts(self, tokens: int) -> float:
        """Return the expected number of a layer's experts used by this many tokens, with uniform
        routing."""
        return (
            self.experts * (1 - (1 - self.experts_per_token / self.experts) ** tokens)
            if self.experts
            else 0.0
        )

    @property
    def block_weights(self) -> int:
        """Weights of all layers that a token is multiplied by, without embedding and head."""
        return self.dense_weights + self.experts_per_token * self.expert_weights

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden

    @property
    def kv_numbers_per_token(self) -> int:
        return 2 * self.attention_layers * self.kv_heads * self.head_size


SHAPES = {
    # no models: little to compute; the second has much K and V for that, 16 KiB per token in bfloat16
    "tiny": Shape("Qwen3ForCausalLM", 1, 64, 2, 1, 32, 128, 1024, True, 40_960, 1e6),
    "wide-kv": Shape("Qwen3ForCausalLM", 4, 128, 8, 8, 128, 256, 1024, True, 40_960, 1e6),
    "qwen3-0.6b": Shape("Qwen3ForCausalLM", 28, 1024, 16, 8, 128, 3072, 151_936, True, 40_960, 1e6),
    "qwen3-8b": Shape(
        "Qwen3ForCausalLM", 36, 4096, 32, 8, 128, 12_288, 151_936, False, 40_960, 1e6
    ),
    "llama-3.2-1b": Shape(
        "LlamaForCausalLM", 16, 2048, 32, 8, 64, 8192, 128_256, True, 131_072, 5e5
    ),
    "qwen3-30b-a3b": Shape(
        "Qwen3MoeForCausalLM", 48, 2048, 32, 4, 128, 768, 151_936, False, 40_960, 1e6, 128, 8
    ),
    "gpt-oss-20b": Shape(
        "GptOssForCausalLM", 24, 2880, 64, 8, 64, 2880, 201_088, False, 131_072, 1.5e5, 32, 4, 128
    ),
    "gemma-3-4b": Shape(
        "Gemma3ForCausalLM", 34, 2560, 8, 4, 256, 10_240, 262_208, True, 131_072, 1e6, window=1024
    ),
    "gemma-3-27b": Shape(
        "Gemma3ForCausalLM", 62, 5376, 32, 16, 128, 21_504, 262_208, True, 131_072, 1e6, window=1024
    ),
    "qwen3.5-4b": Shape(
        "Qwen3_5ForCausalLM",
        32,
        2560,
        16,
        4,
        256,
        9216,
        248_320,
        True,
        262_144,
        1e7,
        delta=Delta(16, 32, 128, kernel=4, every=4, share_rotated=0.25),
    ),
    "qwen3-next": Shape(
        *("Qwen3NextForCausalLM", 48, 2048, 16, 2, 256, 512, 151_936, False, 262_144, 1e7, 512, 10),
        delta=Delta(16, 32, 128, kernel=4, every=4, share_rotated=0.25),
        shared=512,
    ),
    "llama-3.1-8b": Shape(
        "LlamaForCausalLM", 32, 4096, 32, 8, 128, 14_336, 128_256, False, 131_072, 5e5
    ),
}

MODEL_TYPES = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "LlamaForCausalLM": "llama",
    "GptOssForCausalLM": "gpt_oss",
    "Gemma3ForCausalLM": "gemma3_text",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3NextForCausalLM": "qwen3_next",
}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
QUANTIZED = {  # by name, the `quantization_config` of a checkpoint
    "int4-g128": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": _INT4, "input_activations": None}
        },
    },
    "fp8": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    },
    "mxfp4": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"],
    },
}
EXPERT_BYTES = {
    "int4-g128": 0.5 + 2 / 128,
    "fp8": 1 + 4 / 128**2,
    "mxfp4": 17 / 32,
}  # of a weight of experts in such a checkpoint


def config_of(shape: Shape) -> dict[str, Any]:
    """Return the content of a checkpoint's config.json."""
    kind = MODEL_TYPES[shape.architecture]
    own: dict[str, Any] = {
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
    }
    if kind in ("qwen3_moe", "qwen3_next"):
        own |= {
            "num_experts": shape.experts,
            "moe_intermediate_size": shape.intermediate,
            "norm_topk_prob": True,
        }
    if shape.delta is not None:
        own |= {
            "linear_num_key_heads": shape.delta.k_heads,
            "linear_num_value_heads": shape.delta.v_heads,
            "linear_key_head_dim": shape.delta.size,
            "linear_value_head_dim": shape.delta.size,
            "linear_conv_kernel_dim": shape.delta.kernel,
            "full_attention_interval": shape.delta.every,
            "partial_rotary_factor": shape.delta.share_rotated,
        }
    if shape.shared:
        own["shared_expert_intermediate_size"] = shape.shared
    if kind == "gpt_oss":
        yarn = {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "rope_theta": shape.rope_theta,
        }
        own = {
            "rope_parameters": yarn | {"original_max_position_embeddings": 4096},
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
        }
        own |= {"num_local_experts": shape.experts, "sliding_window": shape.window}
    if kind == "gemma3_text":
        # 27B alone divides by the former
        scalar = shape.hidden // shape.heads if shape.layers == 62 else 256
        own = {
            "rope_theta": shape.rope_theta,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rms_norm_eps": 1e-6,
        }
        own |= {
            "query_pre_attn_scalar": scalar,
            "sliding_window": shape.window,
            "hidden_activation": "gelu_pytorch_tanh",
        }
    if shape.experts:
        own["num_experts_per_tok"] = shape.experts_per_token
    return {
        "architectures": [shape.architecture],
        "model_type": kind,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": shape.max_len,
        **({} if "hidden_activation" in own else {"hidden_act": "silu"}),
        "dtype": "bfloat16",
        **own,
    }


def write_checkpoint(shape: Shape, directory: Path, quantized: str | None = None) -> None:
    """config.json and a made-up tokenizer of the right size: each id is a word, so that
    detokenizing costs what it costs.

    `quantized`: a name in `QUANTIZED`, if weights are to be stored so.
    """
    from tokenizers import Tokenizer, decoders, models

    config = config_of(shape)
    if quantized is not None:
        config["quantization_config"] = QUANTIZED[quantized]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(
        models.WordLevel({f"Ġw{i}": i for i in range(shape.vocab)}, unk_token="Ġw0")
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": shape.max_len}
        )
    )


def write_weights(directory: Path) -> float:
    """Write random weights for the config in `directory`, generated on the GPU if available.
    Returns their size in GB."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        # which draws them
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(directory), dtype=torch.bfloat16
        )
    model.save_pretrained(directory)
    del model
    gc.collect()
    torch.cuda.empty_cache()  # an engine may look at what is free
    return sum(file.stat().st_size for file in directory.glob("*.safetensors")) / 1e9
