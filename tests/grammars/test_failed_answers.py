"""An answer that can't continue fails in every later call, without affecting others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dovetail.api.grammar import Grammar, GrammarContext, GrammarSpec, Matcher
from dovetail.errors import DovetailError
from dovetail_grammars.llguidance_backend import LLGuidance
from dovetail_grammars.options import GrammarOptions

CONTEXT = GrammarContext([b"a", b"b", None], frozenset({2}), 3)  # without a token for "q"


def begun(regex: str) -> tuple[Grammar, Matcher]:
    grammar = LLGuidance(GrammarOptions(), CONTEXT).compile(GrammarSpec("regex", regex))
    return grammar, grammar.begin()


def mask(matcher: Matcher) -> int:
    words = np.zeros(1, dtype=np.uint32)
    matcher.fill(words)
    return int(words[0])


CALLS: dict[str, Callable[[Matcher], object]] = {
    "fill": mask,
    "accept": lambda matcher: matcher.accept(0),
    "forced": lambda matcher: matcher.forced(),
}


@pytest.mark.parametrize("call", CALLS)
def test_each_call_raises_once_one_has_failed(call: str) -> None:
    grammar, matcher = begun("(a|b)q")
    assert matcher.accept(0)
    with pytest.raises(DovetailError):
        mask(matcher)
    for _ in range(2):
        with pytest.raises(DovetailError, match=r"\w"):
            CALLS[call](matcher)
    assert not matcher.complete
    assert mask(grammar.begin()) == 0b011


def test_forced_tokens_end_where_none_fits_and_the_matcher_stays() -> None:
    _, matcher = begun("abq")
    assert list(matcher.forced()) == [0, 1]
    assert mask(matcher) == 0b001
    assert matcher.accept(0)


def test_an_ambiguous_grammar_fails_before_its_masks_take_long() -> None:
    """Each further token adds a position at which the next may begin: the time of a mask grows with
    their square."""
    words = [bytes(b"ab"[number >> bit & 1] for bit in range(8)) for number in range(256)]
    context = GrammarContext([*words, None], frozenset({256}), 257)
    spec = GrammarSpec("grammar", 'start: a\na: a a | "a" | "b"\n')
    matcher = LLGuidance(GrammarOptions(), context).compile(spec).begin()
    line = np.zeros(9, dtype=np.uint32)

    def go_on() -> None:
        for token in range(30):
            matcher.fill(line)
            matcher.accept(token)

    with pytest.raises(DovetailError, match="too ambiguous for the backend llguidance"):
        go_on()
