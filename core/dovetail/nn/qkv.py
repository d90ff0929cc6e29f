"""Operations between the projection of q, k and v and attention: norm of heads, rotary embedding,
storing K and V in the cache."""

from __future__ import annotations

from contextlib import suppress

import torch

from dovetail.api.attention import AttentionLayer
from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.nn.norm import QKNorm
from dovetail.nn.rotary import Rotation, apply_rotary


def rope_and_store_kv(
    qkv: torch.Tensor, norm: QKNorm | None, rotation: Rotation, layer: AttentionLayer
) -> torch.Tensor:
    """Norm q and k of qkv [tokens, heads + 2 * kv_heads, head_size] (if `norm` is given), apply the
    rotary embedding to them, and store k and v in the layer's cache. Returns q [tokens, heads,
    head_size]. May overwrite qkv. For a layer that shares another's cache, qkv is q alone."""
    heads = layer.spec.heads
    kv_heads = layer.spec.kv_heads if layer.spec.shares is None else 0
    if use_kernels(qkv[:1]) and qkv.stride(-1) == 1:  # tokens may have more next to it
        from dovetail.nn.kernels.qkv import norm_turn_write

        cache = layer.cache_for_fused_write() if kv_heads else None
        weight, eps = (norm.weight, norm.eps) if norm is not None else (None, 0.0)
        with suppress(KernelUnavailable):
            norm_turn_write(qkv, kv_heads, weight, eps, rotation.table, rotation.positions, cache)
            q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
            if cache is None and kv_heads:
                layer.write(k, v)
            return q
    qk, v = qkv.tensor_split((heads + kv_heads,), dim=1)
    if norm is not None:
        qk = norm(qk)
    q, k = apply_rotary(qk, rotation).tensor_split((heads,), dim=1)
    if kv_heads:
        layer.write(k, v)
    return q
