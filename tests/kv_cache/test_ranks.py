"""Eviction orders of subclasses of `PrefixCache`: ranks, and what is evicted later than by rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from dovetail.api.blocks.ranked_queue import RankedQueue
from dovetail.api.component import NoOptions
from dovetail.api.kv_cache import CacheGroup, KVContext, KVLayout, PageCounts
from dovetail.api.prefix_cache import CachedBlock, PrefixCache, PrefixOptions
from dovetail.errors import PluginError
from dovetail.request import Request
from dovetail.testing.suites.kv_model import KVWorld, Shape
from dovetail.testing.suites.kv_scripts import draw_groups, draw_script, draw_shape, draw_states
from tests.kv_cache.helpers import compute, request
from tests.support import FULL

KV = CacheGroup((0,), 4)
WINDOW = CacheGroup((1,), 4, window=5)
STATES = CacheGroup((1,), 4, pages_per_block=3, recurrent=True)

Manager = TypeVar("Manager", bound=PrefixCache)


class Fifo(PrefixCache):
    """First in, first out."""

    def rank(self, block: CachedBlock) -> float:
        return block.created


class AtRandom(PrefixCache):
    def __init__(self, options: BaseModel, context: KVContext) -> None:
        super().__init__(options, context)
        self.random = Random(3)

    def rank(self, block: CachedBlock) -> float:
        return self.random.random()


class BeginningFirst(PrefixCache):
    """By its ranks alone, a prefix would lose its beginning first. Notes what happens."""

    def __init__(self, options: BaseModel, context: KVContext) -> None:
        super().__init__(options, context)
        self.ranked: list[CachedBlock] = []
        self.hits: list[tuple[int, int, str]] = []
        self.evicted: list[tuple[int, Any]] = []

    def rank(self, block: CachedBlock) -> tuple[int, int]:
        self.ranked.append(block)
        return (block.end, block.hits)

    def on_hit(self, block: CachedBlock, request: Request) -> None:
        self.hits.append((block.end, block.hits, request.id))

    def on_evict(self, block: CachedBlock, rank: Any) -> None:
        self.evicted.append((block.end, rank))


def make(
    cls: type[Manager],
    num_pages: int,
    groups: tuple[CacheGroup, ...] = (KV,),
    options: BaseModel | None = None,
) -> Manager:
    return cls(options or NoOptions(), KVContext(KVLayout(groups, 1024, "float32"), num_pages))


def serve(kv: PrefixCache, tokens: Sequence[int], id: str = "r") -> None:
    """Run a request of these tokens to its end."""
    one = request(tokens, id=id)
    compute(kv, one)
    kv.take_copies()
    kv.take_checkpoints()
    kv.free(one)
    kv.check_integrity()


def found(kv: PrefixCache, tokens: Sequence[int]) -> int:
    return kv.lookup(request([*tokens, -1]))


# Orders


def test_a_plain_order_is_a_line() -> None:
    fifo, lru = make(Fifo, 4), make(PrefixCache, 4)
    for kv in (fifo, lru):
        for token in (1, 2, 3, 1, 4):  # the first is used again, before memory is short
            serve(kv, [token] * 4 + [0])
    assert [found(fifo, [token] * 4) for token in (1, 2, 3, 4)] == [0, 4, 4, 4]
    assert [found(lru, [token] * 4) for token in (1, 2, 3, 4)] == [4, 0, 4, 4]


def test_the_order_of_use_as_a_rank_is_that_of_the_manager_without_one() -> None:
    class ByUse(PrefixCache):
        def rank(self, block: CachedBlock) -> float:
            return block.last_use

    random = Random(7)
    ranked, plain = make(ByUse, 12), make(PrefixCache, 12)
    for _ in range(200):
        tokens = [random.randrange(3) for _ in range(random.randrange(1, 20))]
        assert found(ranked, tokens) == found(plain, tokens)
        serve(ranked, tokens)
        serve(plain, tokens)


@pytest.mark.parametrize("draw", [draw_shape, draw_groups, draw_states])
@pytest.mark.parametrize("cls", [AtRandom, Fifo, BeginningFirst])
def test_no_claim_of_the_kind_is_broken_whatever_the_ranks(
    cls: type[PrefixCache], draw: Callable[[Random], Shape]
) -> None:
    for seed in range(2_000 if FULL else 12):
        random = Random(seed)
        world = KVWorld(lambda context: cls(NoOptions(), context), draw(random))
        world.run(draw_script(random))
        assert not world.breaches, seed


def test_options_of_other_classes_are_accepted() -> None:
    class Own(BaseModel):
        weight: float = 2.0

    class Weighted(PrefixCache):
        options: Own

        def rank(self, block: CachedBlock) -> float:
            return self.options.weight * block.hits

    kv = make(Weighted, 4, options=Own(weight=3.0))
    serve(kv, [1] * 5)
    assert kv.capabilities.reuse
    assert found(kv, [1] * 4) == 4


def test_a_ranked_cache_without_reuse_ranks_nothing() -> None:
    kv = make(BeginningFirst, 4, options=PrefixOptions(reuse=False))
    serve(kv, [1] * 5)
    assert (kv.ranked, kv.counts) == ([], PageCounts(4, 0, 0))


# What is evicted later than by rank


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    kv = make(BeginningFirst, 5)
    serve(kv, [1] * 13)
    serve(kv, [2] * 9)
    assert (found(kv, [1] * 12), found(kv, [2] * 8)) == (8, 8)
    assert kv.evicted == [(12, (12, 0))]


def test_a_beginning_waits_for_all_its_continuations() -> None:
    kv = make(Fifo, 6)
    serve(kv, [1] * 4 + [2] * 5)
    serve(kv, [1] * 4 + [3] * 5)
    serve(kv, [4] * 17)  # needs 5 of the 6 pages: 3 are free
    assert found(kv, [1] * 4) == 4
    assert (found(kv, [1] * 4 + [2] * 4), found(kv, [1] * 4 + [3] * 4)) == (4, 4)


def test_a_cached_beginning_of_a_held_block_can_be_evicted() -> None:
    """Two requests compute the same block at the same time, and the cache finds one of the two
    copies. The holder of that copy may leave before the holder of the block after it."""
    kv = make(BeginningFirst, 4)
    one, two = request([1] * 5, id="one"), request([1] * 9, id="two")
    kv.allocate(one, 4)
    kv.allocate(two, 8)
    kv.commit(one, 4)
    kv.commit(two, 8)
    kv.free(one)
    assert kv.counts == PageCounts(empty=1, held=2, cached=1)
    assert kv.allocate(request([2] * 8, id="three"), 8) is not None
    kv.check_integrity()


def test_full_attention_waits_for_the_blocks_of_windows_that_need_it() -> None:
    class WindowsLast(PrefixCache):
        def rank(self, block: CachedBlock) -> float:
            return 0 if block.group.window is None else 1

    kv = make(WindowsLast, 5, (KV, WINDOW))
    serve(kv, [1] * 8)  # two blocks of each group are cached
    kv.allocate(request([2] * 3), 3)  # needs a page more than the free one
    assert kv.counts == PageCounts(0, 2, 3, (1, 1))
    assert found(kv, [1] * 4) == 4  # of the beginning both are there


def test_full_attention_waits_for_checkpoints() -> None:
    class StatesLast(PrefixCache):
        def rank(self, block: CachedBlock) -> float:
            return 1 if block.group.recurrent else 0

    kv = make(StatesLast, 9, (KV, STATES))
    serve(kv, [1] * 5)  # a block and a checkpoint of 3 pages are cached
    kv.allocate(request([2] * 9), 9)  # needs a page more than the 5 free ones
    assert kv.counts == PageCounts(2, 6, 1, (3, 3))  # the checkpoint has gone


def test_a_checkpoint_of_a_low_rank_is_copied_whole() -> None:
    """A hit needs a live state while its checkpoint ranks lowest: other blocks give way first."""

    class StatesFirst(PrefixCache):
        def rank(self, block: CachedBlock) -> float:
            return 0 if block.group.recurrent else 1

    kv = make(StatesFirst, 11, (KV, STATES))
    serve(kv, [1] * 5)
    for token in (2, 3, 4):
        serve(kv, [token] * 4)
    kv.allocate(request([5] * 3), 3)
    assert kv.counts.empty == 0
    again = request([1] * 6)
    assert kv.lookup(again) == 4
    allocation = kv.allocate(again, 6)
    assert allocation is not None
    assert allocation.cached == 4
    copies = kv.take_copies()
    assert len({copy.src for copy in copies}) == 3
    assert [copy.dst for copy in copies] == list(allocation.pages[1])


# What a rank sees


def test_a_block_offers_its_size_hits_and_times() -> None:
    kv = make(BeginningFirst, 8)
    serve(kv, [1] * 9, "first")
    serve(kv, [1] * 9, "second")
    first, second = kv.ranked[:2], kv.ranked[2:]
    assert [block.end for block in second] == [8, 4]
    assert [(block.tokens, block.pages, block.group) for block in second] == [(4, 1, KV)] * 2
    assert [block.hits for block in first + second] == [0, 0, 1, 1]
    assert kv.hits == [(4, 1, "second"), (8, 1, "second")]
    assert [block.key for block in first] == [block.key for block in second]
    assert {block.created for block in first} == {block.created for block in second}
    assert first[0].created < first[0].last_use < second[0].last_use


def test_a_checkpoint_offers_the_tokens_that_it_saves() -> None:
    kv = make(BeginningFirst, 20, (KV, STATES))
    serve(kv, [1] * 9)
    checkpoint = next(block for block in kv.ranked if block.group.recurrent)
    assert (checkpoint.tokens, checkpoint.end, checkpoint.pages) == (8, 8, 3)
    serve(kv, [1] * 9, "second")
    assert sorted(kv.hits) == [(4, 1, "second"), (8, 1, "second"), (8, 1, "second")]


def test_hits_are_counted_from_the_last_time_a_block_was_computed() -> None:
    kv = make(BeginningFirst, 2)
    serve(kv, [1] * 5)
    serve(kv, [1] * 5)
    key = kv.ranked[-1].key
    serve(kv, [2] * 8)
    serve(kv, [1] * 5)
    assert (kv.ranked[-1].key, kv.ranked[-1].hits) == (key, 0)


def test_what_a_reset_drops_is_not_evicted() -> None:
    kv = make(BeginningFirst, 4)
    serve(kv, [1] * 9)
    kv.reset()
    kv.check_integrity()
    serve(kv, [2] * 9)
    assert (kv.evicted, kv.counts.cached) == ([], 2)


# The queue

BLOCKS = 10


def key_of(block: int) -> bytes:
    return b"%d" % block


@given(
    parents=st.lists(st.integers(-1, BLOCKS - 1), min_size=BLOCKS, max_size=BLOCKS),
    ranks=st.lists(st.integers(0, 3), min_size=BLOCKS, max_size=BLOCKS),
    acts=st.lists(
        st.tuples(
            st.sampled_from(["append", "append_last", "prepend", "remove", "pop", "clear"]),
            st.integers(0, BLOCKS - 1),
        ),
        max_size=60,
    ),
)
def test_a_queue_gives_the_leaf_of_the_lowest_rank(
    parents: list[int], ranks: list[int], acts: list[tuple[str, int]]
) -> None:
    parents = [parent if parent < block else -1 for block, parent in enumerate(parents)]
    evicted: list[tuple[int, int]] = []
    queue = RankedQueue(
        BLOCKS, int, ranks.__getitem__, lambda block, rank: evicted.append((block, rank))
    )
    for block, parent in enumerate(parents):
        queue.describe(block, key_of(block), key_of(parent) if parent >= 0 else b"")
    model: dict[int, tuple[int, int, int]] = {}
    for number, (act, block) in enumerate(acts):
        if act in ("append", "append_last", "prepend") and block not in model:
            getattr(queue, act)(block)
            order = {"prepend": 0, "append": 1, "append_last": 2}[act]
            model[block] = (order, ranks[block], number)
        elif act == "remove" and block in model:
            queue.remove(block)
            del model[block]
        elif act == "pop" and model:
            leaves = model.keys() - {parents[one] for one in model}
            expected = min(leaves, key=model.__getitem__)
            assert queue.pop_oldest() == expected
            assert evicted[-1] == (expected, ranks[expected])
            del model[expected]
        elif act == "clear":
            queue.clear()
            model.clear()
        queue.check()
        assert [*queue] == sorted(model)


class Counted(float):
    """A rank that counts comparisons."""

    comparisons = 0

    def __lt__(self, other: float) -> bool:
        Counted.comparisons += 1
        return super().__lt__(other)


def test_an_eviction_compares_logarithmically_many_ranks() -> None:
    class Ranked(PrefixCache):
        def rank(self, block: CachedBlock) -> float:
            return Counted(hash(block.key) % 1_000_003)

    kv = make(Ranked, 2_000)
    for token in range(2_000):
        serve_unchecked(kv, token)
    Counted.comparisons = 0
    for token in range(2_000, 2_100):
        serve_unchecked(kv, token)
    assert Counted.comparisons < 100 * 50  # a heap of 2,000 is 11 deep


def serve_unchecked(kv: PrefixCache, token: int) -> None:
    one = request([token] * 4)
    compute(kv, one)
    kv.free(one)


class OwnOptions(BaseModel):
    reuse: bool = True


def layout_of(*groups: CacheGroup) -> KVContext:
    return KVContext(KVLayout(groups, 1, "none"), 8)


def test_options_that_would_not_be_heeded_are_refused() -> None:
    with pytest.raises(
        PluginError, match="OwnOptions has reuse, which is heeded only of a subclass"
    ):
        PrefixCache(OwnOptions(), layout_of(KV))


class Mixed(PrefixCache):
    def rank(self, block: CachedBlock) -> float | tuple[float, ...]:
        return (1, 2) if block.end > KV.block_tokens else 1.0


def test_ranks_that_cannot_be_compared_are_refused_by_name() -> None:
    manager = Mixed(PrefixOptions(), layout_of(KV))
    one = request(range(12))
    compute(manager, one, 12)
    with pytest.raises(PluginError, match=r"Mixed.rank returned .* all ranks must be numbers"):
        manager.free(one)
