"""JSON that is encoded in parts is that of the whole value."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail_server.json_parts import PART_BYTES, Fields, Items, Numbers, parts_of
from tests.support import examples

PLAIN = st.recursive(
    st.none() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
)


def marked(value: Any) -> Any:
    """The same value, encoded one by one."""
    if isinstance(value, dict):
        return Fields({key: marked(one) for key, one in value.items()})
    return Items(map(marked, value)) if isinstance(value, list) else value


@given(PLAIN)
@examples(100, 1000)
def test_values_are_encoded_one_by_one_as_they_are_together(value: Any) -> None:
    assert b"".join(parts_of(marked(value))) == orjson.dumps(value)


@pytest.mark.parametrize(
    "shape", [(0,), (1,), (3072,), (3073,), (10_000,), (0, 4), (3, 4), (2, 5000), (5000, 2)]
)
def test_arrays_are_encoded_as_lists_or_as_base64_of_their_bytes(shape: tuple[int, ...]) -> None:
    data = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    assert b"".join(parts_of(Numbers(data))) == orjson.dumps(
        data, option=orjson.OPT_SERIALIZE_NUMPY
    )
    assert (
        json.loads(b"".join(parts_of(Numbers(data, as_base64=True))))
        == base64.b64encode(data.tobytes()).decode()
    )


def test_parts_are_small_and_few() -> None:
    data = np.full((1000, 700), -1.17549435e-38, np.float32)
    for as_base64 in (False, True):
        sizes = [
            len(part) for part in parts_of(Fields({"data": Items([Numbers(data, as_base64)])}))
        ]
        assert max(sizes) < 2 * PART_BYTES
        assert min(sizes[:-1]) >= PART_BYTES


def test_a_number_takes_no_more_bytes_than_the_bound_of_answers_says() -> None:
    from dovetail_server.routes.pooling import NUMBER_BYTES

    hard = np.array(
        [-1.17549435e-38, -3.4028235e38, -1.1754942e-38, -1e-45, -0.00012345679], np.float32
    )
    for one in hard:
        assert len(b"".join(parts_of(Numbers(np.array([one]))))) - 1 <= NUMBER_BYTES
