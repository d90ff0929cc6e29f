"""Capabilities are declared: what a component doesn't name, it doesn't have."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dovetail.api.component import NoOptions
from dovetail.api.executor import ExecutorCapabilities
from dovetail.api.grammar import GrammarCapabilities, Matcher
from dovetail.api.kv_cache import (
    Allocation,
    CacheGroup,
    KVCacheManager,
    KVCapabilities,
    KVContext,
    KVLayout,
    PageCounts,
    Pages,
)
from dovetail.api.parser import CallForm, ParserCapabilities
from dovetail.api.tokenizer import TokenizerCapabilities
from dovetail.errors import DovetailError
from tests.kv_cache.helpers import request


@pytest.mark.parametrize(
    "kind",
    [
        KVCapabilities,
        GrammarCapabilities,
        ExecutorCapabilities,
        TokenizerCapabilities,
        ParserCapabilities,
    ],
)
def test_all_capabilities_are_off_by_default(kind: type[Any]) -> None:
    for field in dataclasses.fields(kind):
        assert not getattr(kind(), field.name), field.name


def test_a_form_of_calls_has_no_mark_by_default() -> None:
    assert not CallForm(lambda name: (name, ""), "<").marked


class Least(KVCacheManager):
    """A manager with the methods that have no defaults."""

    def pages_needed(self, request: Any, num_tokens: int, without: Any = ()) -> int:
        return 1

    def allocate(self, request: Any, num_tokens: int) -> Allocation | None:
        return Allocation(((0,),))

    def tables(self, request: Any) -> tuple[Pages, ...]:
        return ((0,),)

    def commit(self, request: Any, upto: int) -> None: ...

    def uncommit(self, request: Any, upto: int) -> None: ...

    def free(self, request: Any) -> None: ...

    def reset(self) -> None: ...

    @property
    def counts(self) -> PageCounts:
        return PageCounts(1, 0, 0)


def test_a_manager_needs_only_what_has_no_right_default() -> None:
    layout = KVLayout((CacheGroup((0,), 4),), 1, "none")
    kv, one = Least(NoOptions(), KVContext(layout, 1)), request([1] * 8)
    assert (kv.lookup(one), kv.take_copies(), kv.take_checkpoints()) == (0, (), ())
    kv.trim(one, 4)
    kv.check_integrity()
    with pytest.raises(DovetailError, match="Least can't fork"):
        kv.fork(one, request([1] * 8), 4)


class Forward(Matcher):
    def fill(self, words: Any) -> None: ...

    def accept(self, token: int) -> bool:
        return True

    @property
    def complete(self) -> bool:
        return False


def test_a_matcher_needs_no_way_back() -> None:
    assert Forward().forced() == ()
    with pytest.raises(DovetailError, match="Forward can't roll back"):
        Forward().rollback(1)
