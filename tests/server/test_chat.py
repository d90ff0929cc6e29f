"""`/v1/chat/completions`, driven by the openai package."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
import transformers

from dovetail.front.grammars import token_speller
from dovetail.front.tokenizer import TransformersTokenizer
from dovetail.request.outputs import CompletionOutput, Logprob
from dovetail_server.protocol.openai_common import logprobs_json
from dovetail_server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import demo_tokenizer, serving

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}{% "
    "if add_generation_prompt %}assistant:{% endif %}"
)
TOOLS_TEMPLATE = "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}" + TEMPLATE
MESSAGES = [{"role": "user", "content": "Who are you?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
FURTHER = (
    "top_k",
    "ignore_eos",
    "min_tokens",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "add_generation_prompt",
    "return_token_ids",
    "allowed_token_ids",
    "prompt_logprobs",
)


def asked(options: dict[str, Any]) -> dict[str, Any]:
    own = dict(options)
    further = {"chat_template": TEMPLATE} | {name: own.pop(name) for name in FURTHER if name in own}
    return {
        "model": "demo",
        "messages": MESSAGES,
        "seed": 1,
        "max_completion_tokens": 8,
        **own,
        "extra_body": further,
    }


def ask(api: openai.OpenAI, **options: Any) -> Any:
    return api.chat.completions.create(**asked(options))


def contents(stream: Any) -> dict[int, str]:
    joined: dict[int, str] = {}
    for chunk in stream:
        for choice in chunk.choices:
            joined[choice.index] = joined.get(choice.index, "") + (choice.delta.content or "")
    return joined


OPTIONS: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"temperature": 0},
    {"stop": [" "]},
    {"top_k": 2},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 2, "n": 2},
    {
        "chat_template_kwargs": {"flag": True},
        "chat_template": TEMPLATE + "{% if flag %}{% endif %}",
    },
    {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}],
            }
        ]
    },
    {
        "messages": [*MESSAGES, {"role": "assistant", "content": "I am"}],
        "continue_final_message": True,
    },
    {"add_generation_prompt": False},
    {
        "response_format": {"type": "text"},
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "modalities": ["text"],
        "store": False,
    },
    {"tools": [TOOL], "chat_template": TOOLS_TEMPLATE},
    {"return_token_ids": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_stream_adds_up_to_the_whole_answer(
    openai_client: openai.OpenAI, options: dict[str, Any]
) -> None:
    whole = ask(openai_client, **options)
    assert contents(ask(openai_client, stream=True, **options)) == {
        choice.index: choice.message.content for choice in whole.choices
    }
    assert len(whole.choices) == options.get("n", 1)


@pytest.mark.slow("answers many requests")
def test_an_answer_without_max_tokens_has_all_the_room(openai_client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "Who are you? " * 180}]
    answer = ask(openai_client, messages=long, max_completion_tokens=None, ignore_eos=True)
    assert 900 < answer.usage.prompt_tokens < answer.usage.total_tokens == 1024
    assert answer.choices[0].finish_reason == "length"


def test_the_first_chunk_says_who_speaks_and_the_last_why_it_ended(
    openai_client: openai.OpenAI,
) -> None:
    chunks = [chunk.choices[0] for chunk in ask(openai_client, stream=True)]
    assert chunks[0].delta.role == "assistant"
    assert [choice.finish_reason for choice in chunks] == [None] * (len(chunks) - 1) + ["length"]


@pytest.mark.slow("answers many requests")
def test_logprobs_of_parts_of_a_character_have_the_bytes_that_make_it_up(
    openai_client: openai.OpenAI,
) -> None:
    tokenizer = demo_tokenizer()
    parts = [token for token in range(1024) if "\ufffd" in tokenizer.decode([token])]
    options: Any = {
        "logprobs": True,
        "top_logprobs": 3,
        "max_completion_tokens": 40,
        "return_token_ids": True,
        "allowed_token_ids": parts,
    }
    choice = ask(openai_client, **options).choices[0]
    told = choice.logprobs.content
    spelled = [token_speller(tokenizer)(token) for token in range(1024)]
    assert [bytes(one.bytes) for one in told] == [spelled[token] for token in choice.token_ids]
    assert (
        b"".join(bytes(one.bytes) for one in told).decode(errors="replace")
        == choice.message.content
    )
    assert all(one.token == "".join(f"\\x{byte:02x}" for byte in one.bytes) for one in told)
    assert all(bytes(one.bytes) in spelled for position in told for one in position.top_logprobs)
    chunks = [chunk.choices[0] for chunk in ask(openai_client, **options, stream=True)]
    assert [one.bytes for chunk in chunks if chunk.logprobs for one in chunk.logprobs.content] == [
        one.bytes for one in told
    ]


def test_without_a_tokenizers_bytes_a_token_has_those_of_the_text_that_it_adds() -> None:
    """A tokenizer written in Python says only what text it makes of tokens."""
    logprobs = [{5: Logprob(-1.0, 1, "")}, {6: Logprob(-1.0, 1, "é")}]
    told = logprobs_json(
        CompletionOutput(0, "", (5, 6), logprobs=logprobs),
        0,
        TransformersTokenizer(transformers.ByT5Tokenizer()),
    )
    assert [(one["token"], one["bytes"]) for one in told] == [("", []), ("é", list("é".encode()))]


def test_logprobs_say_each_token_with_its_bytes(openai_client: openai.OpenAI) -> None:
    choice = ask(openai_client, logprobs=True, top_logprobs=2).choices[0]
    assert (
        b"".join(bytes(one.bytes) for one in choice.logprobs.content).decode()
        == choice.message.content
    )
    assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content)


@pytest.mark.anyio
async def test_reasoning_tokens_are_counted_in_the_usage_details(
    fake: Callable[..., FakeEngine],
) -> None:
    body = {"messages": MESSAGES, "n": 2, "chat_template": TEMPLATE + "{# <think> #}"}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with (
        serving(fake("<think>", "a ", "b", "</think>", "c", "d")) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        whole = (await http.post("/v1/chat/completions", json=body)).json()
        lines = (await http.post("/v1/chat/completions", json=streamed)).text.split("\n\n")
        plain = (
            await http.post("/v1/chat/completions", json={**body, "chat_template": TEMPLATE})
        ).json()
    assert [choice["message"]["reasoning_content"] for choice in whole["choices"]] == ["a b"] * 2
    assert [
        plain["choices"][0]["message"][name] for name in ("reasoning", "reasoning_content")
    ] == [None, None]
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * 4}
    assert json.loads(lines[-3].removeprefix("data: "))["usage"] == whole["usage"]
    assert "completion_tokens_details" not in plain["usage"]


def test_usage_comes_in_a_stream_that_asks_for_it(openai_client: openai.OpenAI) -> None:
    *chunks, last = ask(openai_client, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in chunks)


REFUSED = {
    "tool_choice": "required",
    "modalities": ["audio"],
    "audio": {"voice": "x", "format": "wav"},
    "prediction": {"type": "content", "content": "x"},
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "web_search_options": {},
    "reasoning_effort": "huge",
    "verbosity": "silent",
    "store": "yes",
    "service_tier": "none",
    "top_logprobs": 2,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_rejected_by_name(openai_client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(openai_client, **{name: REFUSED[name]})
    assert refused.value.param == name
    assert name in refused.value.message


def test_an_image_is_refused_by_its_place(openai_client: openai.OpenAI) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    with pytest.raises(openai.BadRequestError, match="image_url") as refused:
        ask(openai_client, messages=[{"role": "user", "content": [image]}])
    assert refused.value.param == "messages[0].content[0]"


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Berlin"}}\n</tool_call>'


@pytest.mark.anyio
async def test_tool_calls_and_reasoning_come_parsed_whole_and_streamed(
    fake: Callable[..., FakeEngine],
) -> None:
    text = f"<think>\nHm.\n</think>\n\nLet me see. {CALL}"
    engine = fake(*text)
    options = asked(
        {"tools": [TOOL], "chat_template": TOOLS_TEMPLATE, "max_completion_tokens": None}
    )
    options["model"] = "fake"
    async with (
        serving(engine, ServerSettings(reasoning_parser="think")) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as api,
    ):
        [choice] = (await api.chat.completions.create(**options)).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content.strip() == "Let me see."
        [call] = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "weather",
            {"city": "Berlin"},
        )
        name = content = thoughts = arguments = ""
        async for chunk in await api.chat.completions.create(**options, stream=True):
            delta = chunk.choices[0].delta
            content, thoughts = (
                content + (delta.content or ""),
                thoughts + getattr(delta, "reasoning_content", ""),
            )
            for part in delta.tool_calls or ():
                name, arguments = (
                    name + (part.function.name or ""),
                    arguments + (part.function.arguments or ""),
                )
        assert chunk.choices[0].finish_reason == "tool_calls"
        assert (name, json.loads(arguments)) == ("weather", {"city": "Berlin"})
        assert (content, thoughts) == (choice.message.content, choice.message.reasoning_content)
        assert thoughts.strip() == "Hm."
