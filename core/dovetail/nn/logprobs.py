"""Log-probabilities of the unmodified distribution, for samplers and prompts."""

from __future__ import annotations

from contextlib import suppress

import torch

from dovetail.api.sampler import TopLogprobs
from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable

FEW = 32  # most likely tokens that a kernel selects one by one
# logits processed at once without a kernel: each needs some 30 bytes of temporary memory
AT_ONCE = 1 << 24


def top_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    k: int,
    rows: torch.Tensor | None = None,
    asked: torch.Tensor | None = None,
) -> TopLogprobs:
    """Return the log-probabilities, under logits [n, vocab] of any float dtype, of `token_ids` [n]
    int64, followed by the k most likely tokens of each row (all of them if k > vocab), best first,
    ties by lowest id. Computed in float32. A token's rank is 1 + the number of strictly more likely
    ones.

    With `rows` [n] int64, only the first asked[rows[i]] (asked [any] int32, at most k) of the most
    likely are defined for row i; nothing at all if that is negative. Can be recorded in a CUDA
    graph."""
    k = min(k, logits.shape[1])
    if k <= FEW and logits.stride(1) == 1 and use_kernels(token_ids):
        from dovetail.nn.kernels import logprobs as kernels

        with suppress(KernelUnavailable):
            return TopLogprobs(*kernels.top_logprobs(logits, token_ids, k, rows, asked))
    most = max(1, AT_ONCE // logits.shape[1])
    parts = [
        _top_logprobs(part, own, k)
        for part, own in zip(torch.split(logits, most), torch.split(token_ids, most), strict=True)
    ]
    return TopLogprobs(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _top_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    own_ids = token_ids[:, None]
    ids = torch.cat((own_ids, _likeliest(logits, k)), dim=1)
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)  # [n, vocab]
    # from logits: close ones may have equal logprobs
    ranks = 1 + (logits > logits.gather(1, own_ids)).sum(dim=1)
    return ids, logprobs.gather(1, ids), ranks


def _likeliest(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return [n, k] int64, sorted by logit, then by id: both packed into one integer, since `topk`
    returns ties in any order."""
    bits = (logits.to(torch.float32) + 0.0).view(torch.int32)  # -0 + 0 is 0
    order = torch.where(logits.isnan(), 2**31 - 1, bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(
        torch.int64
    )
    lowest_first = torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    return (order << 32 | lowest_first).topk(k, dim=1).indices
