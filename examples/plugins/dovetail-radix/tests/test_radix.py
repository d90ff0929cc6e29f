from collections.abc import Sequence

from dovetail.api.component import NoOptions
from dovetail.api.kv_cache import CacheGroup, KVContext, KVLayout, PageCounts
from dovetail.request import Request
from dovetail.request.sampling_params import SamplingParams

from dovetail_radix.manager import RadixCache


def make(num_blocks: int) -> RadixCache:
    return RadixCache(NoOptions(), KVContext(KVLayout((CacheGroup((0,), 4),), 1, "float32"), num_blocks))


def compute(kv: RadixCache, id: str, tokens: Sequence[int]) -> Request:
    request = Request(id, tokens, SamplingParams(), max_tokens=8)
    assert kv.allocate(request, len(tokens)) is not None
    kv.commit(request, len(tokens))
    kv.check_integrity()
    return request


def test_the_leaf_that_was_used_longest_ago_goes_first() -> None:
    kv = make(num_blocks=4)
    shared = [1] * 4
    one = [2] * 4
    other = [3] * 4
    for tokens in ([*shared, *one], [*shared, *other]):
        kv.free(compute(kv, "r", tokens))
    kv.free(compute(kv, "r", [9] * 8))  # takes the empty block, and one more
    assert kv.lookup(Request("x", [*shared, *one, 0], SamplingParams(), max_tokens=1)) == 4
    assert kv.lookup(Request("x", [*shared, *other, 0], SamplingParams(), max_tokens=1)) == 8


def test_a_block_computed_twice_at_once_is_found_once() -> None:
    kv = make(num_blocks=4)
    # neither finds its own last token, so both compute
    requests = [compute(kv, id, [5] * 4) for id in "ab"]
    for request in requests:
        kv.free(request)
    kv.check_integrity()
    assert kv.counts == PageCounts(empty=3, held=0, cached=1)
