"""A request's own rules change its logits before temperature and filters, one row at a time: few
requests have any."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from dovetail.api.sampler import RowSampling

NEVER = -torch.inf
LEAST = torch.finfo(torch.float64).min
NEUTRAL = RowSampling()


@dataclass(frozen=True, slots=True)
class Seen:
    """The tokens of a request so far."""

    prompt: list[int]
    output: list[int]


def has_rules(sampling: RowSampling) -> bool:
    """Return whether `ruled` would change anything."""
    names = ("logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty")
    return any(getattr(sampling, name) != getattr(NEUTRAL, name) for name in names)


def ruled(logits: torch.Tensor, sampling: RowSampling, seen: Seen) -> torch.Tensor:
    """logits [vocab] float64 -> the same, biased, restricted and penalised. What is allowed, or
    else all, is never wholly at -inf for it."""
    logits = logits.clone()
    for token, bias in sampling.logit_bias:
        if token < len(logits):
            logits[token] += bias
    if sampling.allowed_token_ids is not None:
        allowed = _index(sampling.allowed_token_ids, logits)
        kept = logits[allowed].clamp(min=LEAST)
        logits = torch.full_like(logits, NEVER).index_put((allowed,), kept)
    banned = logits.index_fill(0, _index(_bans(sampling, seen), logits), NEVER)
    logits = logits if bool((banned == NEVER).all()) else banned
    return _penalised(logits, sampling, seen)


def _bans(sampling: RowSampling, seen: Seen) -> list[int]:
    """Tokens that would complete a bad word, or stop the request too early."""
    before = (*seen.prompt, *seen.output)
    words = [word for word in sampling.bad_words if 0 < len(word) <= len(before) + 1]
    bans = [word[-1] for word in words if before[len(before) - len(word) + 1 :] == word[:-1]]
    return [*bans, *sampling.stop_token_ids] if len(seen.output) < sampling.min_tokens else bans


def _penalised(logits: torch.Tensor, sampling: RowSampling, seen: Seen) -> torch.Tensor:
    known = _index({*seen.prompt, *seen.output}, logits)
    values = logits[known]
    penalty = sampling.repetition_penalty
    logits[known] = torch.where(values > 0, values / penalty, values * penalty)
    counts = torch.bincount(_index(seen.output, logits), minlength=len(logits))
    return logits - counts * sampling.frequency_penalty - (counts > 0) * sampling.presence_penalty


def _index(token_ids: Collection[int], logits: torch.Tensor) -> torch.Tensor:
    """[n] int64, without ids past the vocabulary."""
    return torch.tensor([token for token in token_ids if token < len(logits)], dtype=torch.int64, device=logits.device)
