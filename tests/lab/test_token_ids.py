"""Ids for texts of which only lengths and shared parts are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.kv_cache import CacheGroup, KVContext, KVLayout
from dovetail.api.prefix_cache import PrefixCache, PrefixOptions
from dovetail.request import Request
from dovetail.request.sampling_params import SamplingParams
from dovetail_lab.token_ids import STOP_ID, output_ids, prompt_ids
from dovetail_lab.traces import Span, TraceRequest
from tests.support import examples

VOCABULARY = 1000


def text_of(request: TraceRequest) -> list[int]:
    return [*prompt_ids(request, VOCABULARY).tolist(), *output_ids(request, VOCABULARY).tolist()]


def test_each_request_has_a_text_of_its_own_and_the_same_in_every_run() -> None:
    a, b = (TraceRequest(id, 0.0, 6, 3) for id in "ab")
    assert text_of(a) == [376, 967, 348, 628, 916, 74, 207, 236, 356]
    assert text_of(a) != text_of(b)
    assert (len(prompt_ids(a, VOCABULARY)), len(output_ids(a, VOCABULARY))) == (6, 3)


def test_ids_fill_the_vocabulary_but_for_the_one_that_stops() -> None:
    ids = prompt_ids(TraceRequest("a", 0.0, 5000, 1), 50)
    assert set(ids.tolist()) == set(range(50)) - {STOP_ID}
    assert ids.dtype == np.int32
    assert set(prompt_ids(TraceRequest("a", 0.0, 9, 1), 2).tolist()) == {1}


@examples(quick=100, full=2000)
@given(
    spans=st.lists(
        st.builds(Span, st.integers(0, 3), st.integers(0, 5), st.integers(0, 9)), max_size=4
    ),
    prompt=st.integers(1, 20),
    output=st.integers(1, 9),
)
def test_a_text_is_its_spans_one_after_the_other_and_then_its_own(
    spans: list[Span], prompt: int, output: int
) -> None:
    request = TraceRequest("a", 0.0, prompt, output, spans=tuple(spans))
    streams = {
        stream: text_of(TraceRequest("x", 0.0, 20, 1, spans=(Span(stream, 0, 20),)))[:20]
        for stream in range(4)
    }
    shared = [
        id for span in spans for id in streams[span.stream][span.start : span.start + span.tokens]
    ]
    own = text_of(TraceRequest("a", 0.0, 40, 1))
    assert text_of(request) == [*shared, *own][: prompt + output]


@pytest.mark.parametrize("block_size", [1, 16, 512])
def test_the_prefix_cache_finds_what_requests_share(block_size: int) -> None:
    kv = PrefixCache(
        PrefixOptions(),
        KVContext(KVLayout((CacheGroup((0,), block_size),), 1, "none"), 4096 // block_size),
    )
    first = TraceRequest("a", 0.0, 1100, 1, spans=(Span(7, 0, 512), Span(8, 0, 512)))
    second = TraceRequest("b", 0.0, 1100, 1, spans=(Span(7, 0, 512), Span(8, 0, 512)))
    requests = [
        Request(r.id, prompt_ids(r, 32_000).tolist(), SamplingParams(), max_tokens=1)
        for r in (first, second)
    ]
    kv.allocate(requests[0], 1100)
    kv.commit(requests[0], 1100)
    assert kv.lookup(requests[1]) == 1024
