"""A grammar whose language is arithmetic: which tokens may come depends on the one before, so that
a mask made too early is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from dovetail.api.component import NoOptions
from dovetail.api.grammar import (
    SPEC_KINDS,
    Grammar,
    GrammarBackend,
    GrammarCapabilities,
    GrammarContext,
    GrammarSpec,
    Matcher,
)
from dovetail.engine.constraint import Constraint
from dovetail.testing.fake_executor import next_allowed, next_token


class RuleMatcher(Matcher):
    """A token may come if it and its predecessor add up to a multiple of `modulus`, more or less by
    the number of tokens; the answer ends after `length` tokens, if that isn't 0."""

    def __init__(self, modulus: int, length: int, vocab_size: int) -> None:
        self.modulus, self.length, self.vocab_size = modulus, length, vocab_size
        self.tokens: list[int] = []

    def allowed(self) -> NDArray[np.bool_]:
        last = self.tokens[-1] if self.tokens else 0
        fits = (np.arange(self.vocab_size) + last + len(self.tokens)) % min(
            self.modulus, self.vocab_size
        ) == 0
        return np.asarray(fits, np.bool_)

    def fill(self, words: NDArray[np.uint32]) -> None:
        words.view(np.uint8)[:] = np.packbits(
            np.pad(self.allowed(), (0, 32 * len(words) - self.vocab_size)), bitorder="little"
        )

    def accept(self, token: int) -> bool:
        if not self.allowed()[token]:
            return False
        self.tokens.append(token)
        return True

    def rollback(self, tokens: int) -> None:
        del self.tokens[len(self.tokens) - tokens :]

    def forced(self) -> Sequence[int]:
        return ()

    @property
    def complete(self) -> bool:
        return self.length > 0 and len(self.tokens) >= self.length


class Rule(Grammar):
    def __init__(self, modulus: int, length: int, vocab_size: int) -> None:
        self.begin_with = modulus, length, vocab_size

    def begin(self) -> RuleMatcher:
        return RuleMatcher(*self.begin_with)


class RuleBackend(GrammarBackend):
    """`GrammarSpec.text` is "modulus length"."""

    capabilities = GrammarCapabilities(kinds=SPEC_KINDS, rollback=True, forced=True)

    def __init__(self, vocab_size: int, token_bytes: Sequence[bytes | None] | None = None) -> None:
        spelled = token_bytes or [b"%d " % token for token in range(vocab_size)]
        super().__init__(NoOptions(), GrammarContext(spelled, frozenset(), vocab_size))
        self.fills = 0

    def compile(self, spec: GrammarSpec) -> Rule:
        modulus, length = spec.text.split()
        return Rule(int(modulus), int(length), self.context.vocab_size)

    def accept_many(self, matchers: Sequence[Matcher], tokens: Sequence[int]) -> Sequence[bool]:
        """Advance two of three."""
        return [
            index % 3 != 2 and _advances(matcher, token)
            for index, (matcher, token) in enumerate(zip(matchers, tokens, strict=True))
        ]

    def start_fill(
        self, matchers: Sequence[Matcher], words: NDArray[np.uint32]
    ) -> Callable[[], None] | None:
        """Fill the masks in the end, and require that nobody has used the matchers or their memory
        before; two of three times."""
        self.fills += 1
        if self.fills % 3 == 0:
            return None
        places = [_place(matcher) for matcher in matchers]
        words[:] = self.fills

        def finish() -> None:
            assert places == [_place(matcher) for matcher in matchers], "a matcher was used"
            assert (words == self.fills).all(), "the memory of the masks was used"
            self.fill_many(matchers, words)

        return finish


def _advances(matcher: Matcher, token: int) -> bool:
    try:
        return matcher.accept(token)
    except ValueError:  # it raises again
        return False


def _place(matcher: Matcher) -> int:
    return len(matcher.tokens) if isinstance(matcher, RuleMatcher) else 0


def compiled(grammar: Grammar) -> Future[Grammar]:
    future: Future[Grammar] = Future()
    future.set_result(grammar)
    return future


def constraint(modulus: int, length: int = 0, *, vocab_size: int) -> Constraint:
    """One whose grammar is ready."""
    return Constraint(compiled(Rule(modulus, length, vocab_size)), RuleBackend(vocab_size))


def expected_by_rule(
    prompt: Sequence[int],
    count: int,
    seed: int,
    vocab_size: int,
    modulus: int,
    length: int = 0,
    digest: str = "",
) -> tuple[list[int], bool]:
    """The tokens that the fake executor generates under a rule, and whether the rule ends them."""
    tokens, matcher = list(prompt), RuleMatcher(modulus, length, vocab_size)
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    for _ in range(count):
        matcher.fill(words)
        tokens.append(next_allowed(next_token(tokens, seed, vocab_size, digest), words, vocab_size))
        assert matcher.accept(tokens[-1])
        if matcher.complete:
            return tokens[len(prompt) :], True
    return tokens[len(prompt) :], False
