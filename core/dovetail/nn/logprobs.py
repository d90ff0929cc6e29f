"""Log-probabilities of the raw distribution, for samplers and for prompts."""

from __future__ import annotations

import torch

from dovetail.api.sampler import TopLogprobs


def top_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> TopLogprobs:
    """Of logits [n, vocab], any float dtype: the log-probabilities of `token_ids` [n] int64, then of the k likeliest of each row (all of
    them if k > vocab), best first. Computed in float32. A token's rank is 1 + how many are strictly likelier."""
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)  # [n, vocab]
    own_ids = token_ids[:, None]
    ranks = 1 + (logits > logits.gather(1, own_ids)).sum(dim=1)  # of logits: close ones may have equal logprobs
    best_ids = logits.topk(min(k, logits.shape[1]), dim=1).indices
    ids = torch.cat((own_ids, best_ids), dim=1)
    return TopLogprobs(ids, logprobs.gather(1, ids), ranks)
