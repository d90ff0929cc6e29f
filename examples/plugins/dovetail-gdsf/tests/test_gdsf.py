from dovetail.api.kv_cache import CacheGroup, KVContext, KVLayout
from dovetail.api.prefix_cache import PrefixOptions
from dovetail.request import Request
from dovetail.request.sampling_params import SamplingParams

from dovetail_gdsf.manager import GDSF


def make(num_blocks: int) -> GDSF:
    return GDSF(PrefixOptions(), KVContext(KVLayout((CacheGroup((0,), 4),), 1, "float32"), num_blocks))


def prompt(token: int) -> Request:
    """Four equal tokens, which are a block, and one that is computed in any case."""
    return Request("r", [token] * 4 + [0], SamplingParams(), max_tokens=8)


def serve(kv: GDSF, token: int) -> None:
    request = prompt(token)
    assert kv.allocate(request, 5) is not None
    kv.commit(request, 5)
    kv.free(request)
    kv.check_integrity()


def test_a_block_that_is_found_often_outlives_more_recent_ones() -> None:
    kv = make(num_blocks=4)
    for token in (1, 1, 1, 2, 3, 4, 5):
        serve(kv, token)
    assert kv.lookup(prompt(1)) == 4
    assert kv.lookup(prompt(2)) == 0


def test_the_cache_ages_so_that_it_does_not_stay_for_ever() -> None:
    kv = make(num_blocks=4)
    for token in (1, 1, 1, *range(2, 40)):
        serve(kv, token)
    assert kv.lookup(prompt(1)) == 0
