"""Output that a tool-call rule allows is parsed as calls by the parser of that format."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.parser import ToolCallArguments, ToolCallStart
from dovetail.request.structured import Structured
from dovetail_server.parsers.registry import call_rule
from tests.server.answers import KNOWN, parser_named
from tests.support import examples

FORMATS = [
    ("hermes", ""),
    ("llama3_json", ""),
    ("mistral", ""),
    ("mistral", "[ARGS]"),
    ("deepseek_v3", ""),
    ("deepseek_v3", "```json"),
    ("kimi_k2", ""),
    ("nemotron_h", ""),
]
NAMES = st.text("abcdefgh_-09", min_size=1, max_size=20)
VALUES = st.dictionaries(
    st.text(max_size=5),
    st.none() | st.integers() | st.text(max_size=9) | st.lists(st.integers(), max_size=2),
    max_size=3,
)


@pytest.mark.parametrize(("name", "template"), FORMATS)
@examples(quick=100, full=2000)
@given(
    calls=st.lists(st.tuples(NAMES, VALUES), min_size=1, max_size=3),
    spaced=st.booleans(),
    one_line=st.booleans(),
    data=st.data(),
)
def test_the_parser_reads_what_the_rule_allows(
    name: str,
    template: str,
    calls: list[tuple[str, Any]],
    spaced: bool,
    one_line: bool,
    data: st.DataObject,
) -> None:
    tools = [
        (function, {"type": "object"})
        for function in dict.fromkeys(function for function, _ in calls)
    ]
    tag = call_rule(
        KNOWN.named("calls", name), template, tools, required=True, single=False, one_line=one_line
    )
    written = calls[:1] if tag["stop_after_first"] else calls
    markup = {
        function: structure
        for (function, _), structure in zip(tools, tag["structures"], strict=True)
    }
    arguments = [json.dumps(value, indent=1 if spaced else None) for _, value in written]
    text = tag["separator"].join(
        markup[call]["begin"] + value + markup[call]["end"]
        for (call, _), value in zip(written, arguments, strict=True)
    )
    assert not one_line or spaced or "\n" not in text
    parser = parser_named(
        name, tools=[{"type": "function", "function": {"name": function}} for function, _ in tools]
    )
    cut = data.draw(st.integers(0, len(text)))
    events = [*parser.feed(text[:cut]), *parser.feed(text[cut:]), *parser.finish()]
    assert [event.name for event in events if isinstance(event, ToolCallStart)] == [
        call for call, _ in written
    ]
    for index, value in enumerate(arguments):
        assert (
            "".join(
                event.text
                for event in events
                if isinstance(event, ToolCallArguments) and event.index == index
            )
            == value
        )
    assert all(isinstance(event, ToolCallStart | ToolCallArguments) for event in events), (
        "and nothing besides"
    )


@pytest.mark.parametrize(("name", "template"), FORMATS)
def test_rules_of_calls_are_structural_tags(name: str, template: str) -> None:
    tag = call_rule(
        KNOWN.named("calls", name),
        template,
        [("f", {"type": "object"})],
        required=True,
        single=True,
    )
    assert Structured(structural_tag=tag).kind == "structural_tag"
    assert (tag["at_least_one"], tag["stop_after_first"]) == (True, True)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(
    ("name", "template"), [form for form in FORMATS if form[0] != "llama3_json"]
)
def test_where_no_call_is_demanded_text_is_free(name: str, template: str, single: bool) -> None:
    tag = call_rule(
        KNOWN.named("calls", name),
        template,
        [("f", {"type": "object"})],
        required=False,
        single=single,
    )
    assert "separator" not in tag
    assert not tag["at_least_one"]


@pytest.mark.parametrize(("name", "required"), [("llama3_json", False), ("glm45", True)])
def test_a_format_that_cannot_be_held_to_a_schema_is_refused(name: str, required: bool) -> None:
    with pytest.raises(ValueError, match=name):
        call_rule(KNOWN.named("calls", name), "", [("f", {})], required=required, single=True)
