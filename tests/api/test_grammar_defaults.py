"""A grammar backend that overrides only what it must."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from dovetail.api.component import NoOptions
from dovetail.api.grammar import (
    Grammar,
    GrammarBackend,
    GrammarContext,
    GrammarSpec,
    Matcher,
)
from dovetail.errors import DovetailError


class Allows(Matcher):
    """Allows one token again and again."""

    complete = False

    def __init__(self, token: int) -> None:
        self.token = token
        self.accepted = 0

    def fill(self, words: NDArray[np.uint32]) -> None:
        words[:] = 1 << self.token

    def accept(self, token: int) -> bool:
        self.accepted += 1
        return token == self.token


class Backend(GrammarBackend):
    def compile(self, spec: GrammarSpec) -> Grammar:
        raise NotImplementedError


BACKEND = Backend(NoOptions(), GrammarContext(token_bytes=(), stop_ids=frozenset(), vocab_size=32))


def test_no_matcher_is_advanced_together_with_others() -> None:
    matchers = [Allows(1), Allows(2)]
    assert BACKEND.accept_many(matchers, [1, 2]) == [False, False]
    assert [matcher.accepted for matcher in matchers] == [0, 0]


def test_masks_are_filled_one_by_one_each_into_its_row() -> None:
    words = np.zeros((2, 1), np.uint32)
    assert BACKEND.start_fill([Allows(1), Allows(2)], words) is None
    assert not words.any()
    BACKEND.fill_many([Allows(1), Allows(2)], words)
    assert words.tolist() == [[2], [4]]


def test_a_matcher_forces_no_token_and_takes_none_back() -> None:
    assert list(Allows(1).forced()) == []
    with pytest.raises(DovetailError, match="Allows can't roll back"):
        Allows(1).rollback(1)
