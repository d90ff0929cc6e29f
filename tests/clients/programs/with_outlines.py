"""outlines: chat, streams, types, schemas, regular expressions and grammars, by its models of
OpenAI and of vLLM's server."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import openai
import outlines
from outlines.inputs import Chat
from outlines.types import CFG, JsonSchema, Regex
from pydantic import BaseModel, ConfigDict
from run import MODEL, WEATHER_TOOL, spoken


class _Visit(BaseModel):
    model_config = ConfigDict(extra="forbid")
    who: Literal["Romeo", "Juliet"]
    late: bool


def _model(url: str, make: Any = outlines.from_vllm) -> Any:
    return make(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), MODEL)


def chat(url: str) -> None:
    for make in (outlines.from_openai, outlines.from_vllm):
        assert _model(url, make)(
            Chat([{"role": "user", "content": "Speak!"}]), max_tokens=8, temperature=0
        ) == spoken(url)


def stream(url: str) -> None:
    assert "".join(_model(url).stream("Speak!", max_tokens=8, temperature=0)) == spoken(url)


def schema(url: str) -> None:
    for make in (outlines.from_openai, outlines.from_vllm):
        assert _Visit.model_validate_json(
            _model(url, make)("Who is there?", _Visit, max_tokens=200)
        )
    made = _model(url)(
        "Where?", JsonSchema(json.dumps(WEATHER_TOOL["function"]["parameters"])), max_tokens=60
    )
    assert "city" in json.loads(made)


def choice(url: str) -> None:
    assert _model(url)("Who?", Literal["Romeo", "Juliet"], max_tokens=20) in ("Romeo", "Juliet")


def regex(url: str) -> None:
    assert re.fullmatch(
        r"[0-9]{2}:[0-9]{2}", _model(url)("When?", Regex(r"[0-9]{2}:[0-9]{2}"), max_tokens=20)
    )


def grammar(url: str) -> None:
    made = _model(url)(
        "1 + 2 =", CFG('start: NUMBER (" + " NUMBER)~1\nNUMBER: /[1-9]/\n'), max_tokens=20
    )
    assert re.fullmatch(r"[1-9] \+ [1-9]", made)
