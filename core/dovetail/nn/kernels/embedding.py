# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Embedding lookup. torch's kernel is slow for few rows, as in small decode steps. Twin:
`dovetail.nn.embedding`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.errors import DovetailError
from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.launch import launch
from dovetail.nn.kernels.row import warps_of_row


@triton.jit
def _embed(token_ids, weight, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Look up one token."""
    let_next_begin(PDL)
    place = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < SIZE
    wait(PDL)
    token_id = tl.load(token_ids + place)
    tl.store(out + place * SIZE + i, tl.load(weight + token_id * SIZE + i, mask=mask), mask=mask)


def embed(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the rows [tokens, size] of weight [rows, size], contiguous, at token_ids [tokens]
    int64."""
    tokens = len(token_ids)
    size = weight.shape[1]
    out = torch.empty((tokens, size), dtype=weight.dtype, device=weight.device)
    block = triton.next_power_of_2(size)
    if tokens:
        launch(_embed, (tokens,))(
            token_ids,
            weight,
            out,
            SIZE=size,
            BLOCK=block,
            num_warps=warps_of_row(block),
            **pdl_options(weight.device),
        )
    return out


def check(device: torch.device) -> None:
    """Raise unless this simplest of all kernels computes correct values on `device`. Bypasses
    `launch`: a failure is the device's, not the kernel's."""
    token_ids = torch.tensor([2], device=device)
    weight = torch.arange(48.0, device=device).view(3, 16)
    out = torch.empty((1, 16), device=device)
    _embed[(1,)](token_ids, weight, out, SIZE=16, BLOCK=16, num_warps=1, **pdl_options(device))
    if not torch.equal(out, weight[2:]):
        raise DovetailError("it computes wrong numbers")
