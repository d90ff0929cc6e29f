"""Top-k, top-p and min-p: the tokens of a row that may be sampled. The most likely token is always
kept.

Top-k keeps exactly k tokens, top-p the fewest whose probability reaches p, likeliest first; equal
logits are told apart by id, the lowest first, so that top_k=1 is greedy. Both come down to a value
and a number (`Cut`): keep what is above the value, and of what equals it as many as the number
leaves. Min-p compares with the likeliest token, which every filter keeps, so its place in the order
doesn't matter.

Scores are logits / temperature less the row's largest: [n, vocab] float32, 0 at most. Weights are
exp(scores).

The CPU has separate code: there numpy sorts and searches (it uses vector instructions, torch
doesn't and is 10 times slower), and results can be inspected to skip work; on a device that would
synchronize.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

FEW = 256  # tokens that top-p inspects on the CPU before sorting all
LEAST = torch.finfo(torch.float32).min


def on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """values [n, m] float32 -> the k largest of each row, descending: [n, k]."""
    size = values.shape[1]
    if not on_cpu(values):
        return (
            values.topk(k, dim=-1).values
            if k < size
            else values.sort(dim=-1, descending=True).values
        )
    array = values.numpy()
    if k < size:
        array = np.partition(array, size - k, axis=-1)[:, size - k :]
    return torch.from_numpy(np.sort(array, axis=-1)[:, ::-1].copy())


def first_argmax(values: torch.Tensor) -> torch.Tensor:
    """values [n, m] of any float dtype -> [n] int64: index of the largest, the lowest on ties."""
    if not on_cpu(values):
        return values.argmax(dim=-1)
    return torch.from_numpy(values.to(torch.float32).numpy().argmax(-1))


@dataclass(frozen=True, slots=True)
class Cut:
    """The end of a row: its `count` first tokens stay, in the order of (score, descending; id), and
    the last of them has the score `value`."""

    value: torch.Tensor  # [n, 1] float32, finite
    count: torch.Tensor  # [n, 1] int64


def cut_top_k(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, max_k: int) -> Cut:
    """Return the cut of rows with top-k, and optionally top-p among the tokens that it keeps: top_k
    [n] int64 from 1 to max_k, top_p [n] float32, inf for none."""
    best = largest(scores, max_k)  # [n, max_k]
    weights = best.exp()
    weights *= torch.arange(max_k, device=scores.device) < top_k[:, None]
    count = torch.minimum(top_k[:, None], _reaching(weights, weights.sum(-1, keepdim=True), top_p))
    return Cut(best.gather(1, count - 1).clamp_(min=LEAST), count)


def cut_top_p(scores: torch.Tensor, weights: torch.Tensor, top_p: torch.Tensor) -> Cut:
    """Return the cut of rows with only top-p: top_p [n] float32."""
    vocab = scores.shape[1]
    total = weights.sum(-1, keepdim=True)  # [n, 1]
    if on_cpu(scores) and vocab > 2 * FEW:
        cut = _cut_top_p(largest(scores, FEW), total, top_p)
        if bool((cut.count < FEW).all()):  # all rows reach p within these
            return cut
    return _cut_top_p(largest(scores, vocab), total, top_p)


def _cut_top_p(best: torch.Tensor, total: torch.Tensor, top_p: torch.Tensor) -> Cut:
    count = _reaching(best.exp(), total, top_p)
    return Cut(best.gather(1, count - 1).clamp_(min=LEAST), count)


def _reaching(weights: torch.Tensor, total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """weights [n, c] descending, of rows that weigh `total` [n, 1] in all -> [n, 1] int64: how many
    it takes to reach top_p [n]; c at most."""
    before = weights.cumsum(-1).sub_(weights)  # [n, c]: total weight of the more likely ones
    return before.lt_(total * top_p[:, None]).sum(-1, keepdim=True).to(torch.int64).clamp_(min=1)


def retained(scores: torch.Tensor, cut: Cut) -> torch.Tensor:
    """[n, vocab] float32: 1 for tokens within the cut, else 0."""
    # a float result is faster than bool
    kept = torch.ge(scores, cut.value, out=torch.empty_like(scores))
    too_many = kept.sum(-1, keepdim=True) > cut.count  # float32 counts exactly to 2**24
    if on_cpu(scores) and not bool(too_many.any()):
        return kept
    tied = scores == cut.value
    room = cut.count - (scores > cut.value).sum(-1, keepdim=True)
    return kept.masked_fill_(tied & (tied.cumsum(-1) > room), 0.0)


def retained_min_p(weights: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """[n, vocab] float32: 1 for tokens at least min_p [n] times as likely as the likeliest, else
    0."""
    return torch.ge(weights, min_p[:, None], out=torch.empty_like(weights))
