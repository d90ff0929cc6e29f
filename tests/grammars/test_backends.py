"""The built-in grammar backend beyond the conformance suite: options, limits and error messages."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, FilePath, SecretStr, create_model

from dovetail.api.grammar import GrammarContext, GrammarSpec, SpecKind
from dovetail.errors import DovetailError, RequestError
from dovetail_grammars import dovetail_components
from dovetail_grammars.llguidance_backend import LLGuidance
from dovetail_grammars.options import WHITESPACE_AT_MOST, GrammarOptions
from tests.grammars.helpers import at, compiled, mask, takes

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}


def test_json_is_compact_unless_asked_otherwise() -> None:
    spaced = '{"name": "x"}'
    assert takes(compiled("json_schema", PERSON), '{"name":"x"}')
    assert not takes(compiled("json_schema", PERSON), spaced)
    assert takes(compiled("json_schema", PERSON, whitespace="flexible"), spaced)


def test_flexible_white_space_ends() -> None:
    grammar = compiled("json_schema", PERSON, whitespace="flexible")
    assert at(grammar, "{" + " " * WHITESPACE_AT_MOST + '"') is not None
    assert at(grammar, "{" + " " * (WHITESPACE_AT_MOST + 1)) is None


def test_tools_in_free_text_have_no_white_space_either() -> None:
    tag = {"structures": [{"begin": "<f>", "schema": PERSON, "end": "</f>"}], "triggers": ["<f"]}
    grammar = compiled("structural_tag", tag)
    assert takes(grammar, 'so <f>{"name":"x"}</f> it is')
    assert at(grammar, "<f>{ ") is None


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("json_schema", {"not": {"type": "string"}}, "not"),
        (
            "json_schema",
            {
                "type": "object",
                "properties": {"a": {"type": "object", "propertyNames": {"minLength": 2}}},
            },
            "propertyNames",
        ),
        ("json_schema", {"if": {"type": "string"}, "then": {"minLength": 2}}, "if"),
        ("json_schema", {"type": "string", "format": "idn-email"}, "idn-email"),
        (
            "json_schema",
            {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}},
            "circular: #/[$]defs/a -> #/[$]defs/a",
        ),
        (
            "json_schema",
            {"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True},
            "x-guidance",
        ),
        ("json_schema", json.loads('{"items":' * 101 + "{}" + "}" * 101), "MAX_NESTING = 100"),
        ("json_schema", '{"minimum": NaN}', "NaN"),
        ("json_schema", {"type": "object", "minProperties": 2}, "minProperties"),
        ("grammar", "start: <|end|>", "special tokens"),
        ("grammar", 'start: a\na[temperature=0.5]: "b"', "temperature"),
        ("structural_tag", {"structures": [], "triggers": ["<f"]}, "structures"),
        (
            "structural_tag",
            {"structures": [{"begin": "<f>", "schema": {}, "end": "", "x": 1}], "triggers": ["<f"]},
            "structures.0",
        ),
    ],
)
def test_refusals_name_the_feature(kind: SpecKind, text: Any, named: str) -> None:
    with pytest.raises(RequestError, match=f"^{kind}: .*{named}") as caught:
        compiled(kind, text)
    assert "\n" not in str(caught.value)


class Library(BaseModel):
    folder: Path
    key: SecretStr
    cover: bytes
    names: dict[str, FilePath]


@pytest.mark.parametrize("form", ["path", "password", "binary", "file-path", "byte", "x-of-ours"])
def test_a_format_that_json_schema_does_not_define_is_ignored(form: str) -> None:
    for schema in (
        {"type": "string", "format": form},
        {"format": form},
        {"type": ["null", "string"], "format": form},
    ):
        assert takes(compiled("json_schema", schema), '"no/such thing"')
    assert takes(
        compiled("json_schema", {"type": "string", "format": form, "maxLength": 2}), '"ab"'
    )
    assert not takes(
        compiled("json_schema", {"type": "string", "format": form, "maxLength": 2}), '"abc"'
    )


def test_a_format_of_strings_says_nothing_of_numbers() -> None:
    assert takes(compiled("json_schema", {"type": "integer", "format": "int64"}), "12")
    assert takes(compiled("json_schema", {"type": "integer", "format": "date"}), "12")


def test_paths_and_secrets_of_pydantic_are_strings() -> None:
    schema = {**Library.model_json_schema(), "additionalProperties": False}
    assert takes(
        compiled("json_schema", schema),
        '{"folder":"/a","key":"b","cover":"c","names":{"d":"e"}}',
    )


@pytest.mark.parametrize(
    ("kind", "keyword"),
    [(set[str], "uniqueItems"), (dict[Literal["a", "b"], int], "propertyNames")],
)
def test_sets_and_named_keys_of_pydantic_are_refused_by_place_and_keyword(
    kind: Any, keyword: str
) -> None:
    model = create_model("Model", field=(kind, ...))
    with pytest.raises(
        RequestError,
        match=f"^json_schema: #/properties/field: {keyword} = .*: the backend llguidance doesn't "
        f"support this keyword$",
    ):
        compiled("json_schema", model.model_json_schema())


@pytest.mark.parametrize(
    "schema", [{"uniqueItems": False}, {"propertyNames": {}}, {"unevaluatedProperties": True}]
)
def test_a_keyword_that_rules_nothing_out_is_no_obstacle(schema: Any) -> None:
    assert takes(
        compiled("json_schema", {"type": "object", "additionalProperties": False, **schema}),
        "{}",
    )


def test_the_name_of_a_tool_is_in_the_refusal_of_its_schema() -> None:
    structure = {
        "begin": '<f>{"name": "weather"}',
        "schema": {"properties": {"id": {"const": 2**70}}},
        "end": "",
    }
    with pytest.raises(RequestError, match=f"weather.*#/properties/id: const = {2**70}: "):
        compiled("structural_tag", {"structures": [structure], "triggers": ["<f"]})


def test_what_is_no_schema_may_stand_where_no_answer_comes() -> None:
    schema = {
        "type": "null",
        "x-meta": {"type": "fancy"},
        "$defs": {"unused": {"type": 5, "uniqueItems": True}},
        "examples": [{"const": 2**70}],
    }
    assert takes(compiled("json_schema", schema), "null")


def test_parts_of_oneof_that_may_overlap_are_refused_in_plain_words() -> None:
    with pytest.raises(RequestError, match=r"oneOf.*try anyOf") as caught:
        compiled(
            "json_schema",
            {"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}},
        )
    assert "#/properties/a" in str(caught.value)


@pytest.mark.parametrize(
    ("lark", "line", "column"), [('start: "a" $', 1, 12), ('start: "a"\n\n$', 3, 1)]
)
def test_a_wrong_grammar_is_refused_with_its_own_line_and_column(
    lark: str, line: int, column: int
) -> None:
    with pytest.raises(RequestError, match=f"line {line}, column {column}: "):
        compiled("grammar", lark)


def test_strings_of_a_length_have_no_control_characters() -> None:
    grammar = compiled("json_schema", {"type": "string", "minLength": 1, "maxLength": 3})
    assert [takes(grammar, text) for text in ('""', '"é"', '"abc"', '"abcd"', '"\t"')] == [
        False,
        True,
        True,
        False,
        False,
    ]


def test_thousands_of_choices() -> None:
    grammar = compiled("choice", [f"number {n}" for n in range(5000)])
    assert takes(grammar, "number 4999")
    assert not takes(grammar, "number 5000")


def test_a_schema_within_a_grammar_is_held_to_the_same_rules() -> None:
    grammar = compiled("grammar", f'start: "=" body\nbody: %json {json.dumps(PERSON)}')
    assert takes(grammar, '={"name":"x"}')
    assert at(grammar, "={ ") is None
    with pytest.raises(RequestError, match=f"^grammar: #/items: const = {2**64}: "):
        compiled(
            "grammar",
            f'start: "%json {{" ("x" | %json {{"items": {{"const": {2**64}}}}})  // %json {{',
        )
    assert takes(
        compiled("grammar", 'start: "%json {" %json {"const": "%json {"}'),
        '%json {"%json {"',
    )


def test_a_vocabulary_that_cant_write_the_answer_is_an_error_of_the_request() -> None:
    letters = GrammarContext([b"a", b"b", None], frozenset([2]), 3)
    backend = LLGuidance(GrammarOptions(), letters)
    with pytest.raises(DovetailError):
        mask(backend.compile(GrammarSpec("regex", "c")).begin())


def test_a_matcher_beyond_its_limits_raises_each_time_and_no_other_does() -> None:
    wide = compiled(
        "grammar",
        "start: "
        + " | ".join(f'"a" x{n}' for n in range(2500))
        + "".join(f'\nx{n}: "b"+ "c"' for n in range(2500)),
    )
    matcher = wide.begin()
    for _ in range(2):
        with pytest.raises(DovetailError, match="more alternatives at one place"):
            matcher.accept(ord("a"))
    assert mask(compiled("regex", "a").begin()) == {ord("a")}


def test_the_extra_installs_what_the_backend_needs() -> None:
    extra = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]["grammar"]
    assert set(extra) == {
        requirement for component in dovetail_components() for requirement in component.requires
    }


def test_threads_are_honoured() -> None:
    context = GrammarContext([b"a", b"b", None], frozenset([2]), 3)
    assert LLGuidance(GrammarOptions(threads=2), context).options.threads == 2
    with pytest.raises(ValueError, match="threads"):
        GrammarOptions(threads=0)
