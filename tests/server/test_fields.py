"""The page on fields: each nested field that it names takes the values that it says, refuses others
by name, and no other field is there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from tests.docs.pages import DOCS

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
TEMPLATE = (
    "{{ tools | tojson }}{% for message in messages %}{{ message.role }}: {{ "
    "message.content }}\n{% endfor %}assistant:"
)
MINIMAL: Mapping[str, Mapping[str, Any]] = {
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
}
# accepted values, refused ones
LIMITED: Mapping[str, Mapping[str, tuple[list[Any], list[Any]]]] = {
    "/v1/responses": {
        "include": (
            [["message.output_text.logprobs"], ["reasoning.encrypted_content"]],
            [["file_search_call.results"]],
        ),
        "reasoning.effort": (["minimal", "low", "max", None], ["huge", 3]),
        "reasoning.summary": (["auto", "concise", "detailed"], ["long"]),
        "reasoning.generate_summary": (["auto", "concise", "detailed"], ["long"]),
        "text.verbosity": (["low", "medium", "high"], ["silent"]),
        "tools[].allowed_callers": ([["direct"]], [["programmatic"]]),
        "tools[].async": ([False], [True]),
        "tools[].output_schema": ([None], [SCHEMA]),
    },
    "/v1/messages": {
        "output_config.effort": (["low", "xhigh", None], ["huge"]),
        "thinking.type": (["enabled", "disabled", "adaptive"], ["sometimes"]),
        "thinking.budget_tokens": ([1, 31_999], [0, -1, "many", 1.5]),
        "thinking.display": (["summarized", "omitted"], ["blinking"]),
        "context_management.edits": (
            [[], [{"type": "clear_thinking_20251015"}, {"type": "clear_tool_uses_20250919"}]],
            [[{"type": "compact_20260112"}]],
        ),
        "tools[].allowed_callers": ([["direct"]], [["code_execution_20250825"]]),
        "tools[].input_examples": ([None], [[{"a": "x"}]]),
    },
}
CASES = [(path, field) for path, fields in LIMITED.items() for field in fields]


def body_with(path: str, field: str, value: Any) -> dict[str, Any]:
    """Return the smallest body in which a field has a value."""
    parent, _, name = field.rpartition(".")
    body = dict(MINIMAL[path])
    if parent == "tools[]":
        tool = (
            {"name": "f", "parameters": SCHEMA, "type": "function"}
            if path == "/v1/responses"
            else {"name": "f", "input_schema": SCHEMA}
        )
        return {**body, "tools": [{**tool, name: value}], "chat_template": TEMPLATE}
    if parent == "thinking" and name != "type":
        return {**body, "thinking": {"type": "enabled", name: value}}
    return {**body, parent: {name: value}} if parent else {**body, name: value}


@pytest.mark.parametrize(("path", "field"), CASES)
def test_a_field_takes_the_values_that_the_page_names_and_refuses_others(
    server_url: str, path: str, field: str
) -> None:
    accepted, refused = LIMITED[path][field]
    for value in accepted:
        answer = httpx.post(f"{server_url}{path}", json=body_with(path, field, value))
        assert answer.status_code == 200, answer.text
    for value in refused:
        answer = httpx.post(f"{server_url}{path}", json=body_with(path, field, value))
        assert answer.status_code == 400
        assert (
            field.removesuffix(".type").removesuffix(".edits").replace("[]", "[0]")
            in answer.json()["error"]["message"]
        )


def test_the_page_names_these_fields_and_no_others() -> None:
    _, _, within = (
        (DOCS / "serving/fields.md").read_text(encoding="utf-8").partition("## Within fields")
    )
    table = re.findall(r"^\|[^|]*\| (`[^|]+) \|", within, re.MULTILINE)
    named = [name for cell in table for name in re.findall(r"`([^`]+)`", cell)]
    assert sorted(named) == sorted(field for _, field in CASES)
