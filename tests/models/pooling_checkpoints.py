"""Tiny checkpoints that pool, and what transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tests.rounding import roundings_of

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


ROUNDINGS = roundings_of(SimpleNamespace(**SIZES), SIZES["max_position_embeddings"])


def save(directory: Path, kind: str, *, seed: int = 0, **fields: Any) -> Any:
    """Save a model of transformers' class `kind` with random weights that leave none at a neutral
    value, and return it."""
    config_class = getattr(transformers, kind).config_class
    torch.manual_seed(seed)
    model = getattr(transformers, kind)(config_class(**{**SIZES, **fields})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(
                mean=1.0 if "norm" in name.lower() and "bias" not in name else 0.0, std=0.15
            )
    model.save_pretrained(directory)
    return model


def sentence_transformer(
    directory: Path, *modules: str, pooling: dict[str, Any] | None = None, **files: dict[str, Any]
) -> None:
    """Add sentence-transformers' files: `modules` after the transformer, with the config of
    Pooling, and others by their names."""
    kinds = ("Transformer", *modules)
    paths = ["" if index == 0 else f"{index}_{kind}" for index, kind in enumerate(kinds)]
    listed = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (directory / "modules.json").write_text(json.dumps(listed))
    for kind, path in zip(kinds, paths, strict=True):
        if kind == "Pooling":
            (directory / path).mkdir()
            (directory / path / "config.json").write_text(
                json.dumps(
                    pooling or {"word_embedding_dimension": 48, "pooling_mode_lasttoken": True}
                )
            )
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))


def dense(
    directory: Path,
    inner: int,
    outer: int,
    activation: str = "Tanh",
    *,
    bias: bool = True,
    **fields: Any,
) -> torch.nn.Linear:
    """Save a layer as sentence-transformers does, and return it."""
    torch.manual_seed(outer)
    layer = torch.nn.Linear(inner, outer, bias=bias)
    directory.mkdir()
    config = {
        "in_features": inner,
        "out_features": outer,
        "bias": bias,
        "activation_function": f"torch.nn.modules.activation.{activation}",
    }
    (directory / "config.json").write_text(json.dumps({**config, **fields}))
    save_file(
        {f"linear.{name}": tensor for name, tensor in layer.state_dict().items()},
        directory / "model.safetensors",
    )
    return layer


@torch.no_grad()
def states(model: Any, tokens: list[int]) -> torch.Tensor:
    """[tokens, hidden] of the body of transformers' model, after the last norm."""
    found: torch.Tensor = model.base_model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    return found
