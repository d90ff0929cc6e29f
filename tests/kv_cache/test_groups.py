"""The manager `prefix` over layouts of several cache groups, beyond what `KVCacheSuite` checks."""

from __future__ import annotations

from random import Random

import pytest

from dovetail.api.kv_cache import HOLE, Allocation, CacheGroup, KVLayout, PageCopy, PageCounts
from dovetail.api.prefix_cache import PrefixCache
from dovetail.engine.live_request import LiveRequest
from dovetail.errors import DovetailError
from tests.kv_cache.helpers import compute, generate, manager_of, request
from tests.kv_cache.traffic import (
    ANSWER,
    GEMMA_3_27B,
    GPT_OSS_20B,
    OWN,
    SHARED,
    Model,
    found_tokens,
)
from tests.support import FULL

FULL_GROUP, SLIDING = CacheGroup((0,), 4), CacheGroup((1,), 4, window=5, pages_per_block=2)
THREE = (
    CacheGroup((0,), 4),
    CacheGroup((1,), 2, window=3, pages_per_block=3),
    CacheGroup((2,), 8, window=20, pages_per_block=2),
)


def test_each_group_gets_the_pages_of_its_blocks_and_releases_what_its_window_does_not_see() -> (
    None
):
    kv, first = manager_of(FULL_GROUP, SLIDING, num_pages=20), request(range(12))
    assert kv.allocate(first, 12) == Allocation(((0, 1, 2), (3, 4, 5, 6, 7, 8)))
    kv.trim(first, 12)
    assert kv.counts == PageCounts(empty=15, held=5, cached=0, held_by_group=(3, 2))
    assert kv.tables(first) == ((0, 1, 2), (HOLE, HOLE, HOLE, HOLE, 7, 8))


def test_a_hit_holds_only_the_blocks_that_later_tokens_see() -> None:
    kv, first = manager_of(FULL_GROUP, SLIDING, num_pages=20), request(range(12))
    compute(kv, first)
    kv.free(first)
    assert kv.allocate(request([*range(12), 99]), 13) == Allocation(
        ((0, 1, 2, 9), (HOLE, HOLE, HOLE, HOLE, 7, 8, 10, 11)), cached=12
    )
    assert kv.counts.held_by_group == (4, 4)


def test_a_prefix_ends_where_the_last_group_still_has_what_its_window_sees() -> None:
    kv, first = manager_of(FULL_GROUP, SLIDING, num_pages=9), request(range(12))
    compute(kv, first)
    kv.trim(first, 12)  # releases the blocks of tokens 0 … 7
    kv.allocate(request([-1]), 1)  # takes one of these two, and a page of the other
    assert kv.lookup(request([*range(12), 99])) == 12
    assert kv.lookup(request([*range(8), 99])) == 0


def test_an_evicted_block_gives_back_all_its_pages() -> None:
    kv, first = manager_of(SLIDING, num_pages=4), request(range(8))
    compute(kv, first)
    kv.free(first)
    assert kv.counts == PageCounts(empty=0, held=0, cached=4)
    kv.allocate(request([-1]), 1)
    assert kv.counts == PageCounts(empty=0, held=2, cached=2)
    kv.check_integrity()


def test_groups_do_not_find_blocks_of_each_other() -> None:
    """A block of the same tokens, in the group that wasn't asked, is no hit."""
    kv = manager_of(CacheGroup((0,), 4), CacheGroup((1,), 4, window=5), num_pages=8)
    first = request(range(8))
    kv.allocate(first, 8)
    kv.trim(first, 8)  # the first block of the second group is gone before it is committed
    kv.commit(first, 8)
    assert kv.lookup(request([*range(4), 99])) == 0
    assert kv.lookup(request([*range(8), 99])) == 8


def test_a_prefix_is_found_in_multiples_of_all_blocks() -> None:
    kv, first = (
        manager_of(CacheGroup((0,), 4), CacheGroup((1,), 6, window=7), num_pages=20),
        request(range(36)),
    )
    compute(kv, first)
    for tokens, found in ((12, 0), (13, 12), (24, 12), (25, 24), (36, 24)):
        assert kv.lookup(request(range(tokens))) == found


def test_a_fork_copies_the_partial_blocks_page_by_page() -> None:
    kv, parent, child = (
        manager_of(FULL_GROUP, SLIDING, num_pages=20),
        request(range(10)),
        request(range(10)),
    )
    compute(kv, parent)
    assert kv.fork(parent, child, 9) == Allocation(
        ((0, 1, 9), (HOLE, HOLE, 5, 6, 10, 11)), cached=9
    )
    assert list(kv.take_copies()) == [PageCopy(2, 9), PageCopy(7, 10), PageCopy(8, 11)]
    kv.free(parent)
    assert kv.counts.held_by_group == (3, 4)


def test_a_fork_without_pages_for_all_copies_changes_nothing() -> None:
    kv, parent, child = (
        manager_of(FULL_GROUP, SLIDING, num_pages=11),
        request(range(10)),
        request(range(10)),
    )
    compute(kv, parent)
    before = kv.counts
    assert kv.fork(parent, child, 9) is None  # 3 pages for copies, and 2 are free
    assert (kv.counts, list(kv.take_copies())) == (before, [])
    assert kv.fork(parent, child, 8) is not None


def test_a_fork_that_needs_what_a_window_has_released_is_refused() -> None:
    kv, parent = manager_of(FULL_GROUP, SLIDING, num_pages=40), request(range(20))
    compute(kv, parent)
    kv.trim(parent, 20)
    with pytest.raises(DovetailError, match=r"fork\(8 tokens\), which needs block 1 of group 1"):
        kv.fork(parent, request(range(20)), 8)


def test_what_is_uncommitted_is_found_in_no_group() -> None:
    kv, first = manager_of(*THREE, num_pages=100), request(range(24))
    compute(kv, first)
    kv.uncommit(first, 15)
    assert kv.lookup(request(range(25))) == 8
    compute(kv, first)
    assert kv.lookup(request(range(25))) == 24
    kv.check_integrity()


def test_after_a_reset_nothing_is_found_in_any_group() -> None:
    kv, running, ended = manager_of(*THREE, num_pages=100), request(range(24)), request([7] * 16)
    for each in (running, ended):
        compute(kv, each)
    kv.free(ended)
    kv.reset()
    assert kv.counts.cached == 0
    kv.commit(running, 24)
    assert [kv.lookup(request([*tokens, 99])) for tokens in (range(24), [7] * 16)] == [0, 0]


def test_blocks_where_prompts_part_outlive_those_that_one_request_has_used() -> None:
    kv = manager_of(CacheGroup((0,), 4), CacheGroup((1,), 4, window=5), num_pages=16)
    shared = list(range(8))
    for number in range(
        6
    ):  # each trims the window's blocks of the shared prefix long before it ends
        one = request([*shared, *[50 + number] * 12])
        assert kv.lookup(one) == (8 if number else 0)
        compute(kv, one)
        kv.trim(one, 20)
        kv.free(one)


@pytest.mark.parametrize(
    ("model", "seen_mb", "held_mb"),
    [(GPT_OSS_20B, 808, 809), (GEMMA_3_27B, 3_121, 3_196)],
    ids=["gpt-oss-20b", "gemma-3-27b"],
)
def test_a_long_request_holds_what_its_layers_see(model: Model, seen_mb: int, held_mb: int) -> None:
    layout, tokens = model.layout, 32_768
    kv, first = manager_of(*layout.groups, num_pages=layout.pages(tokens)), request([1] * tokens)
    kv.allocate(first, 1)
    computed, pages = 0, list[int]()
    for chunk in (*[2_044] * 16, *[1] * 64):  # a prefill, then decodes
        kv.trim(first, computed)
        kv.allocate(first, computed + chunk)
        kv.commit(first, computed + chunk)
        computed += chunk
        if chunk == 1:
            assert kv.counts.held == layout.visible_pages(computed)
            pages.append(kv.counts.held)
    held, seen = max(pages) * layout.page_bytes, model.seen_bytes(tokens)
    assert (computed, round(held / 1e6), round(seen / 1e6)) == (tokens, held_mb, seen_mb)
    assert held <= 1.05 * seen


@pytest.mark.parametrize(("families", "pool"), [(4, 6), (8, 10)])
@pytest.mark.parametrize("model", [GPT_OSS_20B, GEMMA_3_27B], ids=["gpt-oss-20b", "gemma-3-27b"])
def test_agents_find_what_they_would_in_one_full_group(
    model: Model, families: int, pool: int
) -> None:
    """In a pool of the bytes that `pool` whole requests need in one full group, so that neither
    keeps all that is computed."""
    pool_bytes = pool * model.one_group.pages(SHARED + OWN + ANSWER) * model.one_group.page_bytes
    by_groups, by_one = (
        found_tokens(layout, pool_bytes, families) for layout in (model.layout, model.one_group)
    )
    assert by_groups >= 0.95 * by_one


def test_random_operations_over_three_groups_leak_nothing() -> None:
    """Also bad orders, which are refused and change nothing."""
    random, layout = Random(0), KVLayout(THREE, 1, "none")
    kv = manager_of(*THREE, num_pages=160)
    world = _World(kv, random)
    for number in range(60_000 if FULL else 3_000):
        world.act()
        if number % 50 == 0:
            kv.check_integrity()
    assert world.forks > 20
    assert world.hits > 20
    assert world.refusals > 20
    for each in list(world.running):
        kv.free(each)
    assert kv.counts.held == 0
    room = max(tokens for tokens in range(1, 1_000) if layout.pages(tokens) <= 160)
    last = kv.allocate(request([-1] * room), room)
    assert last is not None
    assert len({page for pages in last.pages for page in pages}) == layout.pages(room)
    kv.check_integrity()


class _World:
    """Requests that begin alike, and do what they like."""

    def __init__(self, kv: PrefixCache, random: Random) -> None:
        self.kv, self.random = kv, random
        self.running: dict[LiveRequest, int] = {}  # -> tokens that it has blocks for
        self.forks = self.hits = self.refusals = 0

    def act(self) -> None:
        kv, random = self.kv, self.random
        if not self.running or random.random() < 0.2:
            self._admit(request([random.choice([1, 1, 1, 2]), *[3] * random.randint(0, 40)]))
            return
        each = random.choice(list(self.running))
        tokens = self.running[each]
        match random.choice(
            [
                "grow",
                "grow",
                "commit",
                "uncommit",
                "trim",
                "trim",
                "fork",
                "free",
                "free",
                "wrong",
                "reset",
            ]
        ):
            case "grow":
                more = tokens + random.randint(1, 9)
                if self._allocate(each, more) is not None:
                    generate(each, [3] * (more - each.num_tokens))
            case "commit":
                kv.commit(each, min(tokens, each.num_tokens))
            case "uncommit":
                kv.uncommit(each, random.randint(0, tokens))
            case "trim":
                kv.trim(each, random.randint(0, tokens))
            case "fork":
                self._fork(each)
            case "free":
                kv.free(each)
                del self.running[each]
            case "wrong":
                self._refused(each)
            case "reset":
                if random.random() < 0.05:
                    kv.reset()
        kv.take_copies()

    def _admit(self, new: LiveRequest) -> None:
        found, allocation = self.kv.lookup(new), self._allocate(new, new.num_tokens)
        if allocation is not None:
            assert allocation.cached == found
            self.hits += found > 0

    def _allocate(self, each: LiveRequest, tokens: int) -> Allocation | None:
        needed, available = self.kv.pages_needed(each, tokens), self.kv.available_pages
        allocation = self.kv.allocate(each, tokens)
        assert (allocation is not None) == (needed <= available)
        if allocation is not None:
            assert self.kv.available_pages == available - needed
            self.running[each] = tokens
        return allocation

    def _fork(self, parent: LiveRequest) -> None:
        child, tokens = (
            request(parent.prompt_token_ids),
            self.random.randint(1, min(parent.prompt_tokens, self.running[parent])),
        )
        try:
            if self.kv.fork(parent, child, tokens) is not None:
                self.running[child] = tokens
                self.forks += 1
        except DovetailError:  # it needs what the parent has released
            self.kv.check_integrity()

    def _refused(self, each: LiveRequest) -> None:
        before = self.kv.counts, self.kv.tables(each)
        stranger, tokens = request([5]), self.running[each]
        for call in (
            lambda: self.kv.allocate(each, tokens - 1),
            lambda: self.kv.commit(each, each.num_tokens + 1),
            lambda: self.kv.fork(each, each, 1),
            lambda: self.kv.fork(stranger, each, 1),
            lambda: self.kv.trim(stranger, 1),
            lambda: self.kv.tables(stranger),
        ):
            with pytest.raises(DovetailError):
                call()
        self.refusals += 1
        assert (self.kv.counts, self.kv.tables(each)) == before
