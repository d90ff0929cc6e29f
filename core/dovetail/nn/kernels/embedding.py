# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Rows of the embedding. torch has a slow kernel for few of them, as a decode step of few requests asks for. Twin: `dovetail.nn.embedding`."""

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
    """One token."""
    let_next_begin(PDL)
    place, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = i < SIZE
    wait(PDL)
    token_id = tl.load(token_ids + place)
    tl.store(out + place * SIZE + i, tl.load(weight + token_id * SIZE + i, mask=mask), mask=mask)


def embed(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """token_ids [tokens] int64, each a row of weight [rows, size], contiguous -> [tokens, size]."""
    tokens, size = len(token_ids), weight.shape[1]
    out, block = torch.empty((tokens, size), dtype=weight.dtype, device=weight.device), triton.next_power_of_2(size)
    if tokens:
        launch(_embed, (tokens,))(token_ids, weight, out, SIZE=size, BLOCK=block, num_warps=warps_of_row(block), **pdl_options(weight.device))
    return out


def check(device: torch.device) -> None:
    """Raises unless it, the plainest of all kernels, computes what it should here. It goes past `launch`: a failure is the device's, not its own."""
    token_ids, weight = torch.tensor([2], device=device), torch.arange(48.0, device=device).view(3, 16)
    out = torch.empty((1, 16), device=device)
    _embed[(1,)](token_ids, weight, out, SIZE=16, BLOCK=16, num_warps=1, **pdl_options(device))
    if not torch.equal(out, weight[2:]):
        raise DovetailError("it computes wrong numbers")
