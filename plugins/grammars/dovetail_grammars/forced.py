"""`forced_tokens`: the tokens that must come next, found from masks. Both backends use it where their library reports forced text."""

from __future__ import annotations

import numpy as np

from dovetail.api.grammar import GrammarContext, Matcher

FORCED_AT_MOST = 16  # tokens found at once


def forced_tokens(matcher: Matcher, context: GrammarContext) -> list[int]:
    """Return the next tokens as long as only one is allowed. Advances the matcher and rolls it back."""
    words = np.zeros(-(-context.vocab_size // 32), dtype=np.uint32)
    tokens: list[int] = []
    while len(tokens) < FORCED_AT_MOST:
        matcher.fill(words)
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
