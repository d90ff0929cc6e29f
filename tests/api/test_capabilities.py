"""Capabilities are declared: what a component doesn't name, it doesn't have."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from dovetail.api.attention import AttentionCapabilities
from dovetail.api.component import NoOptions
from dovetail.api.executor import Batch, Capacity, Executor, ExecutorCapabilities, Masks, Result
from dovetail.api.grammar import GrammarCapabilities, Matcher
from dovetail.api.graphs import GraphSupport
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
from dovetail.api.logits_processor import LogitsProcessorCapabilities
from dovetail.api.model import ModelCapabilities, ModelPooling
from dovetail.api.parser import CallForm, ParserCapabilities
from dovetail.api.sampler import SamplerCapabilities
from dovetail.api.tokenizer import TokenizerCapabilities
from dovetail.errors import DovetailError, PluginError, UnsupportedError
from tests.kv_cache.helpers import request


@pytest.mark.parametrize(
    "kind",
    [
        KVCapabilities,
        GrammarCapabilities,
        ExecutorCapabilities,
        TokenizerCapabilities,
        ParserCapabilities,
        ModelCapabilities,
    ],
)
def test_all_capabilities_are_off_by_default(kind: type[Any]) -> None:
    for field in dataclasses.fields(kind):
        assert not getattr(kind(), field.name), field.name


def test_an_attention_backend_serves_no_layer_by_default() -> None:
    """Its values are any; its features are off."""
    least = AttentionCapabilities()
    values = ("devices", "dtypes", "head_sizes", "block_sizes", "block_size_multiple")
    for field in dataclasses.fields(least):
        assert field.name in values or not getattr(least, field.name), field.name


def test_a_model_pools_and_generates_nothing_by_default() -> None:
    assert not ModelPooling().generates


@pytest.mark.parametrize(
    "kind", [AttentionCapabilities, SamplerCapabilities, LogitsProcessorCapabilities]
)
@pytest.mark.parametrize("value", ["mixed", True, None])
def test_what_is_no_support_of_graphs_is_refused(kind: type[Any], value: object) -> None:
    """In a condition it might pass for some."""
    with pytest.raises(
        PluginError, match=rf"{kind.__name__}: cuda_graph is {value!r}, expected GraphSupport\.NONE"
    ):
        kind(cuda_graph=value)


def test_no_support_of_graphs_is_false_and_any_other_true() -> None:
    assert [bool(each) for each in GraphSupport] == [
        each is not GraphSupport.NONE for each in GraphSupport
    ]


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


def test_an_executor_without_masks_refuses_to_sample() -> None:
    class Unmasked(Executor):
        def start(self) -> Capacity: ...  # type: ignore[empty-body]
        def submit(self, batch: Batch) -> object: ...
        def collect(self, handle: object) -> Result: ...  # type: ignore[empty-body]
        def check(self) -> None: ...
        def stop(self) -> None: ...

    nothing = Masks(np.zeros(0, np.int32), np.zeros((0, 1), np.uint32))
    executor = Unmasked(NoOptions(), None)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="Unmasked can't mask tokens"):
        executor.sample(None, nothing)
