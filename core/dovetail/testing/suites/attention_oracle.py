"""Attention by its definition, one row at a time with a full matrix of scores: exactly (float64),
or directly in a given dtype.

Has no paging, no batching and no code of any backend. The direct version measures rounding errors:
a backend's may be a few times as large.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

# another order of summation changes the error, but hardly by this factor
TIMES_THE_PLAIN_ERROR = 4.0
ROUNDINGS = 12.0  # of a row's largest value, if the direct version's error happens to be tiny


class Rules(NamedTuple):
    """Rules by which a layer turns scores into weights."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [heads]
    causal: bool = True
    spans: Sequence[tuple[int, int]] = ()  # [start, stop) of tokens that see each other, too
    selected: torch.Tensor | None = None  # [queries, tokens] bool: the others aren't seen
    seen: int | None = None  # the row's first tokens, and no others


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules) -> torch.Tensor:
    """Let the last len(q) of a row's tokens attend over all of it. q [queries, heads, size], k and
    v [tokens, kv_heads, size], float64 -> like q."""
    return _attend(q.double(), k.double(), v.double(), rules, torch.float64)


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules, dtype: torch.dtype
) -> torch.Tensor:
    """Do the same with scores, weights and output rounded to `dtype` and all sums in float32, as a
    simple implementation would. Returns float64."""
    return _attend(q.float(), k.float(), v.float(), rules, dtype).double()


def selected(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, top_k: int
) -> torch.Tensor:
    """Return which of a row's tokens an indexer selects for the last len(q) of them, [queries,
    tokens] bool: see `dovetail.api.attention.Indexer`. q [queries, heads, size], weights [queries,
    heads], keys [tokens, size]."""
    products = torch.einsum("qhd,kd->qhk", q.double(), keys.double()).relu()
    scores = torch.einsum("qh,qhk->qk", weights.double(), products)
    later = torch.ones_like(scores, dtype=torch.bool).triu(len(keys) - len(q) + 1)
    scores = scores.masked_fill(later, -torch.inf)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    return torch.zeros_like(later).scatter_(1, best, value=True)


def kept(values: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Return K or V, float64, as a cache of a smaller dtype keeps it: divided by `scale`, cut off
    at the largest number, rounded, times `scale`."""
    info = torch.finfo(dtype)
    scaled = values.float() / torch.tensor(scale)
    return scaled.clamp(info.min, info.max).to(dtype).double() * float(torch.tensor(scale))


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules, dtype: torch.dtype
) -> torch.Tensor:
    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).to(q.dtype)

    kv_head = torch.arange(q.shape[1]) * k.shape[1] // q.shape[1]
    scores = rounded(torch.einsum("qhd,khd->hqk", q, k[:, kv_head]) * rules.scale)
    if rules.softcap is not None:
        scores = rounded(torch.tanh(scores / rules.softcap) * rules.softcap)
    # of each query, how far each key is after it
    ahead = torch.arange(len(k)) - torch.arange(len(k) - len(q), len(k))[:, None]
    seen = ahead <= 0 if rules.causal else torch.ones_like(ahead, dtype=torch.bool)
    token = torch.arange(len(k))
    for start, stop in rules.spans:
        within = (start <= token) & (token < stop)
        seen |= within[len(k) - len(q) :, None] & within
    if rules.window is not None:
        seen &= ahead > -rules.window
        if not rules.causal:
            seen &= ahead < rules.window
    if rules.selected is not None:
        seen &= rules.selected
    if rules.seen is not None:
        seen &= token < rules.seen
    scores = scores.masked_fill(~seen, -torch.inf)
    if rules.sinks is not None:  # one key more, without a value
        scores = torch.cat(
            [scores, rules.sinks.to(q.dtype)[:, None, None].expand(-1, len(q), 1)], -1
        )
    weights = rounded(scores.softmax(-1))[..., : len(k)]
    return rounded(torch.einsum("hqk,khd->qhd", weights, v[:, kv_head]))


def allowed_error(exact: torch.Tensor, plain: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return how far [1] a backend's values for a row may lie from `exact`, if plain arithmetic in
    the dtype gives `plain`."""
    floor = ROUNDINGS * torch.finfo(dtype).eps * exact.abs().max()
    return (TIMES_THE_PLAIN_ERROR * (plain - exact).abs().max()).maximum(floor)[None]
