# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Kernel that writes a step's K and V to the paged cache of the `triton` backend."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels.e4m3 import scaled_codes
from dovetail.nn.kernels.launch import launch


def write(
    k: torch.Tensor,
    v: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    tile: tuple[int, int],
    *,
    scaled: bool,
    latent: bool,
    paging: Mapping[str, int],
) -> None:
    """Write k and v [tokens, heads, size] to the caches of K and V. `scales`, `scaled`, `latent`
    and `paging`: of the kernel; `tile`: tokens and numbers of a program."""
    if len(k) == 0:
        return
    _, heads, size = k.shape
    tokens, width = tile
    launch(scatter, (-(-len(k) // tokens), -(-heads * size // width)))(
        k,
        v,
        *caches,
        slots,
        *scales,
        len(k),
        K_TOKEN_STRIDE=k.stride(0),
        V_TOKEN_STRIDE=v.stride(0),
        KV_HEADS=heads,
        D=size,
        M=tokens,
        N=width,
        SCALED=scaled,
        LATENT=latent,
        **paging,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def scatter(
    k,
    v,
    k_cache,
    v_cache,
    slots,  # [tokens] int64
    k_scale,  # [] float32
    v_scale,
    num_tokens,
    K_TOKEN_STRIDE: tl.constexpr,
    V_TOKEN_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    SCALED: tl.constexpr,  # the caches hold codes of e4m3, uint8
    LATENT: tl.constexpr,  # V is in K: there is no other
):
    """Write N numbers of each of M tokens' K and V. The heads of a token are contiguous in k and
    v."""
    token = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
    i = tl.program_id(1) * N + tl.arange(0, N)
    mask = (slot >= 0)[:, None] & (i < KV_HEADS * D)[None, :]
    place = (slot // BLOCK_SIZE * BLOCK_STRIDE + slot % BLOCK_SIZE * TOKEN_STRIDE)[:, None] + (
        i // D * HEAD_STRIDE + i % D
    )[None, :]
    new_k = tl.load(k + token[:, None] * K_TOKEN_STRIDE + i[None, :], mask=mask)
    if SCALED:
        new_k = scaled_codes(new_k.to(tl.float32), tl.load(k_scale))
    tl.store(k_cache + place, new_k, mask=mask)
    if not LATENT:
        new_v = tl.load(v + token[:, None] * V_TOKEN_STRIDE + i[None, :], mask=mask)
        if SCALED:
            new_v = scaled_codes(new_v.to(tl.float32), tl.load(v_scale))
        tl.store(v_cache + place, new_v, mask=mask)
