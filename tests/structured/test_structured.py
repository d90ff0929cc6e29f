"""`Structured` as a value: exactly one rule, checked on construction, in every spelling."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

import dovetail
from dovetail.api.grammar import GrammarSpec
from dovetail.compat.vllm import SamplingParams as VllmSamplingParams
from dovetail.compat.vllm.sampling_params import GuidedDecodingParams, StructuredOutputsParams
from dovetail.config.limits import Limits
from dovetail.errors import RequestError
from dovetail.front import request_checks
from dovetail.front.grammars import AnswerRule
from dovetail.request.sampling_params import SamplingParams
from dovetail.request.structured import RULES, Structured
from tests.support import examples

SCHEMA = {
    "type": "object",
    "properties": {"b": {"type": "integer"}, "a": {"type": "string"}},
    "required": ["b"],
}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("ab{[", max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def spec_of(structured: Structured) -> GrammarSpec:
    """The spec that a backend compiles."""
    spec = AnswerRule.of(structured).spec
    assert spec is not None
    return spec


class Person(BaseModel):
    name: str
    age: int


@examples(quick=100, full=2000)
@given(st.dictionaries(st.text("abc", min_size=1), JSON, max_size=3))
def test_a_schema_is_the_same_as_a_mapping_as_json_and_frozen(schema: dict[str, Any]) -> None:
    made = Structured(json_schema=schema)
    assert json.loads(spec_of(made).text) == schema
    assert (
        made
        == Structured(json_schema=json.dumps(schema, indent=2))
        == Structured(json_schema=MappingProxyType(schema))
    )


def test_properties_keep_their_order_since_answers_have_it() -> None:
    assert list(json.loads(Structured(json_schema=SCHEMA).text)["properties"]) == ["b", "a"]


def test_a_pydantic_model_stands_for_its_schema() -> None:
    assert json.loads(Structured(json_schema=Person).text) == Person.model_json_schema()


@pytest.mark.parametrize("tokens", [0, -1, 1.5, "9", True, 2**63])
def test_the_tokens_before_the_mark_are_a_positive_integer(tokens: Any) -> None:
    with pytest.raises(
        RequestError, match=r"structured\.after_tokens: it must be an integer of 1 or more"
    ):
        Structured(after="</think>", after_tokens=tokens)


def test_a_bound_without_a_mark_or_with_two_rules_is_refused() -> None:
    with pytest.raises(RequestError, match=r"structured\.after_tokens: it needs `after`"):
        Structured(after_tokens=5)
    with pytest.raises(RequestError, match="exactly one of"):
        Structured(regex="a", choice=["a"], after="x", after_tokens=5)
    with pytest.raises(RequestError, match="exactly one of"):
        Structured(after="x")
    with pytest.raises(RequestError, match="allowed_token_ids and structured contradict"):
        SamplingParams(structured=Structured(after="x", after_tokens=5), allowed_token_ids=[1])


def test_it_can_be_copied_pickled_hashed_and_written_as_a_mapping() -> None:
    params = SamplingParams(structured=Structured(choice=["yes", "no"], after="</think>"))
    for same in (
        copy.deepcopy(params),
        pickle.loads(pickle.dumps(params)),
        SamplingParams(**dataclasses.asdict(params)),
        dataclasses.replace(params),
    ):
        assert same == params
        assert hash(same) == hash(params)
    assert SamplingParams(structured={"choice": ["yes", "no"], "after": "</think>"}) == params
    assert dovetail.Structured is Structured


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ({"json_schema": SCHEMA}, json.dumps(SCHEMA, separators=(",", ":"))),
        ({"json_object": True}, ""),
        ({"regex": "a|b"}, "a|b"),
        ({"grammar": 'start: "a"'}, 'start: "a"'),
        ({"choice": ("é", "b", "é")}, '["é", "b"]'),
        (
            {"structural_tag": {**TAG, "type": "structural_tag"}},
            json.dumps(TAG, separators=(",", ":")),
        ),
    ],
)
def test_every_rule_has_its_text(rule: dict[str, Any], text: str) -> None:
    spec = spec_of(Structured(**rule))
    assert (spec.kind, spec.text) == (next(iter(rule)), text)
    assert spec.kind in RULES


@pytest.mark.parametrize(
    "vllms",
    [
        {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {
            "guided_decoding": GuidedDecodingParams(
                json=SCHEMA, backend="auto", disable_fallback=True
            )
        },
        {"structured": {"json_schema": SCHEMA}, "structured_outputs": None},
    ],
)
def test_vllms_spelling_says_the_same(vllms: dict[str, Any]) -> None:
    rule = Structured(json_schema=SCHEMA)
    assert VllmSamplingParams(**vllms) == VllmSamplingParams(structured=rule)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one of json_schema, .* got none"),
    ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
    ({"json_object": False}, "got none"),
    ({"json_object": 1}, "json_object: it must be true or false"),
    ({"json_schema": "{"}, r"structured\.json_schema: not valid JSON"),
    ({"json_schema": "[]"}, "must be a JSON object"),
    ({"json_schema": "NaN"}, "NaN is no JSON"),
    ({"json_schema": {"a": float("inf")}}, "it isn't JSON"),
    ({"json_schema": {"a": object()}}, "object is no type of JSON"),
    ({"json_schema": '{"a":' * 100_000}, "more than 128 lists and objects in one another"),
    ({"json_schema": {"a": "\ud800"}}, "half a surrogate pair"),
    ({"json_schema": int}, "must be a JSON object"),
    ({"regex": ""}, "non-empty string"),
    ({"regex": 5}, "non-empty string"),
    ({"choice": "ab"}, "list of one string or more"),
    ({"choice": []}, "list of one string or more"),
    ({"choice": ["a", 1]}, "non-empty string, got 1"),
    ({"structural_tag": {**TAG, "x": 1}}, r"structural_tag\.x: there is no such key"),
    ({"structural_tag": {**TAG, "triggers": []}}, r"structural_tag\.triggers: it must be a list"),
    (
        {"structural_tag": {**TAG, "triggers": ["g"]}},
        r"structures\[0\]\.begin: it must begin with one of the triggers",
    ),
    (
        {"structural_tag": {**TAG, "structures": [{"begin": "<f>"}]}},
        r"structures\[0\]: it must be a mapping with begin, schema, end",
    ),
    ({"structural_tag": {**TAG, "at_least_one": 1}}, r"at_least_one: it must be true or false"),
    ({"regex": "a", "after": ""}, r"structured\.after: it must be a non-empty string"),
]


@pytest.mark.parametrize(("rule", "said"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_refused_by_the_fields_name(rule: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said) as refused:
        Structured(**rule)
    assert str(refused.value).startswith("structured")


@pytest.mark.parametrize("wrong", ["a", 1, {"regx": "a"}])
def test_params_refuse_what_is_no_rule(wrong: object) -> None:
    with pytest.raises(RequestError, match="structured"):
        SamplingParams(structured=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other", [{"min_tokens": 1}, {"ignore_eos": True}, {"allowed_token_ids": [1]}]
)
def test_a_parameter_that_contradicts_the_rule_is_refused_with_both_names(
    other: dict[str, Any],
) -> None:
    with pytest.raises(
        RequestError, match=f"{next(iter(other))} and structured contradict each other"
    ):
        SamplingParams(structured={"regex": "a"}, **other)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"structured_outputs": {"jsn": 1}}, "structured_outputs.jsn: there is no such field"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern: it isn't supported",
        ),
        (
            {"guided_decoding": {"regex": "a", "backend": "outlines"}},
            "backend: the engine's config chooses it",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "structured": {"regex": "a"}},
            "structured_outputs and structured say the same",
        ),
    ],
)
def test_an_option_of_vllms_is_honoured_or_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        VllmSamplingParams(**given)


@pytest.mark.parametrize(
    ("rule", "limits", "name"),
    [
        ({"regex": "a" * 11}, Limits(max_grammar_chars=10), "max_grammar_chars"),
        ({"choice": ["aaaaaa", "bbbbbb"]}, Limits(max_grammar_chars=10), "max_grammar_chars"),
        ({"regex": "((((a))))"}, Limits(max_grammar_depth=3), "max_grammar_depth"),
        (
            {"json_schema": {"not": {"not": {"not": {}}}}},
            Limits(max_grammar_depth=3),
            "max_grammar_depth",
        ),
        ({"regex": "a", "after": "aaa"}, Limits(max_stop_chars=2), "max_stop_chars"),
    ],
)
def test_sizes_have_limits_with_names(rule: dict[str, Any], limits: Limits, name: str) -> None:
    params = SamplingParams(structured=rule)
    with pytest.raises(RequestError, match=rf"structured\..*limits\.{name}"):
        request_checks.check_params(params, limits)
    request_checks.check_params(params, Limits())


@pytest.mark.parametrize(
    ("rule", "depth"),
    [
        ({"regex": r"((a)[(](b\())"}, 2),
        ({"json_schema": {"a": {"b": "{{{"}}}, 2),
        ({"choice": ["[["]}, 1),
    ],
)
def test_brackets_in_strings_and_sets_are_not_counted(rule: dict[str, Any], depth: int) -> None:
    assert Structured(**rule).depth() == depth
