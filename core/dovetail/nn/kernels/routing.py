# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Choice of experts: logits in float32, the largest ones, their softmax. Twins:
`dovetail.nn.moe`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels import few_rows, one_row
from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.launch import launch

FEW_ROWS = 16  # above, torch.matmul is as fast


@triton.jit
def _choose(
    logits,  # [tokens, COUNT + SHARED]
    ids,  # [tokens, TOP + SHARED]
    weights,
    stride,  # of logits
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    TOP: tl.constexpr,
    SHARED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Route one token. NaN logits count as the lowest."""
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, PADDED)
    let_next_begin(PDL)
    wait(PDL)
    lowest = float("-inf")
    values = tl.load(logits + token * stride + e, mask=e < COUNT, other=lowest)
    values = tl.where(values == values, values, lowest)
    most = tl.max(values, 0)
    if NORMALIZE:
        total = 0.0
    else:
        total = tl.sum(tl.exp(values - most), 0)
    left = e < COUNT
    chosen = tl.zeros([PADDED], tl.int32)  # rank from 1 on; 0: not chosen
    for place in tl.static_range(TOP):
        largest = tl.max(tl.where(left, values, lowest), 0)
        best = tl.min(tl.where(left & (values == largest), e, PADDED), 0)
        if NORMALIZE:
            total += tl.exp(largest - most)
        chosen = tl.where(e == best, place + 1, chosen)
        left = left & (e != best)
    at = token * (TOP + SHARED) + chosen - 1
    tl.store(ids + at, e, mask=chosen > 0)
    tl.store(weights + at, tl.exp(values - most) / total, mask=chosen > 0)
    if SHARED:
        gate = tl.load(logits + token * stride + COUNT)
        tl.store(ids + token * (TOP + SHARED) + TOP, COUNT)
        tl.store(weights + token * (TOP + SHARED) + TOP, 1.0 / (1.0 + tl.exp(-gate)))


def choose(
    logits: torch.Tensor, k: int, normalize: bool, shared: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `dovetail.nn.moe.choose`, for logits whose rows are contiguous."""
    tokens = logits.shape[0]
    count = logits.shape[1] - shared
    ids = torch.empty((tokens, k + shared), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, k + shared), dtype=torch.float32, device=logits.device)
    if tokens:
        padded = triton.next_power_of_2(count)
        launch(_choose, (tokens,))(
            logits,
            ids,
            weights,
            logits.stride(0),
            COUNT=count,
            PADDED=padded,
            TOP=k,
            SHARED=int(shared),
            NORMALIZE=normalize,
            num_warps=1,
            **pdl_options(logits.device),
        )
    return ids, weights


def logits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [tokens, hidden] and weight [experts, hidden], contiguous and of the same dtype -> [tokens,
    experts] float32, without intermediate rounding."""
    out = torch.empty((len(x), len(weight)), dtype=torch.float32, device=x.device)
    if len(x) == 1:
        return one_row.linear(x, weight, bias, into=out)
    if (
        x.dtype != torch.float32
        and 1 < len(x) <= FEW_ROWS
        and (tiling := few_rows.tiling_for(weight, len(x), False)) is not None
    ):
        return few_rows.linear(x, weight, bias, tiling=tiling, into=out)
    if x.is_cuda and x.dtype != torch.float32:
        product = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return product if bias is None else product.add_(bias)
    return torch.nn.functional.linear(
        x.float(), weight.float(), None if bias is None else bias.float()
    )
