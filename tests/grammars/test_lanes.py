"""Answers of one grammar: the library's matchers that share nothing, so that their masks are filled
at the same time."""

from __future__ import annotations

import json
import threading
from typing import Any

import llguidance
import numpy as np
import pytest

from dovetail.api.grammar import GrammarContext, GrammarSpec
from dovetail_grammars.llguidance_backend import LLGuidance
from dovetail_grammars.llguidance_matcher import MOST_STATES, Lanes, LLGrammar, LLMatcher
from dovetail_grammars.options import GrammarOptions
from tests.grammars.helpers import BYTES, STOP


class Bytes:
    """The vocabulary of bytes, as the library reads one."""

    is_tokenizer_wrapper = True
    bos_token_id, eos_token_id = None, STOP
    special_token_ids: tuple[int, ...] = ()
    tokens = tuple(text or b"" for text in BYTES.token_bytes)

    def __call__(self, text: str) -> list[int]:
        return []


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^[a-z]{1,30}$"}},
    "required": ["a"],
    "additionalProperties": False,
}
ENDLESS = GrammarContext(BYTES.token_bytes, frozenset(), 257)


def compiled(context: GrammarContext) -> tuple[LLGuidance, LLGrammar]:
    backend = LLGuidance(GrammarOptions(threads=2, processes=0), context)
    grammar = backend.compile(GrammarSpec("json_schema", json.dumps(SCHEMA)))
    assert isinstance(grammar, LLGrammar)
    return backend, grammar


def fill(backend: LLGuidance, matchers: list[Any]) -> np.ndarray:
    words = np.full((len(matchers), 9), 0xFFFFFFFF, dtype=np.uint32)
    backend.fill_many(matchers, words)
    return words


def made(lanes: Lanes) -> int:
    """Return how many lanes there are, once none is being made."""
    for thread in threading.enumerate():
        if thread.name == "dovetail-grammar-lanes":
            thread.join()
    return len(lanes.firsts)


@pytest.mark.parametrize("context", [BYTES, ENDLESS], ids=["with a stop id", "without"])
def test_answers_that_need_masks_together_get_lanes_of_their_own(context: GrammarContext) -> None:
    backend, grammar = compiled(context)
    answers = [grammar.begin() for _ in range(6)]
    fill(backend, answers[:1])
    assert made(grammar.whole) == 1, "one alone needs no other"
    for letter in b'{"a":"xyz':
        masks = fill(backend, answers)
        single = np.zeros((6, 9), dtype=np.uint32)
        for matcher, line in zip(answers, single, strict=True):
            matcher.fill(line)
        assert (masks == single).all()
        assert made(grammar.whole) == 4, "twice as many as threads at most"
        assert all(matcher.accept(letter) for matcher in answers)


def test_what_is_too_much_for_a_further_lane_continues_in_the_first() -> None:
    backend, grammar = compiled(BYTES)
    tokenizer = llguidance.LLTokenizer(Bytes(), eos_token=[STOP], slices=[])
    lark = '%llguidance {"no_forcing": true}\nstart: /(a|b)*a(a|b){12}/\n'

    def make(most_states: int) -> Any:
        few = llguidance.LLParserLimits(
            max_lexer_states=most_states if most_states == MOST_STATES else 20, verbose_errors=False
        )
        return llguidance.LLMatcher(tokenizer, lark, log_level=0, limits=few)

    lanes = Lanes(make)
    lanes.widen(4)
    assert made(lanes) == 4
    answers, oracle = (
        [LLMatcher(LLGrammar(grammar.fill, each)) for _ in range(8)]
        for each in (lanes, Lanes(make))
    )
    for letter in b"abbabaaabbababbbabaabbbba":
        assert (fill(backend, answers) == fill(backend, oracle)).all()
        assert all(matcher.accept(letter) for matcher in [*answers, *oracle])
