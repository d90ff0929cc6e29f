"""Answers of tokens that chance takes from the masks, for `test_answers.py`: as a model would write
that knows nothing but the rule."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

import numpy as np

from dovetail.api.grammar import Grammar, GrammarBackend, GrammarContext
from dovetail_grammars.llguidance_backend import LLGuidance
from dovetail_grammars.options import GrammarOptions
from tests.structured.vocabularies import vocabulary

FREE = 25  # tokens until an answer strives for its end
LONGEST = 400  # tokens of an answer, after which it is left unfinished
ENDING = (
    b'"',
    b"}",
    b"]",
    b'"}',
    b'"]',
    b"}]",
    b"}}",
    b"]}",
    b'"}]',
    b'"}}',
    b'"]}',
    b"1",
    b"0",
    b'":',
    b"\\",
    b"n",
    b"null",
    b"true",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """`ended`: the grammar let it end there."""

    text: bytes
    ended: bool


@cache
def backend(vocabulary_name: str) -> GrammarBackend:
    return LLGuidance(GrammarOptions(threads=1, processes=0), vocabulary(vocabulary_name))


@cache
def ending(vocabulary_name: str) -> list[int]:
    """Return the ids that bring an end nearer."""
    context = vocabulary(vocabulary_name)
    return [id for id, text in enumerate(context.token_bytes) if text in ENDING]


def allowed(words: np.ndarray, context: GrammarContext) -> np.ndarray:
    return np.flatnonzero(
        np.unpackbits(words.view(np.uint8), bitorder="little")[: context.vocab_size]
    )


def walk(grammar: Grammar, vocabulary_name: str, chance: random.Random) -> Answer:
    """Return an answer. Each token is one that the mask allows, and one in four of the longest
    among some; a refused one is an error."""
    context, text = vocabulary(vocabulary_name), b""
    words = np.zeros(-(-context.vocab_size // 32), dtype=np.uint32)
    matcher = grammar.begin()
    for step in range(LONGEST):
        matcher.fill(words)
        ids = allowed(words, context)
        assert len(ids), f"nothing may come behind {text!r}"
        stops = [stop for stop in context.stop_ids if words[stop // 32] >> stop % 32 & 1]
        if stops and (len(ids) == len(stops) or chance.random() < (0.5 if step > FREE else 0.2)):
            assert matcher.accept(chance.choice(stops))
            return Answer(text, True)
        token = _choice(ids, words, vocabulary_name, step > FREE and chance.random() < 0.7, chance)
        if token in context.stop_ids:
            continue
        assert matcher.accept(token), (
            f"token {token} isn't accepted behind {text!r}, which the mask allows"
        )
        text += context.token_bytes[token] or b""
    return Answer(text, False)


def _choice(
    ids: np.ndarray, words: np.ndarray, vocabulary_name: str, end: bool, chance: random.Random
) -> int:
    if end:
        near = [id for id in ending(vocabulary_name) if words[id // 32] >> id % 32 & 1]
        if near:
            return chance.choice(near)
    if chance.random() < 0.25:
        tokens = vocabulary(vocabulary_name).token_bytes
        return max(
            (int(ids[chance.randrange(len(ids))]) for _ in range(8)),
            key=lambda id: len(tokens[id] or b""),
        )
    return int(ids[chance.randrange(len(ids))])
