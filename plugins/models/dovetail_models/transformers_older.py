"""Attention of transformers' older model code, which computes scores by itself, through the same
attention function as newer code.

`attend_by` replaces methods of these attention modules: by ours, in which backends attend, or by
the model's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from dovetail.errors import UnsupportedError
from dovetail_models.transformers_attention import NAME, attention


def _attended(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Return the attention [1, tokens, heads, head_size] of q, k and v [1, heads, tokens,
    head_size]."""
    out, _ = attention(module, q, k, v, None, scaling=scale, sliding_window=window)
    return out


def _gptj(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> Any:
    q, k = q.to(v.dtype), k.to(v.dtype)  # CodeGen's are float32
    return _attended(module, q, k, v, 1 / module.scale_attn).transpose(1, 2), None


def _gpt_neo(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> Any:
    window = module.config.window_size if module.attention_type == "local" else None
    return _attended(module, q, k, v, 1.0, window).transpose(1, 2), None


def _japanese(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> Any:
    return _attended(module, q, k, v, 1 / module.norm_factor).transpose(1, 2), None


def _openai(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> Any:
    scale = v.shape[-1] ** -0.5 if module.scale else 1.0
    return [_attended(module, q, k.transpose(2, 3), v, scale).transpose(1, 2)]


def _falcon(
    module: Any,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None,
    *_: Any,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    if alibi is not None:
        raise UnsupportedError("its attention has alibi, which attention backends don't compute")
    split = module._split_heads(module.query_key_value(hidden_states))  # noqa: SLF001
    q, k, v = (x.transpose(1, 2) for x in split)
    if module.new_decoder_architecture:  # K and V are repeated for each head
        sharing = module.num_heads // module.num_kv_heads
        k, v = k[:, ::sharing], v[:, ::sharing]
    rotated = sys.modules[type(module).__module__].apply_rotary_pos_emb
    q, k = rotated(q, k, *(position_embeddings or ()))
    return module.dense(_attended(module, q, k, v, module.inv_norm_factor).flatten(2)), None


def _xglm(module: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
    projections = (module.q_proj, module.k_proj, module.v_proj)
    q, k, v = (
        projection(hidden_states).unflatten(2, (module.num_heads, -1)).transpose(1, 2)
        for projection in projections
    )
    return module.out_proj(_attended(module, q, k, v, module.scaling).flatten(2)), None


# (family, class) -> (method, what replaces it: its arguments follow the module)
_OLDER: Mapping[tuple[str, str], tuple[str, Callable[..., Any]]] = {
    ("codegen", "CodeGenAttention"): ("_attn", _gptj),
    ("falcon", "FalconAttention"): ("forward", _falcon),
    ("gpt_neo", "GPTNeoSelfAttention"): ("_attn", _gpt_neo),
    ("gpt_neox_japanese", "GPTNeoXJapaneseAttention"): ("_attn", _japanese),
    ("gptj", "GPTJAttention"): ("_attn", _gptj),
    ("openai", "Attention"): ("_attn", _openai),
    ("xglm", "XGLMAttention"): ("forward", _xglm),
}


def attend_by(model: PreTrainedModel, implementation: str) -> None:
    """Make a model attend by `implementation`: `NAME`, or one of transformers' own."""
    older = [
        (module, *_OLDER[key])
        for module in model.modules()
        if (key := (type(module).__module__.split(".")[-2], type(module).__name__)) in _OLDER
    ]
    if not older:
        model.set_attn_implementation(implementation)
        return
    for module, method, ours in older:
        vars(module).pop(method, None)
        if implementation == NAME:
            setattr(module, method, partial(ours, module))
    # it makes no masks for ours
    model.config._attn_implementation = implementation  # noqa: SLF001
