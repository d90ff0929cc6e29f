"""GGUF files of tiny models, as llama.cpp's converter writes them, with the package gguf."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants

from dovetail.gguf.config import FAMILIES, checkpoint_name
from dovetail.gguf.header import TYPES

TOKENS = [*(chr(ord("!") + index) for index in range(93)), "!!"]


def random_blocks(name: str, rows: int, numbers: int, seed: int = 0) -> np.ndarray:
    """Return rows of a quantized type, [rows, bytes]: random ones, with scales that are small
    numbers of 16 bits."""
    kind = next(one for one in TYPES.values() if one.name == name)
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows * numbers // kind.numbers, kind.size), np.uint8)
    scale = np.array([0.0123], np.float16).view(np.uint8)
    begins = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,)}
    begins |= {"Q5_0": (0,), "TQ1_0": (52,), "TQ2_0": (64,), "IQ1_M": (), "MXFP4": ()}
    begins |= {
        one.name: (0,)
        for one in TYPES.values()
        if one.name.startswith("IQ") and one.name != "IQ1_M"
    }
    if name == "IQ1_M":  # the scale is in the highest bits of four numbers
        blocks[:, 49:56:2] = blocks[:, 49:56:2] & 15 | np.array([0x40, 0x20, 0x20, 0x20], np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = blocks[:, 0] % 8 + 116
    for at in begins.get(name, (0, 2)):
        blocks[:, at : at + 2] = scale
    return blocks.reshape(rows, -1)


def dequantized(blocks: np.ndarray, name: str) -> torch.Tensor:
    return torch.from_numpy(quants.dequantize(blocks, GGMLQuantizationType[name]))


def stored_rows(values: np.ndarray, heads: int) -> np.ndarray:
    """Return rows of Q or K in the order in which llama.cpp's converter stores them."""
    size = len(values) // heads
    pairs = values.reshape(heads, 2, size // 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def save_gguf(
    path: Path,
    architecture: str,
    model: Any,
    *,
    kind: str = "F32",
    metadata: Mapping[str, Any] = {},
    extra: Mapping[str, torch.Tensor] = {},
) -> None:
    """Write a model of transformers. `kind`: the type of its matrices, whose values are replaced in
    the model by those that the file has. `extra`: more tensors, in float32."""
    config = model.config
    family = FAMILIES[architecture]
    writer = GGUFWriter(str(path), architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for key, value in metadata.items():
        writer.add_key_value(key, *_typed(value))
    if "tokenizer.ggml.tokens" not in metadata:
        _add_tokenizer(writer)
    layers = [
        f"blk.{index}.{name}" for index in range(config.num_hidden_layers) for name in family.names
    ]
    names = [f"{name}.{part}" for name in layers for part in ("weight", "bias")]
    state = model.state_dict()
    for name in ["token_embd.weight", "output_norm.weight", "output.weight", *names]:
        known = checkpoint_name(name, family)
        if known in state and not (known == "lm_head.weight" and config.tie_word_embeddings):
            _add_tensor(writer, name, state[known], kind, config, family)
    for name, tensor in extra.items():
        writer.add_tensor(name, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _typed(value: Any) -> tuple[Any, ...]:
    from gguf import GGUFValueType

    if isinstance(value, list):
        return value, GGUFValueType.ARRAY, GGUFValueType.get_type(value[0])
    if isinstance(value, int) and not isinstance(value, bool):
        return value, GGUFValueType.UINT32
    return value, GGUFValueType.get_type(value)


def _add_tokenizer(writer: GGUFWriter) -> None:
    """Add a byte-level tokenizer of one merge."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * len(TOKENS))
    writer.add_token_merges(["! !"])


def _add_tensor(
    writer: GGUFWriter, name: str, tensor: torch.Tensor, kind: str, config: Any, family: Any
) -> None:
    values = tensor.float().numpy()
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    turned = heads.get(name.split(".")[-2], 0) if family.turned else 0
    if values.ndim == 1 or kind == "F32":
        values = values + (1 if family.one_more and name.endswith("norm.weight") else 0)
        writer.add_tensor(name, stored_rows(values, turned) if turned else values.copy())
        return
    blocks = random_blocks(kind, *values.shape, seed=sum(name.encode()))
    tensor.copy_(dequantized(blocks, kind))
    blocks = stored_rows(blocks, turned) if turned else blocks
    writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType[kind])
