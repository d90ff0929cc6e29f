"""Rules that change logits: logit_bias, allowed_token_ids, bad words, and stop tokens before
min_tokens.

A row's rules are packed into one tensor when it starts (`RowRules`). Bias and allowed ids are
applied first, then the bans (bad words, stop tokens). Something can always be sampled: if the bans
exclude all allowed tokens, they are lifted in that step; if the model gives every allowed token
-inf, they are equally likely.

`apply` is for all devices; on a GPU with Triton `changes_kernels` does the same, and is tested
against it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.sampler import Lines, RowHistory, RowSampling
from dovetail.nn.transfer import to_device

NEVER = float("-inf")
NO_TOKEN = -1  # before a row's first token
LEAST = -1e30  # minimum of allowed logits: not -inf, even after a penalty


@dataclass(frozen=True, slots=True)
class RowRules:
    """The rules of one row. `packed` lies on the device:

        | bias ids | bias values, float32 | allowed ids | stop ids, last tokens of bad words | …
        … | for the kernel: a number for each of these | and for each bad word | …
        … | prefix tokens | each one's bad word | how far before the row's end each one stands |

    A bad word's last token is never sampled when the row's last tokens are those of its prefix.
    """

    packed: torch.Tensor  # int32
    num_biases: int
    num_allowed: int  # -1: all are
    num_stops: int
    num_bad_words: int
    num_prefix_tokens: int  # of all bad words together
    min_tokens: int  # stop tokens are banned while fewer are generated

    @classmethod
    def of(cls, sampling: RowSampling, vocab_size: int, device: torch.device) -> RowRules | None:
        """Pack a row's rules; None if it has none. Ids outside of the vocabulary are ignored."""
        has_rules = sampling.logit_bias or sampling.bad_words or sampling.min_tokens > 0
        if not has_rules and sampling.allowed_token_ids is None:
            return None

        def known(ids: tuple[int, ...]) -> list[int]:
            return sorted({i for i in ids if 0 <= i < vocab_size})

        biases = {i: value for i, value in sampling.logit_bias if 0 <= i < vocab_size}
        allowed = None if sampling.allowed_token_ids is None else known(sampling.allowed_token_ids)
        stops = known(sampling.stop_token_ids) if sampling.min_tokens > 0 else []
        words = [word for word in sampling.bad_words if word and 0 <= word[-1] < vocab_size]
        if not (biases or stops or words) and allowed is None:
            return None
        lens = np.array([len(word) - 1 for word in words], np.int64)
        scratch = np.zeros(len(stops) + 2 * len(words), np.int32)
        prefixes = (
            [token for word in words for token in word[:-1]],
            np.repeat(np.arange(len(words)), lens),
            _distances(lens),
        )
        values = np.array(list(biases.values()), np.float32).view(np.int32)
        parts = (
            list(biases),
            values,
            allowed or [],
            stops,
            [word[-1] for word in words],
            scratch,
            *prefixes,
        )
        packed = np.concatenate([np.array(part).astype(np.int32, copy=False) for part in parts])
        sizes = (
            len(biases),
            -1 if allowed is None else len(allowed),
            len(stops),
            len(words),
            int(lens.sum()),
        )
        return cls(to_device(packed, device), *sizes, sampling.min_tokens)

    @property
    def biases(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [b] int64, and biases of their logits [b] float32."""
        ids, values = self.packed[: 2 * self.num_biases].view(2, -1)
        return ids.long(), values.view(torch.float32)

    @property
    def allowed(self) -> torch.Tensor:
        """[a] int64."""
        return self._part(2 * self.num_biases, max(0, self.num_allowed))

    @property
    def banned(self) -> torch.Tensor:
        """[s + w] int64: stop ids, and the last tokens of bad words."""
        return self._part(
            2 * self.num_biases + max(0, self.num_allowed), self.num_stops + self.num_bad_words
        )

    @property
    def prefixes(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[t] int64 each: tokens, index of their bad word, and distance from the row's end."""
        start = len(self.packed) - 3 * self.num_prefix_tokens
        tokens, words, distances = self._part(start, 3 * self.num_prefix_tokens).view(3, -1)
        return tokens, words, distances

    def _part(self, start: int, size: int) -> torch.Tensor:
        return self.packed[start : start + size].long()


def _distances(lens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the distance of each token from the end of its list: 3, 2, 1, 1 for [3, 1]."""
    return np.repeat(np.cumsum(lens), lens) - np.arange(lens.sum())


def apply(logits: torch.Tensor, rules: list[RowRules], history: RowHistory, lines: Lines) -> None:
    """Change logits [n, vocab] float32 by the `rules` of each of n lines' rows."""
    _add_biases(logits, rules)
    _keep_allowed(logits, rules)
    _ban(logits, rules, history, lines)


def _joined(parts: list[tuple[int, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(index, ids) pairs -> flat indices and ids, [total] int64 each."""
    ids = torch.cat([part for _, part in parts])
    index = np.repeat([i for i, _ in parts], [len(part) for _, part in parts])
    return to_device(index, ids.device), ids


def _add_biases(logits: torch.Tensor, rules: list[RowRules]) -> None:
    biases = [(i, r.biases) for i, r in enumerate(rules) if r.num_biases]
    if biases:
        where = _joined([(i, ids) for i, (ids, _) in biases])
        logits[where] += torch.cat([values for _, (_, values) in biases])


def _keep_allowed(logits: torch.Tensor, rules: list[RowRules]) -> None:
    """Set all other logits to -inf; an allowed one is at least LEAST, so that a row always has one
    that isn't -inf."""
    allowed = [(i, r.allowed) for i, r in enumerate(rules) if r.num_allowed >= 0]
    if allowed:
        where = _joined(allowed)
        kept = logits[where].clamp_(min=LEAST)
        logits.index_fill_(0, to_device(np.array([i for i, _ in allowed]), logits.device), NEVER)
        logits[where] = kept


def _ban(logits: torch.Tensor, rules: list[RowRules], history: RowHistory, lines: Lines) -> None:
    bans = [(i, r) for i, r in enumerate(rules) if r.num_stops + r.num_bad_words]
    if not bans:
        return
    index, ids = _joined([(i, r.banned) for i, r in bans])
    lengths = history.lengths(lines)
    # integers would synchronize
    active = torch.cat(
        [_active(r, history, lines.rows[i : i + 1], lengths[i : i + 1]) for i, r in bans]
    )
    before = logits[index, ids]
    # a token may be banned twice
    logits.index_put_((index, ids), torch.where(active, NEVER, 0.0), accumulate=True)
    nothing_left = logits.amax(-1) == NEVER  # [n]
    logits[index, ids] = torch.where(nothing_left[index], before, logits[index, ids])


def _active(
    rules: RowRules, history: RowHistory, row: torch.Tensor, known: torch.Tensor
) -> torch.Tensor:
    """Return [s + w] bool: the active bans of row [1] after its first `known` [1] tokens."""
    too_few = (known - history.prompt_lens[row] < rules.min_tokens).expand(rules.num_stops)
    if not rules.num_bad_words:
        return too_few
    tokens, words, distances = rules.prefixes
    position = known - distances
    seen = history.token_ids[row, position.clamp(min=0)].masked_fill(position < 0, NO_TOKEN)
    missed = torch.zeros(rules.num_bad_words, dtype=torch.int64, device=row.device).index_add_(
        0, words, (seen != tokens).long()
    )
    return torch.cat((too_few, missed == 0))
