"""The built-in backend over a vocabulary of bytes, and answers written byte by byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from dovetail.api.grammar import (
    Grammar,
    GrammarBackend,
    GrammarContext,
    GrammarSpec,
    Matcher,
    SpecKind,
)
from dovetail_grammars.llguidance_backend import LLGuidance
from dovetail_grammars.options import GrammarOptions

STOP = 256
BYTES = GrammarContext([*(bytes([byte]) for byte in range(256)), None], frozenset([STOP]), 257)


@cache
def backend(**options: Any) -> GrammarBackend:
    return LLGuidance(GrammarOptions(**options), BYTES)


def compiled(kind: SpecKind, text: Any, **options: Any) -> Grammar:
    return backend(**options).compile(
        GrammarSpec(kind, text if isinstance(text, str) else json.dumps(text))
    )


def at(grammar: Grammar, text: str) -> Matcher | None:
    """Return a matcher behind `text`; None if it can't be written."""
    matcher = grammar.begin()
    return matcher if all(matcher.accept(byte) for byte in text.encode()) else None


def takes(grammar: Grammar, text: str) -> bool:
    """True if `text` is a whole answer."""
    matcher = at(grammar, text)
    return matcher is not None and matcher.accept(STOP)


def answers(
    at: Callable[[str], Matcher | None],
    parts: Sequence[str],
    most: int,
    end: Sequence[int] = (STOP,),
) -> set[str]:
    """Return the texts of up to `most` parts behind which `end` may come. What can't be written
    isn't continued."""
    found: set[str] = set()
    texts = [""]
    for _ in range(most + 1):
        reached = [(text, matcher) for text in texts if (matcher := at(text)) is not None]
        found |= {text for text, matcher in reached if all(matcher.accept(token) for token in end)}
        texts = [text + part for text, _ in reached for part in parts]
    return found


def mask(matcher: Matcher) -> set[int]:
    words = np.zeros(9, dtype=np.uint32)
    matcher.fill(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())
