"""Prompts with images: equal tokens are the same text only with the same pictures behind them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.blocks.hash_chain import HashChain, make_digest
from dovetail.request import Request
from dovetail.request.media import MediaItem, MediaSpan, same_tokens
from dovetail.request.sampling_params import SamplingParams
from tests.kv_cache.helpers import compute, manager

PAD = 7  # the placeholder's id


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], tuple[MediaSpan, ...]]:
    """Text of few ids, which may be the placeholder's, with pictures of few kinds between."""
    tokens: list[int] = []
    spans = []
    for _ in range(draw(st.integers(0, 3))):
        tokens += draw(st.lists(st.sampled_from([1, 2, PAD]), max_size=4))
        if draw(st.booleans()):
            kind, rows = draw(st.sampled_from([(b"a", 3), (b"b", 3), (b"c", 1)]))
            digest = kind * 32
            spans.append(MediaSpan(digest=digest, start=len(tokens), stop=len(tokens) + rows))
            tokens += [PAD] * rows
    return [*tokens, 1], tuple(spans)


def seen(prompt: tuple[list[int], tuple[MediaSpan, ...]]) -> list[object]:
    """Return the model's input at each position: a token, or a row of a picture."""
    tokens, spans = prompt
    contents: list[object] = [*tokens]
    for span in spans:
        for place in range(span.start, span.stop):
            contents[place] = (span.digest, place - span.start)
    return contents


def common(one: list[object], other: list[object]) -> int:
    pairs = zip(one, other, strict=False)
    return next(
        (place for place, (mine, theirs) in enumerate(pairs) if mine != theirs),
        min(len(one), len(other)),
    )


def request_of(name: str, prompt: tuple[list[int], tuple[MediaSpan, ...]]) -> Request:
    return Request(name, prompt[0], SamplingParams(), max_tokens=1, media=prompt[1])


@given(prompts(), prompts())
def test_as_many_tokens_are_the_same_as_the_model_sees_alike(one, other) -> None:  # type: ignore[no-untyped-def]
    (tokens, media), (others, other_media) = one, other
    same = same_tokens(np.array(tokens), media, np.array(others), other_media)
    assert same == common(seen(one), seen(other))


@given(prompts(), prompts(), st.integers(1, 4), st.integers(0, 1))
def test_blocks_have_equal_hashes_only_if_the_model_sees_the_same(one, other, size, after) -> None:  # type: ignore[no-untyped-def]
    digest = make_digest("sha256")
    chains = [
        HashChain(request_of(name, prompt), size, digest, after=after)
        for name, prompt in (("one", one), ("other", other))
    ]
    blocks = [max(0, len(prompt[0]) - after) // size for prompt in (one, other)]
    hashes = [chain.extend(count)[:count] for chain, count in zip(chains, blocks, strict=True)]
    alike = sum(mine == theirs for mine, theirs in zip(*hashes, strict=False))
    assert alike == max(0, common(seen(one), seen(other)) - after) // size
    copied = HashChain(request_of("copy", other), size, digest, chains[0].beginning, after)
    assert copied.extend(blocks[1])[: blocks[1]] == hashes[1]


def test_a_hit_ends_before_another_picture() -> None:
    def picture(digest: bytes) -> tuple[MediaSpan, ...]:
        return (MediaSpan(digest=digest * 32, start=4, stop=8),)

    kv = manager(block_size=4)
    tokens = [1, 2, 3, 4, *[PAD] * 4, 5, 6, 7, 8, 9]
    first = request_of("first", (tokens, picture(b"a")))
    compute(kv, first)
    assert kv.lookup(request_of("same", (tokens, picture(b"a")))) == 12
    assert kv.lookup(request_of("other", (tokens, picture(b"b")))) == 4
    assert kv.lookup(request_of("typed", (tokens, ()))) == 4


def test_a_picture_one_token_later_is_another_text() -> None:
    """Both begin with the same tokens, of which some may be the placeholder's id as text."""

    def picture(start: int) -> tuple[MediaSpan, ...]:
        return (MediaSpan(digest=b"a" * 32, start=start, stop=start + 6),)

    kv = manager(block_size=4)
    tokens = [1, *[PAD] * 9, 2, 3]
    compute(kv, request_of("first", (tokens, picture(1))))
    assert kv.lookup(request_of("later", (tokens, picture(2)))) == 0


def test_an_item_of_several_runs_is_one_span() -> None:
    item = MediaItem(kind="image", digest=b"d", runs=((3, 2), (6, 2)), tensors={})
    assert item.rows == 4
    assert item.span == MediaSpan(digest=b"d", start=3, stop=8)
