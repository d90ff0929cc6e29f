"""What a request says of single tokens: logit_bias, allowed_token_ids, bad words and the stop tokens before min_tokens.

A row's rules are made into a few tensors when it begins (`RowRules`), joined for the rows of a step and applied at once: the
wishes (bias, allowed ids), then the bans (bad words, stop tokens). Something can always be sampled: if a row's bans leave nothing of what its
wishes allow, they are lifted in that step; if the model gives every allowed token -inf, they are equally likely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from dovetail.api.sampler import RowHistory, RowSampling
from dovetail.runtime.transfer import to_device

NEVER = float("-inf")
NO_TOKEN = -1  # where a row has none
LEAST = -1e30  # an allowed logit is this at least: not -inf, and still not after a penalty


class Bias(NamedTuple):
    """Logit `value` is added to token `id`."""

    ids: torch.Tensor  # [b] int64
    values: torch.Tensor  # [b] float32


class BadWords(NamedTuple):
    """Token `last` is never sampled when the row ends in what its word has before it. Those prefixes stand one behind the other, with p tokens in
    all: a table with a line a word would be as wide as the longest."""

    last: torch.Tensor  # [w] int64
    prefix: torch.Tensor  # [p] int64
    word: torch.Tensor  # [p] int64, whose prefix a token is part of
    back: torch.Tensor  # [p] int64, how far from the row's end it is looked for: 1 is the last token

    @classmethod
    def of(cls, words: Sequence[tuple[int, ...]], device: torch.device) -> BadWords:
        """`words`: one or more, none of them empty."""
        lengths = np.array([len(word) - 1 for word in words])
        ends = np.repeat(lengths.cumsum(), lengths)
        columns = (
            [word[-1] for word in words],
            [token for word in words for token in word[:-1]],
            np.repeat(np.arange(len(words)), lengths),
            ends - np.arange(len(ends)),
        )
        return cls(*(to_device(np.array(column, np.int64), device) for column in columns))


class Stops(NamedTuple):
    """Tokens that are kept out while fewer than `min_tokens` are generated."""

    ids: torch.Tensor  # [s] int64
    min_tokens: torch.Tensor  # [s] int64


@dataclass(frozen=True, slots=True)
class RowRules:
    """The rules of one row, on the device; None where it has none of a sort."""

    bias: Bias | None
    allowed: torch.Tensor | None  # [a] int64
    bad_words: BadWords | None
    stops: Stops | None

    @classmethod
    def of(cls, sampling: RowSampling, vocab_size: int, device: torch.device) -> RowRules | None:
        """None: the row has no rules. Ids that the vocabulary doesn't have are left out."""

        def tensor(values: object, dtype: type[np.generic] = np.int64) -> torch.Tensor:
            return to_device(np.array(values, dtype), device)

        def known(ids: tuple[int, ...]) -> list[int]:
            return sorted({i for i in ids if 0 <= i < vocab_size})

        biases = {i: value for i, value in sampling.logit_bias if 0 <= i < vocab_size}
        words = [word for word in sampling.bad_words if word and 0 <= word[-1] < vocab_size]
        stop_ids = known(sampling.stop_token_ids) if sampling.min_tokens > 0 else []
        rules = cls(
            bias=Bias(tensor(list(biases)), tensor(list(biases.values()), np.float32)) if biases else None,
            allowed=tensor(known(sampling.allowed_token_ids)) if sampling.allowed_token_ids is not None else None,
            bad_words=BadWords.of(words, device) if words else None,
            stops=Stops(tensor(stop_ids), tensor([sampling.min_tokens] * len(stop_ids))) if stop_ids else None,
        )
        return rules if any(part is not None for part in (rules.bias, rules.allowed, rules.bad_words, rules.stops)) else None


def apply(logits: torch.Tensor, rules: list[RowRules], history: RowHistory, rows: torch.Tensor) -> None:
    """Change logits [n, vocab] by the `rules` of the n rows; `rows` [n] int64 are their indices in the history."""
    _add_biases(logits, rules)
    _keep_allowed(logits, rules)
    _ban(logits, rules, history, rows)


def _joined(parts: list[tuple[int, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(index, ids) pairs -> flat indices and ids, [total] int64 each."""
    ids = torch.cat([part for _, part in parts])
    index = np.repeat([i for i, _ in parts], [len(part) for _, part in parts])
    return to_device(index, ids.device), ids


def _add_biases(logits: torch.Tensor, rules: list[RowRules]) -> None:
    biases = [(i, r.bias) for i, r in enumerate(rules) if r.bias is not None]
    if biases:
        where = _joined([(i, bias.ids) for i, bias in biases])
        logits[where] += torch.cat([bias.values for _, bias in biases])


def _keep_allowed(logits: torch.Tensor, rules: list[RowRules]) -> None:
    """All other logits to -inf; an allowed one is LEAST at least, so that a row always has one that isn't -inf."""
    allowed = [(i, r.allowed) for i, r in enumerate(rules) if r.allowed is not None]
    if allowed:
        where = _joined(allowed)
        kept = logits[where].clamp_(min=LEAST)
        logits.index_fill_(0, to_device(np.array([i for i, _ in allowed]), logits.device), NEVER)
        logits[where] = kept


def _ban(logits: torch.Tensor, rules: list[RowRules], history: RowHistory, rows: torch.Tensor) -> None:
    bans = _bad_word_bans(rules, history, rows) + _stop_bans(rules, history, rows)
    if not bans:
        return
    index, ids, active = (torch.cat(column) for column in zip(*bans, strict=True))
    before = logits[index, ids]
    logits.index_put_((index, ids), torch.where(active, NEVER, 0.0), accumulate=True)  # a token may be banned twice
    nothing_left = logits.amax(-1) == NEVER  # [n]
    logits[index, ids] = torch.where(nothing_left[index], before, logits[index, ids])


_Bans = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # index, ids and whether it holds now: [any] each


def _bad_word_bans(rules: list[RowRules], history: RowHistory, rows: torch.Tensor) -> _Bans:
    words = [(i, r.bad_words) for i, r in enumerate(rules) if r.bad_words is not None]
    if not words:
        return []
    index, ids = _joined([(i, w.last) for i, w in words])
    place, prefix = _joined([(i, w.prefix) for i, w in words])
    starts = np.cumsum([0, *(len(w.last) for _, w in words[:-1])])  # of each row's words among all
    word = torch.cat([w.word for _, w in words]) + to_device(np.repeat(starts, [len(w.word) for _, w in words]), rows.device)
    at = rows[place]
    position = history.num_tokens[at] - torch.cat([w.back for _, w in words])
    seen = history.token_ids[at, position.clamp(min=0)].masked_fill(position < 0, NO_TOKEN)
    missing = torch.zeros_like(ids).scatter_add_(0, word, (seen != prefix).long())  # tokens of its prefix that aren't there
    return [(index, ids, missing == 0)]


def _stop_bans(rules: list[RowRules], history: RowHistory, rows: torch.Tensor) -> _Bans:
    stops = [(i, r.stops) for i, r in enumerate(rules) if r.stops is not None]
    if not stops:
        return []
    index, ids = _joined([(i, s.ids) for i, s in stops])
    at = rows[index]
    active = history.num_tokens[at] - history.prompt_lens[at] < torch.cat([s.min_tokens for _, s in stops])
    return [(index, ids, active)]
