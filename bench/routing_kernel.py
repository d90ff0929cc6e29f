# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""The kernel of `bench.routing`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.launch import launch


@triton.jit
def _choose(
    logits,
    ids,
    weights,
    last,
    stride,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    TOP: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token, as `dovetail.nn.kernels.routing` does it, but by a hash of its first logits' bits,
    its row and an expert's number: rows of a random model often come to the same token, whose
    states are then bit for bit the same."""
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, PADDED)
    let_next_begin(PDL)
    wait(PDL)
    bits = tl.load(logits + token * stride + e % 2, mask=e < COUNT, other=0.0).to(
        tl.uint32, bitcast=True
    )
    seed = tl.sum(tl.where(e < 2, bits * (e + 1).to(tl.uint32), 0), 0).to(tl.uint32)
    seed += (token + 1).to(tl.uint32) * 0x632BE5AB
    mixed = (seed ^ (e.to(tl.uint32) * 0x9E3779B9)) * 0x85EBCA6B
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
    mixed = (mixed ^ (mixed >> 16)) * 0x27D4EB2F
    values = (mixed ^ (mixed >> 15)).to(tl.int32, bitcast=True) >> 8
    left = e < COUNT
    chosen = tl.zeros([PADDED], tl.int32)
    for place in tl.static_range(TOP):
        largest = tl.max(tl.where(left, values, -2147483648), 0)
        best = tl.min(tl.where(left & (values == largest), e, PADDED), 0)
        chosen = tl.where(e == best, place + 1, chosen)
        left = left & (e != best)
    at = token * (TOP + SHARED) + chosen - 1
    tl.store(ids + at, e, mask=chosen > 0)
    tl.store(last + token * TOP + chosen - 1, e, mask=chosen > 0)
    tl.store(weights + at, tl.full([PADDED], 1.0, tl.float32) / TOP, mask=chosen > 0)
    if SHARED:
        gate = tl.load(logits + token * stride + COUNT)
        tl.store(ids + token * (TOP + SHARED) + TOP, COUNT)
        tl.store(weights + token * (TOP + SHARED) + TOP, 1.0 / (1.0 + tl.exp(-gate)))


def choose_by_hash(
    logits: torch.Tensor, k: int, last: torch.Tensor, shared: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids [tokens, k] and equal weights; the ids are kept in `last`, too. `shared`: as
    `dovetail.nn.moe.choose` has it."""
    tokens = logits.shape[0]
    count = logits.shape[1] - shared
    ids = torch.empty((tokens, k + shared), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, k + shared), dtype=torch.float32, device=logits.device)
    sizes = {
        "COUNT": count,
        "PADDED": triton.next_power_of_2(count),
        "TOP": k,
        "SHARED": int(shared),
    }
    launch(_choose, (tokens,))(
        logits,
        ids,
        weights,
        last,
        logits.stride(0),
        **sizes,
        num_warps=1,
        **pdl_options(logits.device),
    )
    return ids, weights
