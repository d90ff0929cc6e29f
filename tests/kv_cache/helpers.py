"""Requests and managers for the tests of KV-cache managers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from dovetail.api.kv_cache import CacheGroup, KVContext, KVLayout
from dovetail.api.prefix_cache import PrefixCache, PrefixOptions
from dovetail.engine.live_request import LiveRequest
from dovetail.request.sampling_params import SamplingParams

_ids = count()


def manager(
    num_pages: int = 8, block_size: int = 4, *, reuse: bool = True, window: int | None = None
) -> PrefixCache:
    return manager_of(CacheGroup((0,), block_size, window), num_pages=num_pages, reuse=reuse)


def manager_of(*groups: CacheGroup, num_pages: int, reuse: bool = True) -> PrefixCache:
    return PrefixCache(
        PrefixOptions(reuse=reuse), KVContext(KVLayout(groups, 1024, "float32"), num_pages)
    )


def request(
    tokens: Sequence[int],
    *,
    id: str | None = None,
    keys: tuple[str, ...] = (),
    prompt_logprobs: int | None = None,
) -> LiveRequest:
    params = SamplingParams(prompt_logprobs=prompt_logprobs)
    return LiveRequest(id or f"r{next(_ids)}", tokens, params, max_tokens=1000, cache_keys=keys)


def generate(request: LiveRequest, tokens: Sequence[int]) -> None:
    """Append ids as the engine does when they arrive."""
    request.output.extend(tokens)


def compute(
    kv: PrefixCache, request: LiveRequest, num_tokens: int | None = None
) -> tuple[int, ...]:
    """Allocate and commit all (or `num_tokens`) of its known tokens; returns the pages given in the
    first group."""
    tokens = request.num_tokens if num_tokens is None else num_tokens
    allocation = kv.allocate(request, tokens)
    assert allocation is not None
    kv.commit(request, tokens)
    return allocation.pages[0]
