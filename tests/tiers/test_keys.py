"""Names, contents and headers of frames."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from dovetail.api.kv_cache import CacheGroup, KVLayout
from dovetail.api.kv_tier import FrameKey
from dovetail.engine.tiers.keys import (
    HEADER_BYTES,
    FrameLayout,
    header,
    namespaces,
    read_header,
)
from dovetail.request import Request
from dovetail.request.media import MediaSpan
from dovetail.request.sampling_params import SamplingParams

PROMPT = tuple(range(100, 140))
LAYOUTS = [
    KVLayout((CacheGroup((0,), 4),), 64, "float32"),
    KVLayout((CacheGroup((0,), 4), CacheGroup((1,), 4, window=6)), 64, "float32"),
    KVLayout(
        (CacheGroup((0,), 4), CacheGroup((1,), 8, 21), CacheGroup((2,), 2, 37, 3)), 64, "bf16"
    ),
    KVLayout((CacheGroup((0,), 16, window=128),), 64, "float32"),
    KVLayout((CacheGroup((0,), 8), CacheGroup((1,), 24, None, 5, True)), 64, "float32"),
]


def request(
    prompt: tuple[int, ...] = PROMPT, keys: tuple[str, ...] = (), media: tuple[MediaSpan, ...] = ()
) -> Request:
    return Request("r", prompt, SamplingParams(), max_tokens=1, cache_keys=keys, media=media)


def frames(*, reads_next: bool = False) -> FrameLayout:
    return FrameLayout(KVLayout((CacheGroup((0,), 8),), 64, "float32", reads_next), 64)


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.engine.tiers.keys.FRAME_TOKENS", 16)


def test_names_differ_if_anything_before_the_end_differs() -> None:
    image = MediaSpan(digest=b"a" * 16, start=2, stop=6)
    texts = [
        request(),
        request((101, *PROMPT[1:])),
        request((*PROMPT[:15], 7, *PROMPT[16:])),
        request(keys=("salt",)),
        request(keys=("sa", "lt")),
        request(keys=("", "salt")),
        request(keys=("\ud800",)),
        request(media=(image,)),
        request(media=(MediaSpan(digest=b"b" * 16, start=2, stop=6),)),
        request(media=(MediaSpan(digest=b"a" * 16, start=1, stop=6),)),
    ]
    names = [frames().chain(text).extend(2) for text in texts]
    for one, other in combinations(names, 2):
        assert not {*one} & {*other}


def test_names_are_equal_whatever_follows_the_frame() -> None:
    same = frames().chain(request()).extend(1)[0]
    assert frames().chain(request((*PROMPT[:16], 9, 9))).extend(1)[0] == same
    later = MediaSpan(digest=b"a" * 16, start=16, stop=18)
    assert frames().chain(request(media=(later,))).extend(1)[0] == same


def test_names_cover_the_next_token_where_k_and_v_do() -> None:
    layout = frames(reads_next=True)
    assert layout.named(16) == 0
    assert layout.named(17) == 1
    one, other = (layout.chain(request((*PROMPT[:16], after, 5))).extend(1)[0] for after in (3, 4))
    assert one != other
    again = layout.chain(request((*PROMPT[:16], 3, 6))).extend(1)[0]
    assert one == again


def test_names_are_those_of_a_chain_extended_at_once() -> None:
    slow = frames().chain(request())
    slow.extend(1)
    assert [*slow.extend(2)] == [*frames().chain(request()).extend(2)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_needed_frames_hold_each_block_that_later_tokens_see(layout: KVLayout) -> None:
    divided = FrameLayout(layout, layout.page_bytes)
    assert divided.tokens % layout.hit_tokens == 0
    for group in divided.groups:
        sizes = {len(group.blocks(index)) for index in range(9)}
        assert len(sizes) == 1
        if group.spec.recurrent:
            assert [*group.needed(4 * group.tokens)] == [3]
            continue
        assert group.bytes == sizes.pop() * group.spec.pages_per_block * layout.page_bytes
        for index in range(9):
            end = (index + 1) * divided.tokens
            held = {block for frame in group.needed(end) for block in group.blocks(frame)}
            first = group.spec.first_visible_block(end)
            assert held >= {*range(first, end // group.spec.block_tokens)}


def test_a_header_with_any_bit_flipped_is_refused() -> None:
    key = FrameKey(b"n" * 32, b"c" * 32)
    frame = bytearray(HEADER_BYTES + 24)
    frame[:HEADER_BYTES] = header(key, 24, 7, 9)
    assert read_header(memoryview(frame), key) == (7, 9)
    for bit in range(8 * HEADER_BYTES):
        frame[bit // 8] ^= 1 << bit % 8
        assert read_header(memoryview(frame), key) is None
        frame[bit // 8] ^= 1 << bit % 8


def test_a_header_belongs_to_one_key_and_one_length() -> None:
    key = FrameKey(b"n" * 32, b"c" * 32)
    frame = memoryview(header(key, 24, 7, 9) + bytes(24))
    assert read_header(frame, key) is not None
    assert read_header(frame, FrameKey(b"m" * 32, b"c" * 32)) is None
    assert read_header(frame, FrameKey(b"n" * 32, b"d" * 32)) is None
    assert read_header(frame[:-8], key) is None


def test_namespaces_differ_with_all_that_decides_what_bytes_mean() -> None:
    one, other = LAYOUTS[:2]
    chosen = [
        *namespaces(b"model", one, "backend"),
        *namespaces(b"model", other, "backend"),
        *namespaces(b"another", one, "backend"),
        *namespaces(b"model", one, "another"),
    ]
    assert len({*chosen}) == len(chosen)
    assert namespaces(b"model", one, "backend") == namespaces(b"model", one, "backend")


def test_output_tokens_count_like_those_of_a_prompt() -> None:
    class Answered(Request):
        @property
        def output_token_ids(self) -> tuple[int, ...]:
            return PROMPT[20:]

    chance = random.Random(3)
    layout = frames()
    for _ in range(4):
        cut = chance.randrange(1, 33)
        mixed = Answered("r", PROMPT[:20], SamplingParams(), max_tokens=50)
        assert mixed.num_tokens == len(PROMPT)
        chain = layout.chain(mixed)
        chain.extend(cut // 16)
        assert [*chain.extend(2)] == [*layout.chain(request()).extend(2)]
