"""Bounds on JSON texts: lists, objects, keys and nesting are counted as they will be read, before
anything is built."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.base.bounded_json import JsonBounds, JsonTexts, WrongJsonError, excess_of, read_json
from tests.budget import least_cpu_s
from tests.support import examples

ANY = JsonBounds(10**9, 10**6)
# what looks like structure; U+5B22 has the bytes of `["` in UTF-16
TEXTS = st.text(st.sampled_from('[]{}:,"\\/ a\u00e9\u5b22\U0001f600'))
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=30,
)


def parts_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(parts_of, value.values()))
    return 1 + sum(map(parts_of, value)) if isinstance(value, list) else 0


def depth_of(value: Any) -> int:
    inner = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    )
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


@examples(200, 5_000)
@given(VALUES, st.booleans(), st.sampled_from([0, 65_530, 65_535]))
def test_a_text_is_read_just_if_it_keeps_within_the_bounds(
    value: Any, ascii_only: bool, shift: int
) -> None:
    """`shift`: spaces before it, so that it lies across a boundary of pieces."""
    text = (" " * shift + json.dumps(value, ensure_ascii=ascii_only)).encode()
    parts, depth = parts_of(value), depth_of(value)
    assert read_json(text, JsonBounds(parts, depth)) == value
    if parts:
        assert "lists, objects and keys" in str(excess_of(text, JsonBounds(parts - 1, depth)))
        assert "in one another" in str(excess_of(text, JsonBounds(parts, depth - 1)))


@pytest.mark.parametrize("escapes", [1, 2, 3, 65_531, 65_532, 65_533])
def test_escapes_may_lie_across_pieces(escapes: int) -> None:
    text = b'["' + b"\\" * (escapes // 2 * 2) + b'\\"[[[", []]'
    assert read_json(text, JsonBounds(2, 2))[1] == []
    with pytest.raises(WrongJsonError):
        read_json(text, JsonBounds(1, 2))


def test_texts_of_one_request_count_together() -> None:
    texts = JsonTexts(JsonBounds(20_000, 5))
    many = "[" + "[]," * 9_000 + "[]]"
    assert len(texts.read(many)) == len(texts.read(many)) == 9_001
    with pytest.raises(WrongJsonError, match="lists, objects and keys"):
        texts.read(many)


@pytest.mark.parametrize("text", [b"\xff", b"{", b"\xff\xfe[\0]\0", "[" * 200_000, "1.", '"\ud800'])
def test_what_is_no_json_is_refused(text: bytes | str) -> None:
    with pytest.raises(WrongJsonError):
        read_json(text, ANY._replace(depth=100))


@pytest.mark.parametrize("shift", [0, 65_400, 65_530])
@pytest.mark.parametrize(
    "number", ["9" * 200, "-" + "9" * 5_000, "0." + "1" * 300, "1e" + "1" * 250]
)
def test_long_numbers_are_refused_and_digits_in_strings_are_not(number: str, shift: int) -> None:
    """`shift`: spaces before it, so that it lies across a boundary of pieces."""
    spaces = " " * shift
    for text in (number, f'["\\"", {number}]', f'{{"a": {number}}}'):
        assert excess_of((spaces + text).encode(), ANY) == "a number of more than 100 digits"
    assert read_json(f'{spaces}["\\"{number}\\\\", "{number}"]', ANY)[1] == number


@pytest.mark.parametrize(
    "unit",
    [
        *(b"[],", b'"",', b'{"a":', b"\\\\", b'\\"', b"[", b"]", b"a"),
        *(b"9" * 100 + b" ", b"9" * 99 + b" ", b"9" * 99 + b"[", b"9"),
    ],
)
def test_counting_takes_little_time_per_byte(unit: bytes) -> None:
    """The bound is such that the largest body doesn't hold the interpreter for more than 0.5 s."""
    text = b'["' * unit.startswith((b"\\", b"9")) + unit * ((1 << 20) // len(unit))
    bound_s = 0.5 / (16 << 20) * len(text)
    assert least_cpu_s(lambda: excess_of(text, ANY), bound_s) <= bound_s
