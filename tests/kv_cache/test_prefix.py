"""Guarantees of the KV-cache manager `prefix` beyond the contract of its kind, which `KVCacheSuite`
checks."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dovetail.api.blocks.hash_chain import HashChain, HashName, make_digest
from dovetail.api.component import ComponentSpec
from dovetail.api.kv_cache import (
    HOLE,
    Allocation,
    CacheGroup,
    KVContext,
    KVLayout,
    PageCopy,
    PageCounts,
)
from dovetail.api.prefix_cache import PrefixCache, PrefixOptions
from dovetail.errors import DovetailError
from dovetail_kv_cache import dovetail_components
from tests.kv_cache.helpers import compute, generate, manager, request
from tests.support import examples

block_sizes = st.sampled_from([1, 2, 3, 16])


def test_the_package_declares_the_manager() -> None:
    (spec,) = dovetail_components()
    assert isinstance(spec, ComponentSpec)
    assert (spec.kind, spec.name, spec.target) == (
        "kv_cache",
        "prefix",
        f"{PrefixCache.__module__}:{PrefixCache.__name__}",
    )
    assert spec.options == f"{PrefixOptions.__module__}:{PrefixOptions.__name__}"


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(ValidationError, match="resue"):
        PrefixOptions.model_validate({"resue": True})


def test_a_fresh_pool_hands_out_blocks_from_the_first() -> None:
    assert manager(block_size=4).allocate(request([1] * 9), 9) == Allocation(((0, 1, 2),), cached=0)


def test_without_reuse_nothing_is_found_and_nothing_stays() -> None:
    kv, first = manager(block_size=4, reuse=False), request(range(8))
    compute(kv, first)
    kv.free(first)
    assert not kv.capabilities.reuse
    assert kv.lookup(first) == 0
    assert kv.counts == PageCounts(empty=8, held=0, cached=0)


@examples(quick=60, full=500)
@given(block_size=block_sizes, chain=st.integers(1, 8), taken=st.integers(0, 8))
def test_a_chain_is_evicted_from_its_tail(block_size: int, chain: int, taken: int) -> None:
    kv, tokens = manager(8, block_size), list(range(chain * block_size))
    first = request(tokens)
    compute(kv, first)
    kv.free(first)
    if taken:
        kv.allocate(request([-1] * taken * block_size), taken * block_size)
    evicted = max(0, taken - (8 - chain))
    assert kv.lookup(request([*tokens, 7])) == (chain - evicted) * block_size


@given(
    block_size=block_sizes,
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=2, max_size=2),
    generated=st.integers(0, 20),
    salts=st.tuples(st.sampled_from("ab"), st.sampled_from("ab")),
    name=st.sampled_from(["xxh3", "sha256"]),
    after=st.integers(0, 1),
)
def test_a_chain_is_the_same_whichever_chain_came_before(
    block_size: int,
    prompts: list[list[int]],
    generated: int,
    salts: tuple[str, str],
    name: HashName,
    after: int,
) -> None:
    digest = make_digest(name)
    earlier, later = (
        request(prompt, keys=(salt,)) for prompt, salt in zip(prompts, salts, strict=True)
    )
    for one, token in ((earlier, 0), (later, 1)):
        generate(one, [token] * generated)
    like = HashChain(earlier, block_size, digest, after=after)
    like.extend((earlier.num_tokens - after) // block_size)
    blocks = (later.num_tokens - after) // block_size
    alone = HashChain(later, block_size, digest, after=after).extend(blocks)
    assert (
        HashChain(later, block_size, digest, like=like.beginning, after=after).extend(blocks)[
            :blocks
        ]
        == alone
    )


@examples(quick=60, full=500)
@given(block_size=block_sizes, common=st.integers(0, 40), generated=st.integers(0, 9))
def test_where_k_and_v_also_depend_on_the_next_token_a_block_is_found_only_before_the_same_one(
    block_size: int, common: int, generated: int
) -> None:
    """Of a request whose prompt ends with a block, the last block is found once there is a token
    after it."""
    layout = KVLayout((CacheGroup((0,), block_size),), 1024, "float32", reads_next=True)
    kv = PrefixCache(PrefixOptions(), KVContext(layout, 100))
    first = request([*range(common), 50])
    compute(kv, first)
    generate(first, [51] * generated)
    for known in range(common + 2, first.num_tokens + 1):
        kv.allocate(first, known)
        kv.commit(first, known)
    found = [
        kv.lookup(request([*range(common), *after])) for after in ([99, 99], [50, 99], [50, 51, 99])
    ]
    assert found[0] == max(0, common - 1) // block_size * block_size
    assert found[1] == common // block_size * block_size
    assert found[2] == (common + bool(generated)) // block_size * block_size
    kv.check_integrity()


def test_hashes_of_xxh3_differ_from_cache_to_cache_so_that_none_can_be_prepared() -> None:
    first = request(range(8))
    chains = [tuple(HashChain(first, 4, make_digest("xxh3")).extend(2)) for _ in range(8)]
    assert len(set(chains)) == 8


def test_sha256_is_that_of_the_standard() -> None:
    """Block by block over the hash before it and the tokens, four bytes each; the first over the
    cache keys'."""
    first = request([1, 2, 3, 4], keys=("salt:a",))
    parent = hashlib.sha256(b"('salt:a',)").digest()
    expected = [
        parent := hashlib.sha256(parent + struct.pack("<2i", *tokens)).digest()
        for tokens in ((1, 2), (3, 4))
    ]
    assert HashChain(first, 2, make_digest("sha256")).extend(2) == expected


def test_another_hash_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValidationError, match="'xxh3' or 'sha256'"):
        PrefixOptions.model_validate({"hash": "md5"})


def test_what_is_found_is_looked_up_anew_when_it_may_have_changed() -> None:
    kv, asking = manager(3, 4), request([1] * 9)
    assert kv.lookup(asking) == 0
    first = request([1] * 8)
    compute(kv, first)
    assert kv.lookup(asking) == 8
    kv.free(first)
    kv.allocate(request([2] * 8), 8)  # takes the place of the second block
    assert kv.lookup(asking) == 4


def test_what_was_used_last_is_evicted_last() -> None:
    kv, old, young = manager(6, 4), request([1] * 8), request([2] * 8)
    for each in (old, young):
        compute(kv, each)
    for each in (young, old):  # old is used longer
        kv.free(each)
    kv.allocate(request([3] * 16), 16)  # two empty ones and two cached
    assert kv.lookup(request([2] * 9)) == 0
    assert kv.lookup(request([1] * 9)) == 8


def test_a_block_computed_twice_is_found_once_and_its_copy_becomes_empty() -> None:
    kv, first, second = manager(block_size=4), request(range(4)), request(range(4))
    one = compute(kv, first)  # its only block holds the last token, so that second can't share it
    compute(kv, second)
    kv.free(second)
    assert kv.counts == PageCounts(empty=7, held=1, cached=0)
    found = kv.allocate(request(range(5)), 5)
    assert found is not None
    assert found.pages[0][0] == one[0]


def test_a_request_may_get_room_before_its_tokens_are_known() -> None:
    kv, first = manager(8, 4), request(range(3))
    allocation = kv.allocate(first, 16)
    assert allocation is not None
    assert len(allocation.pages[0]) == 4
    assert kv.allocate(first, 16) == Allocation(((),))


def test_uncommitting_a_duplicate_leaves_the_one_that_is_found() -> None:
    kv, first, second = manager(block_size=4), request(range(4)), request(range(4))
    compute(kv, first)
    compute(kv, second)
    kv.uncommit(second, 0)
    assert kv.lookup(request(range(5))) == 4


def test_nothing_of_a_distrusted_request_is_found_whoever_computed_it() -> None:
    kv, first = manager(block_size=4), request(range(8))
    failed, runs = request(range(13)), request(range(12))
    compute(kv, first)
    kv.free(first)
    compute(kv, failed)
    compute(kv, runs, 8)
    kv.distrust(failed)
    kv.commit(failed, 12)
    assert kv.lookup(request(range(13))) == 0
    kv.free(failed)
    kv.check_integrity()
    kv.free(runs)
    assert kv.counts == PageCounts(empty=8, held=0, cached=0)
    kv.check_integrity()


def test_a_distrusted_request_may_hold_nothing() -> None:
    kv, first = manager(block_size=4), request(range(8))
    compute(kv, first)
    kv.free(first)
    other = request(range(20, 28))
    compute(kv, other)
    kv.distrust(first)
    assert kv.lookup(request(range(9))) == 0
    assert kv.lookup(request(range(20, 29))) == 8
    kv.check_integrity()


def test_copies_come_in_the_order_of_the_forks() -> None:
    kv, parent = manager(block_size=4), request(range(6))
    child, grandchild = request(range(6)), request(range(6))
    compute(kv, parent)
    kv.fork(parent, child, 5)
    kv.fork(child, grandchild, 5)
    assert list(kv.take_copies()) == [PageCopy(1, 2), PageCopy(2, 3)]


def test_blocks_before_a_window_are_let_go_and_the_table_keeps_its_length() -> None:
    kv, first = manager(4, 4, window=4), request(range(12))
    compute(kv, first)
    kv.trim(first, 12)
    assert kv.counts == PageCounts(empty=1, held=1, cached=2)
    assert kv.pages_needed(request([99]), 1, without=[first]) == 0
    kv.trim(first, 8)  # nothing comes back
    generate(first, [12])
    assert kv.allocate(first, 13) == Allocation(((3,),))
    kv.free(first)
    assert kv.counts.held == 0


def test_a_fork_may_begin_where_the_window_hides_what_was_trimmed() -> None:
    kv, parent, child = manager(8, 4, window=4), request(range(12)), request(range(12))
    compute(kv, parent)
    kv.trim(parent, 11)
    assert kv.fork(parent, child, 11) == Allocation(((HOLE, HOLE, 3),), cached=11)
    kv.check_integrity()
    with pytest.raises(DovetailError, match="needs block 1 of group 0"):
        kv.fork(parent, request(range(12)), 9)


def test_misuse_names_the_request_and_what_it_holds() -> None:
    kv, first = manager(block_size=4), request(range(6), id="first")
    with pytest.raises(DovetailError, match=r"commit of request 'first': it holds no blocks"):
        kv.commit(first, 4)
    with pytest.raises(DovetailError, match=r"allocate\(0 tokens\)"):
        kv.allocate(first, 0)
    compute(kv, first)
    with pytest.raises(
        DovetailError,
        match=r"allocate\(5 tokens\), after 6 of request 'first': it holds 2 blocks of 4",
    ):
        kv.allocate(first, 5)
    with pytest.raises(DovetailError, match=r"commit\(8 tokens\), 6 of them known"):
        kv.commit(first, 8)
    with pytest.raises(DovetailError, match="differ in their first 5 tokens"):
        kv.fork(first, request([9] * 6), 5)
    with pytest.raises(DovetailError, match="holds blocks already"):
        kv.fork(first, first, 5)


def test_blocks_let_go_before_they_were_committed_are_never_found() -> None:
    kv, first = manager(4, 4, window=4), request(range(12))
    kv.allocate(first, 12)
    kv.trim(first, 11)
    kv.commit(first, 12)
    kv.check_integrity()
    assert kv.counts == PageCounts(empty=3, held=1, cached=0)


def test_what_is_uncommitted_after_it_was_let_go_is_empty() -> None:
    kv, first = manager(4, 4, window=4), request(range(12))
    compute(kv, first)
    kv.trim(first, 11)
    kv.uncommit(first, 0)
    assert kv.counts == PageCounts(empty=3, held=1, cached=0)
    kv.check_integrity()
