# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""What turns logits into log-probabilities, and a token's rank, without a float32 copy of the logits. Twin: `dovetail.nn.logprobs`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels.launch import launch

LEAST = tl.constexpr(torch.finfo(torch.float32).min)
CHUNK = 4096  # numbers that a program looks at in one go
WARPS = 8


@triton.jit
def _normalizer_and_rank(logits, token_ids, normalizers, ranks, vocab, stride, CHUNK: tl.constexpr):
    """One row. Each lane sums what lies CHUNK apart; the lanes are joined at the end."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHUNK)
    own = tl.load(logits + row * stride + tl.load(token_ids + row)).to(tl.float32)
    top, total = tl.full((CHUNK,), LEAST, tl.float32), tl.zeros((CHUNK,), tl.float32)
    likelier = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, vocab, CHUNK):
        x = tl.load(logits + row * stride + start + lane, mask=start + lane < vocab, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
        likelier += (x > own).to(tl.int32)
    largest = tl.max(top, 0)
    tl.store(normalizers + row, largest + tl.log(tl.sum(total * tl.exp(top - largest), 0)))
    tl.store(ranks + row, 1 + tl.sum(likelier, 0).to(tl.int64))


def normalizer_and_rank(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of logits [n, vocab]: what to subtract from a row's logits to get log-probabilities, [n, 1] float32; and 1 + how many are strictly larger
    than that of `token_ids` [n] int64, [n] int64."""
    n, vocab = logits.shape
    normalizers = torch.empty((n, 1), dtype=torch.float32, device=logits.device)
    ranks = torch.empty(n, dtype=torch.int64, device=logits.device)
    if n:
        launch(_normalizer_and_rank, (n,))(logits, token_ids, normalizers, ranks, vocab, logits.stride(0), CHUNK=CHUNK, num_warps=WARPS)
    return normalizers, ranks
