"""The prefix cache of a replayed trace, against an oracle that knows nothing of blocks and hashes
of tokens: a list of hash ids, oldest use first."""

from __future__ import annotations

import random

import pytest

from dovetail.api.kv_cache import CacheGroup, KVContext, KVLayout
from dovetail.api.prefix_cache import PrefixCache, PrefixOptions
from dovetail.engine.live_request import LiveRequest
from dovetail.request.sampling_params import SamplingParams
from dovetail_lab.token_ids import output_ids, prompt_ids
from dovetail_lab.traces import Span, TraceRequest
from dovetail_lab.traces.request import stream_of

BLOCK = 8
OUTPUT = 11  # tokens: an answer fills a block of its own, and more


def chats(count: int) -> list[tuple[int, ...]]:
    """Prompts as lists of hash ids, as in Mooncake's trace: each continues an earlier one, possibly
    truncated, or is new."""
    rng = random.Random(7)
    made: list[tuple[int, ...]] = [(0, 1)]
    for fresh in range(2, 2 * count, 2):
        begin = rng.choice(made)[: rng.randint(0, 6)]
        made.append((*begin, fresh, fresh + 1))
    return made


def as_request(index: int, hash_ids: tuple[int, ...]) -> TraceRequest:
    spans = tuple(Span(stream_of("block", one), 0, BLOCK) for one in hash_ids)
    return TraceRequest(str(index), float(index), BLOCK * len(hash_ids), OUTPUT, spans=spans)


def hits_of_the_manager(prompts: list[tuple[int, ...]], num_blocks: int) -> list[int]:
    manager = PrefixCache(
        PrefixOptions(reuse=True),
        KVContext(KVLayout((CacheGroup((0,), BLOCK),), 1, "none"), num_blocks),
    )
    hits = []
    for index, hash_ids in enumerate(prompts):
        one = as_request(index, hash_ids)
        request = LiveRequest(
            one.id, prompt_ids(one, 32_000).tolist(), SamplingParams(), max_tokens=OUTPUT
        )
        hits.append(manager.lookup(request) // BLOCK)
        assert manager.allocate(request, one.prompt_tokens + OUTPUT - 1) is not None
        request.output.extend(output_ids(one, 32_000).tolist())
        manager.commit(request, one.prompt_tokens + OUTPUT - 1)
        manager.free(request)
    return hits


def hits_of_the_oracle(prompts: list[tuple[int, ...]], num_blocks: int) -> list[int]:
    """Least recently used goes first, of one request its end first. The last prompt block is never
    found: a token must be left to compute."""
    kept: list[object] = []  # oldest first
    hits: list[int] = []
    for index, hash_ids in enumerate(prompts):
        found = 0
        while found < len(hash_ids) - 1 and hash_ids[found] in kept:
            found += 1
        hits.append(found)
        chain: list[object] = [*hash_ids, ("answer", index, 0)]
        kept = [one for one in kept if one not in hash_ids[:found]]
        unfilled = 1  # the block that the answer ends in
        while len(kept) + len(chain) + unfilled > num_blocks:
            kept.pop(0)
        kept = [one for one in kept if one not in chain] + list(reversed(chain))
    return hits


@pytest.mark.parametrize("num_blocks", [12, 20, 40, 10_000])
def test_hits_are_those_of_a_list_of_hash_ids(num_blocks: int) -> None:
    prompts = chats(300)
    hits = hits_of_the_manager(prompts, num_blocks)
    assert hits == hits_of_the_oracle(prompts, num_blocks)
    assert sum(hits) > 20
