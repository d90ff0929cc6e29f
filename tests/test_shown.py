"""How an error shows a wrong value: by its repr, of which it reads no more than it shows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import shown
from tests.budget import least_cpu_s
from tests.support import examples

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=30)
    | st.binary(max_size=30)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(max_size=9), inner)
        | st.lists(inner).map(tuple)
        | st.frozensets(LEAVES)
    ),
    max_leaves=20,
)


@examples(quick=100, full=5_000)
@given(VALUES)
def test_a_value_is_shown_by_the_beginning_of_its_repr(value: Any) -> None:
    text = repr(value)
    assert shown(value) == (text if len(text) <= 80 else f"{text[:77]}...")


@pytest.mark.parametrize(
    "value",
    [
        "a" * 10_000_000,
        b"a" * 10_000_000,
        [1.5] * 1_000_000,
        {"a": "a" * 10_000_000},
        {"a" * 100: "a" * 10_000_000},
        dict.fromkeys(range(1_000_000)),
        ["a" * 50, [("a" * 10_000_000,)]],
    ],
    ids=range(7),
)
def test_a_large_value_is_shown_at_once(value: Any) -> None:
    assert len(shown(value)) == 80
    assert least_cpu_s(lambda: shown(value), 0.001) <= 0.001


def test_a_deep_value_is_shown() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "[" * 77 + "..."
