"""instructor: each of its modes for OpenAI's and Anthropic's APIs.

Where a mode leaves the form of the answer to the model, `extra_body` demands it: the model follows
no instructions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import anthropic
import instructor
import openai
from instructor import Mode
from pydantic import BaseModel, ConfigDict
from run import ASK, MODEL


class Visit(BaseModel):
    """A visit."""

    model_config = ConfigDict(extra="forbid")
    who: Literal["Romeo", "Juliet"]
    late: bool


_SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "visit", "schema": Visit.model_json_schema()},
}
_RULE = {"extra_body": {"response_format": _SCHEMA}}
_BLOCK = {
    "extra_body": {
        "structured_outputs": {
            "regex": r'```json\n\{"who": "(Romeo|Juliet)", "late": (true|false)\}\n```'
        }
    }
}
_ONE = {"type": "any", "disable_parallel_tool_use": True}
_FORM = {"output_config": {"format": {"type": "json_schema", "schema": Visit.model_json_schema()}}}


def _openai(url: str, mode: Mode, **arguments: Any) -> None:
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode
    )
    made = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        **{
            "response_model": Visit,
            "max_tokens": 100,
            "temperature": 0,
            "max_retries": 0,
            **arguments,
        },
    )
    assert isinstance(made if isinstance(made, Visit) else next(iter(made)), Visit)


def _anthropic(url: str, mode: Mode, **arguments: Any) -> None:
    client = instructor.from_anthropic(
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0), mode=mode
    )
    made = client.messages.create(
        model=MODEL,
        messages=ASK,
        **{"response_model": Visit, "max_tokens": 100, "max_retries": 0, **arguments},
    )
    assert isinstance(made if isinstance(made, Visit) else next(iter(made)), Visit)


def tools(url: str) -> None:
    _openai(url, Mode.TOOLS)


def tools_strict(url: str) -> None:
    _openai(url, Mode.TOOLS_STRICT)


def functions(url: str) -> None:
    _openai(url, Mode.FUNCTIONS)


def parallel_tools(url: str) -> None:
    _openai(
        url,
        Mode.PARALLEL_TOOLS,
        response_model=Iterable[Visit],
        extra_body={"tool_choice": "required", "parallel_tool_calls": False},
    )


def json_schema(url: str) -> None:
    _openai(url, Mode.JSON_SCHEMA)


def json(url: str) -> None:
    _openai(url, Mode.JSON, **_RULE)


def json_o1(url: str) -> None:
    _openai(url, Mode.JSON_O1, **_RULE)


def md_json(url: str) -> None:
    _openai(url, Mode.MD_JSON, **_BLOCK)


def responses_tools(url: str) -> None:
    _openai(url, Mode.RESPONSES_TOOLS)


def anthropic_tools(url: str) -> None:
    _anthropic(url, Mode.ANTHROPIC_TOOLS)


def anthropic_json(url: str) -> None:
    _anthropic(url, Mode.ANTHROPIC_JSON, **_FORM)


def anthropic_json_schema(url: str) -> None:
    _anthropic(url, Mode.JSON_SCHEMA, **_FORM)


def anthropic_parallel_tools(url: str) -> None:
    _anthropic(
        url,
        Mode.ANTHROPIC_PARALLEL_TOOLS,
        response_model=Iterable[Visit],
        extra_body={"tool_choice": _ONE},
    )


def anthropic_reasoning_tools(url: str) -> None:
    _anthropic(url, Mode.ANTHROPIC_REASONING_TOOLS, tool_choice=_ONE)
