"""`Failing`: base of matchers. Once failed, a matcher stays failed, whatever its library does.

`forced_tokens` determines the next tokens from masks, where the library reports forced text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import TypeVar

import numpy as np

from dovetail.api.grammar import GrammarContext, Matcher
from dovetail.errors import DovetailError

Call = TypeVar("Call", bound=Callable[..., object])
FORCED_AT_MOST = 16  # tokens per call


class Failing(Matcher):
    """`failure`: the reason why it can't continue, once a method decorated with `may_fail` has
    raised it. From then on all of them raise it."""

    failure: str | None = None

    def require_not_failed(self) -> None:
        if self.failure is not None:
            raise DovetailError(self.failure)


def may_fail(call: Call) -> Call:
    """Decorate a method of a `Failing`."""

    @wraps(call)
    def checked(self: Failing, *args: object) -> object:
        self.require_not_failed()
        try:
            return call(self, *args)
        except DovetailError as error:
            self.failure = str(error)
            raise

    return checked  # type: ignore[return-value]  # it has the same signature


def require_none_failed(matchers: Iterable[Failing]) -> None:
    for matcher in matchers:
        if matcher.failure is not None:
            matcher.require_not_failed()


def forced_tokens(matcher: Failing, context: GrammarContext) -> list[int]:
    """Return the next tokens while only one is allowed.

    Advances the matcher and rolls it back, even if it can't continue after some of them. Raises
    `DovetailError` if it can't continue from its present state.
    """
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
