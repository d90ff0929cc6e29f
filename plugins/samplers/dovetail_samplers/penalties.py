"""Repetition, presence and frequency penalties, from the tokens that a row has seen. Works on the
device, without a loop over tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dovetail.api.sampler import Lines, RowHistory
from dovetail_samplers.filters import on_cpu


@dataclass(frozen=True, slots=True)
class Seen:
    """Tokens in the history of some lines. On the CPU they are cut to the longest one."""

    token_ids: torch.Tensor  # [n, len] int64; padded with the row's first token, a valid id
    known: torch.Tensor  # [n, len] bool
    generated: torch.Tensor  # [n, len] bool


def seen(history: RowHistory, lines: Lines) -> Seen:
    """Return the tokens before lines [n], each with at least one."""
    num_tokens = history.lengths(lines)[:, None]
    longest = int(num_tokens.max()) if on_cpu(num_tokens) else history.token_ids.shape[1]
    token_ids = history.token_ids[lines.rows, :longest].to(torch.int64)
    position = torch.arange(longest, device=token_ids.device)
    known = position < num_tokens
    return Seen(
        torch.where(known, token_ids, token_ids[:, :1]),
        known,
        known & (position >= history.prompt_lens[lines.rows][:, None]),
    )


def repetition(logits: torch.Tensor, seen: Seen, penalty: torch.Tensor) -> None:
    """Divide positive logits of the tokens in prompt and output by penalty [n] float32, multiply
    negative ones (arXiv:1909.05858, section 4.1).

    Changes logits [n, vocab]. A token seen twice is written twice, with the same value.
    """
    old = logits.gather(1, seen.token_ids)  # [n, len]
    logits.scatter_(
        1, seen.token_ids, torch.where(old > 0, old / penalty[:, None], old * penalty[:, None])
    )


def presence_and_frequency(
    logits: torch.Tensor, seen: Seen, presence: torch.Tensor, frequency: torch.Tensor
) -> None:
    """Subtract presence [n] from the logit of each generated token, and frequency [n] times its
    count. Changes logits [n, vocab]."""
    # integers: exact in any order
    counts = torch.zeros_like(logits).scatter_add_(
        1, seen.token_ids, seen.generated.to(logits.dtype)
    )
    logits -= counts * frequency[:, None] + counts.clamp(max=1) * presence[:, None]
