"""True shapes of models, as checkpoint directories: without weights, for `load_format: dummy`, which fills them with random numbers; or with them.

The shapes themselves are read where torch is missing, too.
"""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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

    @property
    def block_weights(self) -> int:
        """Weights of all layers, without embedding and head."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden

    @property
    def kv_numbers_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_size


SHAPES = {
    "qwen3-0.6b": Shape("Qwen3ForCausalLM", 28, 1024, 16, 8, 128, 3072, 151_936, True, 40_960, 1e6),
    "qwen3-8b": Shape("Qwen3ForCausalLM", 36, 4096, 32, 8, 128, 12_288, 151_936, False, 40_960, 1e6),
    "llama-3.2-1b": Shape("LlamaForCausalLM", 16, 2048, 32, 8, 64, 8192, 128_256, True, 131_072, 5e5),
    "llama-3.1-8b": Shape("LlamaForCausalLM", 32, 4096, 32, 8, 128, 14_336, 128_256, False, 131_072, 5e5),
}

_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
QUANTIZED = {  # by name, the `quantization_config` of a checkpoint
    "int4-g128": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4, "input_activations": None}},
    }
}


def config_of(shape: Shape) -> dict[str, Any]:
    """Return what a checkpoint's config.json says."""
    return {
        "architectures": [shape.architecture],
        "model_type": "qwen3" if shape.architecture.startswith("Qwen3") else "llama",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": shape.max_len,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "dtype": "bfloat16",
    }


def write_checkpoint(shape: Shape, directory: Path, quantized: str | None = None) -> None:
    """config.json and a made-up tokenizer of the right size: each id is a word, so that detokenizing costs what it costs.

    `quantized`: a name in `QUANTIZED`, if weights are to be stored so.
    """
    from tokenizers import Tokenizer, decoders, models

    config = config_of(shape)
    if quantized is not None:
        config["quantization_config"] = QUANTIZED[quantized]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.WordLevel({f"Ġw{i}": i for i in range(shape.vocab)}, unk_token="Ġw0"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": shape.max_len}))


def write_weights(directory: Path) -> float:
    """Random weights beside the config that lies there, made on the GPU if there is one. Returns their GB."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.bfloat16)  # which draws them
    model.save_pretrained(directory)
    del model
    gc.collect()
    torch.cuda.empty_cache()  # an engine may look at what is free
    return sum(file.stat().st_size for file in directory.glob("*.safetensors")) / 1e9
