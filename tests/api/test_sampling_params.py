"""`SamplingParams` as a value: frozen, hashable, copied, and forgiving of what other engines call
things."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import math
import pickle
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.base.checks import is_larger
from dovetail.errors import RequestError
from dovetail.request.frozen import MAX_DEPTH, FrozenDict, frozen
from dovetail.request.sampling_params import NAMES_ELSEWHERE, OutputKind, SamplingParams
from tests.support import examples

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.sets(st.integers(0, 3), max_size=2)
    ),
    max_leaves=8,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(1, 3),
        "stop": st.lists(st.text("ab", min_size=1, max_size=2), max_size=2),
        "logit_bias": st.dictionaries(st.integers(0, 3), st.integers(-2, 2), max_size=2),
        "bad_words": st.sets(
            st.sampled_from(["a", "b"]), max_size=1
        ),  # of two the order may be another in a copy
        "output_kind": st.sampled_from(["delta", OutputKind.DELTA, "final"]),
        "extra_args": st.dictionaries(st.text(max_size=2), PLAIN, max_size=2),
    },
)

CHANGES: dict[str, Callable[[Any], object]] = {
    "set": lambda mapping: mapping.__setitem__(1, 200.0),
    "delete": lambda mapping: mapping.__delitem__(1),
    "update": lambda mapping: mapping.update({1: 200.0}),
    "setdefault": lambda mapping: mapping.setdefault(2, 1.0),
    "pop": lambda mapping: mapping.pop(1),
    "popitem": lambda mapping: mapping.popitem(),
    "clear": lambda mapping: mapping.clear(),
    "merge": lambda mapping: mapping.__ior__({1: 200.0}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_checked_mapping_refuses_each_way_to_change_it(change: str) -> None:
    params = SamplingParams(logit_bias={1: 1.0}, extra_args={"deep": [{1: 1.0}]})
    for mapping in (params.logit_bias, params.extra_args, params.extra_args["deep"][0]):
        with pytest.raises(TypeError, match="can't be changed any more"):
            CHANGES[change](mapping)
    assert params == SamplingParams(logit_bias={1: 1.0}, extra_args={"deep": [{1: 1.0}]})


def test_dict_has_no_other_way_to_be_changed() -> None:
    changing = {
        name
        for name in dir(dict)
        if name not in dir(Mapping) and getattr(FrozenDict, name) is not FrozenDict.clear
    }
    assert changing <= {"__or__", "__ror__", "copy", "fromkeys", *dir(object)}, (
        "which make new ones"
    )


@examples(quick=100, full=5000)
@given(FIELDS)
@pytest.mark.slow("copies every kind of value")
def test_nothing_that_the_caller_keeps_can_change_them(fields: dict[str, Any]) -> None:
    given_ones = copy.deepcopy(fields)
    params = SamplingParams(**fields)
    for value in fields.values():
        for container in (value, *(value.values() if isinstance(value, dict) else ())):
            if hasattr(container, "clear"):
                container.clear()
    assert params == SamplingParams(**given_ones)


@examples(quick=100, full=5000)
@given(FIELDS, FIELDS)
def test_equal_ones_have_equal_hashes_and_copies_are_equal(
    fields: dict[str, Any], others: dict[str, Any]
) -> None:
    params, other = SamplingParams(**fields), SamplingParams(**others)
    copies = [
        copy.copy(params),
        copy.deepcopy(params),
        dataclasses.replace(params),
        pickle.loads(pickle.dumps(params)),
    ]
    copies.append(SamplingParams(**dataclasses.asdict(params)))
    for same in copies:
        assert same == params
        assert same is not params
        assert hash(same) == hash(params)
    assert params != other or hash(params) == hash(other)


def test_params_can_be_keys_and_their_mappings_json() -> None:
    assert {SamplingParams(): 1}[SamplingParams()] == 1
    params = SamplingParams(logit_bias={5: 1}, extra_args={"a": [1, {"b": None}]})
    assert json.dumps(params.logit_bias) == '{"5": 1.0}'
    assert json.dumps(params.extra_args) == '{"a": [1, {"b": null}]}'


def test_containers_of_any_kind_are_frozen_and_numbers_are_plain() -> None:
    assert frozen([bytearray(b"a"), {1}, MappingProxyType({"a": [None, True]})]) == (
        b"a",
        frozenset({1}),
        FrozenDict({"a": (None, True)}),
    )
    values = [
        np.float64(0.5),
        np.float32(0.5),
        np.int8(3),
        "x",
        10**30,
        -math.inf,
    ]
    assert [(type(value), value) for value in frozen(values)] == [
        (float, 0.5),
        (float, 0.5),
        (int, 3),
        (str, "x"),
        (int, 10**30),
        (float, -math.inf),
    ]


def test_what_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(
        RequestError, match=f"extra_args: more than {MAX_DEPTH} containers within each other"
    ):
        SamplingParams(extra_args={"a": endless})


@pytest.mark.parametrize(
    ("value", "size"),
    [("abc", 3), ([1, 2], 2), ({"ab": [1]}, 4), (5, 0), (2**640, 10), ([[], []], 2), (range(7), 7)],
)
def test_a_value_is_as_large_as_its_items_and_characters(value: Any, size: int) -> None:
    assert not is_larger(value, size)
    assert is_larger(value, size - 1)


def test_a_value_is_looked_through_no_further_than_asked() -> None:
    endless: list[Any] = []
    endless += [endless, endless]
    assert is_larger(endless, 1000)
    assert is_larger(range(10**12), 1000)


# ---- names


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tempature", "did you mean temperature?"),
        ("stop_token_id", "did you mean stop_token_ids?"),
        ("beams", "valid are n, temperature, top_k"),
        ("eagle", 'not there yet; "Models that draft" is on the roadmap'),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, said: str) -> None:
    with pytest.raises(
        RequestError, match=f"{name}: unknown sampling parameter.*{said}".replace("?", r"\?")
    ):
        SamplingParams.of({name: 1})


def test_a_name_of_any_length_is_answered_in_a_line() -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams.of({"x" * 10**6: 1})
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("name", NAMES_ELSEWHERE)
def test_a_name_of_another_engine_is_answered_with_ours(name: str) -> None:
    assert NAMES_ELSEWHERE[name] in SamplingParams.__dataclass_fields__
    assert name not in SamplingParams.__dataclass_fields__
    with pytest.raises(RequestError, match=f"^{name}: use the name {NAMES_ELSEWHERE[name]}$"):
        SamplingParams.of({name: 1})


def test_other_mistakes_in_a_call_are_python_s() -> None:
    with pytest.raises(TypeError, match="positional arguments"):
        SamplingParams(*range(99))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="multiple values"):
        SamplingParams(1, n=1)  # type: ignore[misc]


def test_they_are_a_frozen_dataclass_like_any_other() -> None:
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.max_tokens = 4  # type: ignore[misc]
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        SamplingParams(structured_outputs={})  # type: ignore[call-arg]


def test_the_signature_lists_the_parameters() -> None:
    assert list(inspect.signature(SamplingParams).parameters) == list(
        SamplingParams.__dataclass_fields__
    )


@pytest.mark.parametrize("kind", list(OutputKind))
def test_an_output_kind_may_be_its_value(kind: OutputKind) -> None:
    assert SamplingParams(output_kind=kind.value).output_kind is kind
