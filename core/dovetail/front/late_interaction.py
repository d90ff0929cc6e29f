"""Late interaction: prompts of queries and documents whose tokens' vectors are compared, which of
these vectors count, and MaxSim (ColBERT, arXiv:2004.12832)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dovetail.api.late_interaction_files import Expansion, LateInteraction, Side
from dovetail.errors import RequestError
from dovetail.front.tokenizer import TokenizedText, Tokenizer

_TOKENS = 1024  # of a document, compared at once


class LateTexts:
    """Makes prompts of texts as a checkpoint's files say. Thread safe."""

    def __init__(self, files: LateInteraction, tokenizer: Callable[[], Tokenizer]) -> None:
        self._files = files
        self._tokenizer = tokenizer

    def length(self, side: Side, most: int | None) -> int | None:
        """Return the number of tokens to which the tokenizer's prompt of a text is cut, where
        prompts have at most `most` tokens; None: it isn't."""
        own = self._files.lengths.get(side)
        lengths = [length for length in (own, most) if length is not None]
        return min(lengths) - (self._prefixes[side][0] is not None) if lengths else None

    def text_before(self, side: Side) -> str:
        """Return what is put before a text of this side before it is tokenized."""
        return self._prefixes[side][1]

    def prompt(self, text: str, token_ids: Sequence[int], side: Side) -> TokenizedText:
        """Return the prompt of a text that was tokenized and cut to `length`."""
        ids = list(token_ids)
        prefix, _ = self._prefixes[side]
        if prefix is not None:
            head, _ = self._tokenizer().around
            ids.insert(len(head) if ids[: len(head)] == head else 0, prefix)
        expansion = self._files.expansion
        seen = None
        if side == "query" and expansion is not None:
            seen = None if expansion.is_attended else len(ids)
            ids += [self._filler] * (expansion.length - len(ids))
        return TokenizedText(text, ids, side=side, seen=seen)

    def kept(self, token_ids: NDArray[np.int32], side: Side) -> NDArray[np.bool_] | None:
        """Return of which tokens of a prompt the vectors count; None: of all."""
        if side not in self._files.skipped_of or not len(self._skipped):
            return None
        return ~np.isin(token_ids, self._skipped)

    @cached_property
    def _prefixes(self) -> dict[Side, tuple[int | None, str]]:
        """The token that is inserted before the texts of each side, and the text before them."""
        return {side: self._prefix(text) for side, text in self._files.prefixes.items()}

    def _prefix(self, text: str) -> tuple[int | None, str]:
        tokenizer = self._tokenizer()
        words = text.split(None, 1)
        for token in (text, *words[:1]):
            token_id = tokenizer.token_id(token)
            if token_id is not None:
                if tokenizer.encode(token, special_tokens=False) == [token_id]:
                    break
                return token_id, text.removeprefix(token)
        return None, text

    @cached_property
    def _skipped(self) -> NDArray[np.int32]:
        found = (self._tokenizer().token_id(word) for word in self._files.skipped)
        return np.array([token_id for token_id in found if token_id is not None], np.int32)

    @cached_property
    def _filler(self) -> int:
        """The token that fills queries. Raises `RequestError` if the tokenizer has none."""
        expansion = self._files.expansion or Expansion(1, is_fixed=True, is_attended=True)
        special = self._tokenizer().special_tokens
        name = expansion.token or special.get("mask_token") or special.get("eos_token")
        token_id = None if name is None else self._tokenizer().token_id(name)
        if token_id is None:
            raise RequestError(
                f"queries are filled with {name or 'mask tokens'}, which the tokenizer doesn't have"
            )
        return token_id


def maxsim(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    """Return the sum over a query's vectors [tokens, size] of the largest product with one of a
    document's; 0 if either has none."""
    if not len(first) or not len(second):
        return 0.0
    best = np.full(len(first), -np.inf, np.float32)
    for start in range(0, len(second), _TOKENS):
        products = first @ second[start : start + _TOKENS].T
        np.maximum(best, products.max(axis=1), out=best)
    return float(best.sum(dtype=np.float64))


def mean_maxsim(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    """Return `maxsim` for each of the query's vectors."""
    return maxsim(first, second) / max(len(first), 1)
