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
from dovetail_models.transformers_attention import NAME, attention, positions_of_step

_DIGIT = 256  # positions are two digits, whole numbers below this, which bfloat16 holds
_PADDED = 8  # numbers that two more of a head are padded to


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


def _biased(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    slopes: torch.Tensor,
) -> torch.Tensor:
    """Return `_attended` with ALiBi (arXiv:2108.12409): `slopes` [heads] times the distance of a key
    is subtracted from its score. That is, but for a number that is equal for all keys of a query,
    the product of a slope and the key's position: two more numbers of q and of k, each of which 16
    bits hold."""
    positions = positions_of_step.get()
    digits = torch.stack([positions // _DIGIT, positions % _DIGIT], dim=-1)  # [tokens, 2]
    weights = slopes[:, None, None] / scale * torch.tensor([_DIGIT, 1.0], device=slopes.device)
    none = (0, _PADDED - 2)
    more_k = nn.functional.pad(digits, none).to(k.dtype).expand(*k.shape[:3], -1)
    more_q = nn.functional.pad(weights, none).to(q.dtype).expand(*q.shape[:3], -1)
    q = torch.cat([q, more_q], dim=-1)
    k = torch.cat([k, more_k], dim=-1)
    out, _ = attention(module, q, k, v, None, scaling=scale, has_positions=True)
    return out


def _bloom(
    module: Any, hidden_states: torch.Tensor, residual: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    q, k, v = module._reshape(module.query_key_value(hidden_states))  # noqa: SLF001
    code = sys.modules[type(module).__module__]
    # [heads], at position 1
    slopes = code.build_alibi_tensor(
        torch.ones(1, 2, device=q.device), module.num_heads, torch.float32
    )[:, 0, 1]
    out = _biased(module, q, k, v, module.inv_norm_factor, slopes).flatten(2)
    return module.dense(out) + residual, None


def _mpt(module: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
    qkv = module.Wqkv(hidden_states)
    if module.clip_qkv:
        qkv = qkv.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    q, k, v = (x.unflatten(2, (module.n_heads, -1)).transpose(1, 2) for x in qkv.chunk(3, dim=2))
    code = sys.modules[type(module).__module__]
    # [heads], at distance 1
    slopes = -code.build_mpt_alibi_tensor(module.n_heads, 2, device=q.device)[:, 0, 0]
    out = _biased(module, q, k, v, module.softmax_scale, slopes).flatten(2)
    return module.out_proj(out), None


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
        raise UnsupportedError("its ALiBi is rounded to bfloat16, key by key")
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
    ("bloom", "BloomAttention"): ("forward", _bloom),
    ("codegen", "CodeGenAttention"): ("_attn", _gptj),
    ("falcon", "FalconAttention"): ("forward", _falcon),
    ("gpt_neo", "GPTNeoSelfAttention"): ("_attn", _gpt_neo),
    ("gpt_neox_japanese", "GPTNeoXJapaneseAttention"): ("_attn", _japanese),
    ("gptj", "GPTJAttention"): ("_attn", _gptj),
    ("mpt", "MptAttention"): ("forward", _mpt),
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
    # It makes no masks for ours, but for code that can't do without one.
    makes_masks = type(model).__name__.startswith("Mpt")
    model.config._attn_implementation = "eager" if makes_masks else implementation  # noqa: SLF001
