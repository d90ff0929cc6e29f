"""Rules on a real chat model: a hundred answers to a schema, and a tool that it must call, spoken
with by OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from bench.soak import serving
from openai import OpenAI

from dovetail import LLM, SamplingParams, Structured

pytestmark = pytest.mark.full

PROMPTS = 100
CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "country": {"type": "string", "maxLength": 30},
        "population": {"type": "integer", "minimum": 0, "maximum": 50_000_000},
        "continent": {"enum": ["Africa", "Asia", "Europe", "America", "Australia"]},
        "area_km2": {"type": ["number", "null"], "minimum": 0, "maximum": 100_000},
        "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "sights": {
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": 30},
            "maxItems": 3,
        },
    },
    "required": ["name", "country", "population", "continent", "area_km2", "code", "sights"],
    "additionalProperties": False,
}
CITIES = ["Paris", "Rome", "Cairo", "Tokyo", "Lima", "Oslo", "Delhi", "Sydney", "Boston", "Nairobi"]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}  # fmt: skip


def test_a_hundred_answers_parse_and_follow_their_schema(smollm2: Path) -> None:
    params = [
        SamplingParams(
            max_tokens=300, temperature=0.8, seed=seed, structured=Structured(json_schema=CITY)
        )
        for seed in range(PROMPTS)
    ]
    prompts = [
        f"Facts about {CITIES[n % len(CITIES)]}, number {n}, as JSON:\n" for n in range(PROMPTS)
    ]
    with LLM(smollm2, max_model_len=512, max_num_seqs=32) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for output in outputs:
        assert output.outputs[0].finish_reason == "stop"
        jsonschema.validate(json.loads(output.outputs[0].text), CITY)


@pytest.fixture(scope="module")
def client(smollm2: Path) -> Iterator[OpenAI]:
    arguments = [
        "--served-model-name",
        "smollm2",
        "--set",
        "max_model_len=1024",
        "--tool-parser",
        "hermes",
    ]
    with serving(str(smollm2), arguments) as server:
        yield OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)


TEMPLATE = """{% if tools %}<|im_start|>system
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>. Tools: {{ tools | tojson }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""  # the model's own knows no tools
EXTRA = {"chat_template": TEMPLATE}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of the next days",
            "parameters": WEATHER,
        },
    }
]


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "get_weather"}}],
    ids=["required", "named"],
)
def test_a_tool_that_must_be_called_is_called_and_its_answer_is_heard(
    client: OpenAI, choice: Any
) -> None:
    messages: Any = [
        {"role": "user", "content": "How warm will it be in Paris tomorrow, in degrees Celsius?"}
    ]
    asked: dict[str, Any] = {
        "model": "smollm2",
        "tools": TOOLS,
        "tool_choice": choice,
        "temperature": 0,
        "max_tokens": 300,
        "extra_body": EXTRA,
    }
    message = client.chat.completions.create(messages=messages, **asked).choices[0].message
    assert message.tool_calls
    for call in message.tool_calls:
        assert call.type == "function"
        assert call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    streamed = [
        part.choices[0].delta
        for part in client.chat.completions.create(messages=messages, stream=True, **asked)
        if part.choices
    ]
    arguments = "".join(
        call.function.arguments or ""
        for delta in streamed
        for call in delta.tool_calls or ()
        if call.index == 0 and call.function
    )
    assert arguments == message.tool_calls[0].function.arguments  # type: ignore[union-attr]
    messages += [message.model_dump(exclude_none=True)]
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": '{"celsius": 21}'}
        for call in message.tool_calls
    ]
    told = client.chat.completions.create(
        model="smollm2",
        messages=messages,
        tools=TOOLS,
        tool_choice="none",
        temperature=0,
        max_tokens=100,
        extra_body=EXTRA,
    )
    assert told.choices[0].message.content
