# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Everything between the projection of q, k and v and attention, fused: reads and writes each value
once. Twin: `dovetail.nn.qkv`.

A program handles some heads of one token, of any of the three kinds:

    qkv   | q head 0 | … | k head 0 | … | v head 0 | …        one token
            normed, rotated, in place
                           normed, rotated, to the cache
                                          unchanged, to the cache

Values for an FP8 cache are rounded to the dtype of qkv first, as if they had been passed to
`AttentionLayer.write`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from dovetail.api.attention import FusedCache
from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.e4m3 import scaled_codes
from dovetail.nn.kernels.launch import launch

NUMBERS = 2048  # per program, approximately
# 16 bytes of bfloat16 of each half per thread; with less than one value, some would be overwritten
# before they are read
NUMBERS_PER_WARP = 512


@triton.jit
def _norm_turn_write(
    qkv,
    weight,
    table,
    positions,
    k_cache,
    v_cache,
    slots,  # [tokens] int64
    k_scale,  # [] float32
    v_scale,
    eps,
    TOKEN: tl.constexpr,  # numbers of qkv from one token to the next
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    ROTATED: tl.constexpr,  # numbers of a head
    HALF: tl.constexpr,  # D / 2 padded to a power of 2
    M: tl.constexpr,  # heads
    NORMED: tl.constexpr,
    WRITES: tl.constexpr,
    SCALED: tl.constexpr,  # the caches hold codes of e4m3, uint8
    BLOCK_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,  # strides
    K_TOKEN: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_BLOCK: tl.constexpr,
    V_TOKEN: tl.constexpr,
    V_HEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * M + tl.arange(0, M))[:, None]
    i = tl.arange(0, HALF)[None, :]
    exists = (head < HEADS + 2 * KV_HEADS) & (i < D // 2)
    is_v = head >= HEADS + KV_HEADS
    # the numbers of pair i; those beyond the rotated ones form pairs, too
    low_at = i
    high_at = i + D // 2
    if ROTATED < D:
        low_at = tl.where(i < ROTATED // 2, i, i + ROTATED // 2)
        high_at = tl.where(i < ROTATED // 2, i + ROTATED // 2, i + D // 2)
    place = qkv + token * TOKEN + head * D
    # [M, HALF]
    low_kept = tl.load(place + low_at, mask=exists, other=0.0)
    high_kept = tl.load(place + high_at, mask=exists, other=0.0)
    low = low_kept.to(tl.float32)
    high = high_kept.to(tl.float32)

    if NORMED:
        scale = tl.rsqrt(tl.sum(low * low + high * high, 1) / D + eps)[:, None]
        weighed = exists & (head < HEADS + KV_HEADS)
        low *= scale * tl.load(weight + head * D + low_at, mask=weighed, other=0.0).to(tl.float32)
        high *= scale * tl.load(weight + head * D + high_at, mask=weighed, other=0.0).to(tl.float32)
    angles = table + tl.load(positions + token) * ROTATED + i
    cos = tl.load(angles, mask=i < ROTATED // 2, other=1.0)
    sin = tl.load(angles + ROTATED // 2, mask=i < ROTATED // 2, other=0.0)
    low, high = low * cos - high * sin, high * cos + low * sin
    low = low.to(qkv.dtype.element_ty)
    high = high.to(qkv.dtype.element_ty)

    in_place = exists & (head < HEADS if WRITES else head < HEADS + KV_HEADS)
    tl.store(place + low_at, low, mask=in_place)
    tl.store(place + high_at, high, mask=in_place)
    if WRITES:
        slot = tl.load(slots + token)
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        to_k = k_cache + block * K_BLOCK + offset * K_TOKEN + (head - HEADS) * K_HEAD
        is_k = exists & (head >= HEADS) & (head < HEADS + KV_HEADS) & (slot >= 0)
        tl.store(to_k + low_at, _kept(low, k_scale, SCALED), mask=is_k)
        tl.store(to_k + high_at, _kept(high, k_scale, SCALED), mask=is_k)
        to_v = v_cache + block * V_BLOCK + offset * V_TOKEN + (head - HEADS - KV_HEADS) * V_HEAD
        is_v = exists & is_v & (slot >= 0)
        tl.store(to_v + low_at, _kept(low_kept, v_scale, SCALED), mask=is_v)
        tl.store(to_v + high_at, _kept(high_kept, v_scale, SCALED), mask=is_v)


@triton.jit
def _kept(values, scale, SCALED: tl.constexpr):
    """Return K or V in the cache's dtype."""
    if SCALED:
        values = scaled_codes(values.to(tl.float32), tl.load(scale))
    return values


def norm_turn_write(
    qkv: torch.Tensor,
    kv_heads: int,
    weight: torch.Tensor | None,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    cache: FusedCache | None,
) -> None:
    """Norm (if `weight` [(heads + kv_heads) * head_size] is given) and rotate q and k of qkv
    [tokens, heads + 2 * kv_heads, head_size], each token's heads contiguous, by `table` [max_len,
    rotated numbers of a head] float32 at `positions` [tokens] int64. q stays in place, and so does
    k without a `cache`; with one, k and v are stored there, as e4m3 codes if it has `scales`, and
    k's values in qkv become undefined. Computes in float32."""
    tokens, all_heads, size = qkv.shape
    half = triton.next_power_of_2(size // 2)
    heads_at_once = min(triton.next_power_of_2(all_heads), max(1, NUMBERS // (2 * half)))
    if not tokens:
        return
    k, v, slots = (qkv, qkv, positions) if cache is None else (cache.k, cache.v, cache.slots)
    k_scale = v_scale = table  # unused
    if cache is not None and cache.scales is not None:
        k = k.view(torch.uint8)
        v = v.view(torch.uint8)
        k_scale = cache.scales.k
        v_scale = cache.scales.v
    k_strides = _strides(cache.k if cache else None)
    v_strides = _strides(cache.v if cache else None)
    launch(_norm_turn_write, (tokens, triton.cdiv(all_heads, heads_at_once)))(
        qkv,
        qkv if weight is None else weight,
        table,
        positions,
        k,
        v,
        slots,
        k_scale,
        v_scale,
        eps,
        TOKEN=qkv.stride(0),
        HEADS=all_heads - 2 * kv_heads,
        KV_HEADS=kv_heads,
        D=size,
        ROTATED=table.shape[1],
        HALF=half,
        M=heads_at_once,
        NORMED=weight is not None,
        WRITES=cache is not None,
        SCALED=cache is not None and cache.scales is not None,
        BLOCK_SIZE=1 if cache is None else cache.k.shape[1],
        K_BLOCK=k_strides[0],
        K_TOKEN=k_strides[1],
        K_HEAD=k_strides[2],
        V_BLOCK=v_strides[0],
        V_TOKEN=v_strides[1],
        V_HEAD=v_strides[2],
        num_warps=max(1, 2 * heads_at_once * half // NUMBERS_PER_WARP),
        **pdl_options(qkv.device),
    )


def _strides(cache: torch.Tensor | None) -> Sequence[int]:
    return (0, 0, 0) if cache is None else cache.stride()
