"""Three vocabularies of the kinds that models have: the demo model's, a byte-level BPE of true
size, a SentencePiece one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import cache

from dovetail.api.grammar import GrammarContext
from dovetail.front.grammars import token_bytes
from dovetail.front.tokenizer import Tokenizer
from tests.structured.test_vocabulary import DEMO, sentencepiece

TRUE_SIZE = 150_000
LONGEST = 20  # bytes of a token of the byte-level BPE
# what its texts are made of, above all
OFTEN = ' \n",:{}[]0123456789-.eE\\u/abcdefghijklmnopqrstuvwxyzABCDEFTZ_' + "éä漢字😀"


def of_tokenizer(tokenizer: Tokenizer) -> GrammarContext:
    plain, _ = token_bytes(tokenizer, tokenizer.vocab_size)
    stop = tokenizer.own.eos_token_id
    assert stop is not None
    plain[stop] = None
    return GrammarContext(plain, frozenset([stop]), tokenizer.vocab_size)


def byte_level(size: int = TRUE_SIZE, seed: int = 0) -> GrammarContext:
    """Return a vocabulary as merges make it: the bytes, then each token out of two before it.
    Tokens reach over all borders: of characters, of strings, of objects. The last few ids are
    special or padding; two of them are stop ids."""
    chance = random.Random(seed)
    tokens = [bytes([byte]) for byte in range(256)]
    known = set(tokens)
    common = [bytes([byte]) for byte in OFTEN.encode()]
    while len(tokens) < size - 8:
        left, right = (
            chance.choice(common)
            if chance.random() < 0.5
            else tokens[int(len(tokens) * chance.random() ** 3)]
            for _ in range(2)
        )
        if len(merged := left + right) <= LONGEST and merged not in known:
            known.add(merged)
            tokens.append(merged)
    return GrammarContext([*tokens, *[None] * 8], frozenset([size - 8, size - 6]), size)


MAKERS: Mapping[str, Callable[[], GrammarContext]] = {
    "demo": lambda: of_tokenizer(Tokenizer.load(DEMO)),
    "byte-level": byte_level,
    "sentencepiece": lambda: of_tokenizer(sentencepiece()),
}


@cache
def vocabulary(name: str) -> GrammarContext:
    return MAKERS[name]()
