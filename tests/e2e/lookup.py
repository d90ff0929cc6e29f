"""A constructed (not trained) model that looks up pairs over any distance: one attention layer with
fixed weights.

    token p < pairs           is a pair: its K says `key[p]`, its V `value[p % VALUES]`
    token pairs + p           asks for pair p: its q says `key[p]`, so it attends most to that pair, wherever it stands

What attention returns is nearest to the value of the pair that was asked for, which the head turns
into the token p % VALUES. `sharpness` is the score of that pair; all others have scores about 0.
The lower it is, the less the pair stands out of the sum over all tokens before.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VALUES = 64
SIZE = 64  # of the one head
UNTURNED = 8  # pairs of numbers from which on rotary positions turn nothing: the base is so large
KEY_SIZE = SIZE - 2 * UNTURNED
BASE = 1e30


def write_lookup_model(
    directory: Path, pairs: int, sharpness: float, max_len: int, seed: int = 0
) -> None:
    """Write config and weights, in float32, as transformers saves a LlamaForCausalLM."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.nn.functional.normalize(torch.randn(pairs, KEY_SIZE, generator=generator), dim=1)
    values = torch.nn.functional.normalize(torch.randn(VALUES, SIZE, generator=generator), dim=1)
    # the hidden state: | q | K | V | what attention returns |, each token's of length sqrt(2)
    # before its norm
    hidden, at = (
        4 * SIZE,
        {part: slice(i * SIZE, (i + 1) * SIZE) for i, part in enumerate(("q", "k", "v", "out"))},
    )
    # of a head, what isn't turned
    content = torch.cat(
        [torch.arange(UNTURNED, SIZE // 2), torch.arange(SIZE // 2 + UNTURNED, SIZE)]
    )
    embedding = torch.zeros(2 * pairs, hidden)
    embedding[:pairs, at["k"]] = _spread(keys, content)
    embedding[:pairs, at["v"]] = values[torch.arange(pairs) % VALUES]
    embedding[pairs:, at["q"]] = _spread(keys, content) * 2**0.5
    normed = (hidden / 2) ** 0.5  # what the norm multiplies them by
    eye, projections = torch.eye(SIZE), {}
    for name, part, factor in (
        ("q", "q", sharpness * SIZE**0.5 / 2**0.5),
        ("k", "k", 1.0),
        ("v", "v", 1.0),
    ):
        projections[name] = torch.zeros(SIZE, hidden)
        projections[name][:, at[part]] = eye * factor / normed
    out = torch.zeros(hidden, SIZE)
    out[at["out"]] = eye
    head = torch.zeros(2 * pairs, hidden)
    head[:VALUES, at["out"]] = values
    layer = "model.layers.0."
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": head,
        f"{layer}input_layernorm.weight": torch.ones(hidden),
        f"{layer}post_attention_layernorm.weight": torch.ones(hidden),
        f"{layer}self_attn.o_proj.weight": out,
        **{f"{layer}self_attn.{name}_proj.weight": weight for name, weight in projections.items()},
        **{f"{layer}mlp.{name}_proj.weight": torch.zeros(16, hidden) for name in ("gate", "up")},
        f"{layer}mlp.down_proj.weight": torch.zeros(hidden, 16),
    }
    save_file(weights, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 2 * pairs,
        "hidden_size": hidden,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": SIZE,
        "max_position_embeddings": max_len,
        "rope_theta": BASE,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))


def _spread(keys: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """Keys [pairs, KEY_SIZE] as numbers of a head [pairs, SIZE]."""
    spread = torch.zeros(len(keys), SIZE)
    spread[:, content] = keys
    return spread
