"""Log-probabilities of the raw distribution, for samplers and for prompts."""

from __future__ import annotations

from contextlib import suppress

import torch

from dovetail.api.sampler import TopLogprobs
from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable


def top_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> TopLogprobs:
    """Of logits [n, vocab], any float dtype: the log-probabilities of `token_ids` [n] int64, then of the k likeliest of each row (all of
    them if k > vocab), best first. Computed in float32. A token's rank is 1 + how many are strictly likelier."""
    own_ids = token_ids[:, None]
    best_ids = logits.topk(min(k, logits.shape[1]), dim=1).indices
    ids = torch.cat((own_ids, best_ids), dim=1)
    if use_kernels(logits, token_ids):
        from dovetail.nn.kernels.logprobs import normalizer_and_rank

        with suppress(KernelUnavailable):
            normalizers, ranks = normalizer_and_rank(logits, token_ids)
            return TopLogprobs(ids, logits.gather(1, ids).to(torch.float32) - normalizers, ranks)
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)  # [n, vocab]
    ranks = 1 + (logits > logits.gather(1, own_ids)).sum(dim=1)  # of logits: close ones may have equal logprobs
    return TopLogprobs(ids, logprobs.gather(1, ids), ranks)
