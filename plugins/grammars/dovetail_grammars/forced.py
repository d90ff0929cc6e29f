"""`forced_tokens`: determines the next tokens from masks. Both backends use it if their library reports forced text."""

from __future__ import annotations

import numpy as np

from dovetail.api.grammar import GrammarContext
from dovetail.errors import DovetailError
from dovetail_grammars.failing import Failing

FORCED_AT_MOST = 16  # tokens per call


def forced_tokens(matcher: Failing, context: GrammarContext) -> list[int]:
    """Return the next tokens while only one is allowed. Advances the matcher and rolls it back, even if it can't continue after some of them. Raises
    `DovetailError` if it can't continue from its present state."""
    words = np.zeros(-(-context.vocab_size // 32), dtype=np.uint32)
    tokens: list[int] = []
    while len(tokens) < FORCED_AT_MOST:
        try:
            matcher.fill(words)
        except DovetailError:
            if not tokens:
                raise
            matcher.failure = None
            break
        (places,) = words.nonzero()
        if len(places) != 1 or (word := int(words[places[0]])) & (word - 1):
            break
        token = int(places[0]) * 32 + word.bit_length() - 1
        if token in context.stop_ids:
            break
        matcher.accept(token)
        tokens.append(token)
    matcher.rollback(len(tokens))
    return tokens
