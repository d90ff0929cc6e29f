"""config.json files of models with sliding windows, as they are published."""

from __future__ import annotations

from typing import Any

GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 201_088,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "tie_word_embeddings": False,
}
GEMMA_3_27B: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "intermediate_size": 21_504,
        "sliding_window": 1024,
        "query_pre_attn_scalar": 168,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "num_hidden_layers": 27,
    },
}
GEMMA_2_9B: dict[str, Any] = {
    "model_type": "gemma2",
    "num_hidden_layers": 42,
    "hidden_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "intermediate_size": 14_336,
    "vocab_size": 256_000,
    "sliding_window": 4096,
}
MISTRAL_7B: dict[str, Any] = {
    "model_type": "mistral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "vocab_size": 32_000,
    "sliding_window": 4096,
}
QWEN2_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18_944,
    "vocab_size": 152_064,
    "sliding_window": 131_072,
    "max_window_layers": 28,
    "use_sliding_window": False,
}
WINDOWED = {
    "gpt-oss-20b": GPT_OSS_20B,
    "Gemma-3-27b": GEMMA_3_27B,
    "Gemma-2-9b": GEMMA_2_9B,
    "Mistral-7B-v0.1": MISTRAL_7B,
    "Qwen2-7B": QWEN2_7B,
}
