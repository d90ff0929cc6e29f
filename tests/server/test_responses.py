"""`/v1/responses`: its conversations, answers and streams, by hand and by OpenAI's own client."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from dovetail.api.parser import Content, Event
from dovetail.errors import DovetailError
from dovetail.request.outputs import CompletionOutput
from dovetail_server.errors import HttpError
from dovetail_server.parsers.reader import AnswerReader
from dovetail_server.protocol.answer_parts import AnswerParts
from dovetail_server.protocol.openai_common import TokenCounts
from dovetail_server.protocol.response_answer import begun_answer
from dovetail_server.protocol.response_events import ResponseWriter
from dovetail_server.protocol.response_items import chat_messages, read_items
from dovetail_server.protocol.response_tools import ResponseTools
from dovetail_server.protocol.responses import ResponsesRequest
from tests.server.answers import answers, parser_named, read_events
from tests.server.scripted import Script, ScriptedEngine
from tests.server.serving import PATIENCE_S, serving_in_thread
from tests.support import examples

STREAM_EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def read(**fields: Any) -> ResponsesRequest:
    return msgspec.convert({"model": "m", "input": "Hi", **fields}, ResponsesRequest)


def messages(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return chat_messages(None, read_items(items))


def streamed(events: list[Event], finish_reason: Literal["stop", "length"]) -> list[dict[str, Any]]:
    """The events of a stream, each checked by OpenAI's own types."""
    begun = begun_answer(read(), "resp_1", "m", 0)
    writer = ResponseWriter(begun, ResponseTools(()))
    parts = AnswerParts(writer)
    writer.start(TokenCounts(1, 0, 0))
    parts.add(events)
    parts.finish(cut=finish_reason == "length")
    writer.finish(
        writer.whole(
            CompletionOutput(0, "", [], finish_reason=finish_reason), parts, TokenCounts(1, 2, 0)
        )
    )
    told: list[dict[str, Any]] = read_events(writer.take())
    for event in told:
        STREAM_EVENT.validate_python(event)
    return told


@given(answers(), st.sampled_from(["stop", "length"]))
@examples(quick=50, full=2000)
def test_a_streams_deltas_add_up_to_the_whole_answer(
    events: list[Event], finish_reason: Literal["stop", "length"]
) -> None:
    told = streamed(events, finish_reason)
    whole = told[-1]["response"]
    deltas = ["" for _ in whole["output"]]
    for event in told:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] += event["delta"]
    assert deltas == [
        item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        for item in whole["output"]
    ]
    assert [
        event["item"] for event in told if event["type"] == "response.output_item.done"
    ] == whole["output"]


@given(answers())
@examples(quick=50, full=2000)
def test_events_are_numbered_and_items_begin_and_end_in_turn(events: list[Event]) -> None:
    told = streamed(events, "stop")
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    bounds = [
        (event["type"], event["output_index"])
        for event in told
        if event["type"].startswith("response.output_item")
    ]
    items = range(len(told[-1]["response"]["output"]))
    assert bounds == [
        (f"response.output_item.{what}", index) for index in items for what in ("added", "done")
    ]
    assert [event["type"] for event in (told[0], told[1], told[-1])] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]


def test_an_answer_without_room_is_incomplete() -> None:
    last = streamed([Content("Once")], "length")[-1]
    response = Response.model_validate(last["response"])
    assert (last["type"], response.status) == ("response.incomplete", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_instructions_come_first() -> None:
    assert chat_messages("Be kind.", read_items("Hi")) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
    ]


def test_an_answers_items_become_one_message() -> None:
    assert messages(
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "See.", "annotations": []}],
        },
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "weather",
            "arguments": '{"city": "Rome"}',
        },
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "21"},
    ) == [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "See.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
                },
                {
                    "id": "c2",
                    "type": "function",
                    "function": {"name": "weather", "arguments": "{}"},
                },
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "21"},
    ]


@given(answers())
@examples(quick=50, full=2000)
def test_an_answers_items_can_be_sent_back(events: list[Event]) -> None:
    output = streamed(events, "stop")[-1]["response"]["output"]
    sent = messages({"role": "user", "content": "Hi"}, *output)
    thoughts = [
        message.get("reasoning_content") for message in sent if message.get("reasoning_content")
    ]
    assert thoughts == [
        item["content"][0]["text"] for item in output if item["type"] == "reasoning"
    ]
    calls = [
        call["function"]["arguments"] for message in sent for call in message.get("tool_calls", ())
    ]
    assert calls == [item["arguments"] for item in output if item["type"] == "function_call"]


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (
            {"type": "web_search_call"},
            r"input\[0\]\.type must be one of message, .* got 'web_search_call'",
        ),
        ({"role": "user"}, r"input\[0\]\.content: it is required"),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": 1}]},
            r"input\[0\]\.content\[0\]\.image_url: expected",
        ),
        (
            {"role": "user", "content": [{"type": "input_audio"}]},
            r"input\[0\]\.content\[0\] is of type 'input_audio'; models here read text",
        ),
        (
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": {}},
            r"input\[0\]\.arguments: expected",
        ),
    ],
)
def test_a_wrong_item_is_named(item: dict[str, Any], said: str) -> None:
    with pytest.raises(DovetailError, match=said):
        read_items([item])


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"background": True},
        {"truncation": "auto"},
        {"max_tool_calls": 1},
        {"top_logprobs": 1},
        {"top_logprobs": 1, "include": ["reasoning.encrypted_content"]},
    ],
)
def test_what_cannot_be_honoured_is_rejected_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(HttpError, match=next(iter(fields))):
        read(**fields).check_supported()


def test_a_request_that_says_store_false_is_served() -> None:
    read(store=False, tool_choice="auto", truncation="disabled").check_supported()


ECHOED: dict[str, Any] = {
    "instructions": "Be short.",
    "max_output_tokens": 7,
    "metadata": {"a": "b"},
    "parallel_tool_calls": False,
    "reasoning": {"effort": "low"},
    "temperature": 0.5,
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    "tool_choice": "none",
    "tools": [{"type": "function", "name": "f"}],
    "top_logprobs": 2,
    "top_p": 0.25,
    "user": "u",
}


@pytest.mark.parametrize("name", ECHOED)
def test_an_answer_echoes_each_parameter(name: str) -> None:
    given = msgspec.to_builtins(begun_answer(read(**{name: ECHOED[name]}), "r", "m", 1))
    default = msgspec.to_builtins(begun_answer(read(), "r", "m", 1))
    assert given == default | {name: given[name]}
    assert given[name] != default[name]
    assert msgspec.to_builtins(begun_answer(read(**{name: given[name]}), "r", "m", 1)) == given


# Over loopback, by OpenAI's client


TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = (
    '<think>Rome?</think>Let me see.<tool_call>{"name": "weather", "arguments": {"city": '
    '"Rome"}}</tool_call>'
)


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def client(engine: ScriptedEngine) -> Iterator[OpenAI]:
    with (
        serving_in_thread(lambda: engine) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client,
    ):
        yield client


def test_a_request_is_answered(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = Script("Sunny.")
    told = client.responses.create(
        model="fake",
        instructions="Be kind.",
        input="Weather?",
        max_output_tokens=50,
        temperature=0.5,
        store=False,
        metadata={"a": "b"},
        extra_body={"top_k": 7},
    )
    assert (told.output_text, told.status, told.model, told.metadata) == (
        "Sunny.",
        "completed",
        "fake",
        {"a": "b"},
    )
    prompt, params = engine.last_prompt, engine.last.params
    assert prompt == "<system>Be kind.\n<user>Weather?\n<assistant>"
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 7, 50)
    usage = told.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.input_tokens_details.cached_tokens) == (
        len(prompt),
        len("Sunny."),
        2,
    )


def test_an_answer_without_a_limit_may_fill_the_model(
    client: OpenAI, engine: ScriptedEngine
) -> None:
    client.responses.create(model="fake", input="Weather?")
    assert engine.last.params.max_tokens is None


def test_thoughts_text_and_calls_are_items_streamed_or_not(
    client: OpenAI, engine: ScriptedEngine
) -> None:
    engine.script = Script(CALL)
    whole = client.responses.create(model="fake", input="Weather?", tools=[TOOL])
    with client.responses.create(
        model="fake", input="Weather?", tools=[TOOL], stream=True
    ) as stream:
        streamed = next(event for event in stream if event.type == "response.completed").response
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.output_text == "Let me see."
    assert whole.output[-1].arguments == '{"city": "Rome"}'  # type: ignore[union-attr]
    assert without_ids(streamed) == without_ids(whole)


def without_ids(response: Response) -> Any:
    """Return the part that is equal in two answers to the same request."""
    return [
        {**item.to_dict(), "id": None, "call_id": None} for item in response.output
    ], response.usage


def test_a_conversation_continues_with_an_answer_and_a_functions_output(
    client: OpenAI, engine: ScriptedEngine
) -> None:
    engine.script = Script(CALL)
    user: Any = {"role": "user", "content": "Weather?"}
    first = client.responses.create(model="fake", input=[user], tools=[TOOL])
    engine.script = Script("21 degrees.")
    result: Any = {
        "type": "function_call_output",
        "call_id": first.output[-1].call_id,
        "output": "21",
    }  # type: ignore[union-attr]
    client.responses.create(model="fake", input=[user, *first.output, result], tools=[TOOL])  # type: ignore[list-item]
    assert engine.last_prompt.endswith(f"<user>Weather?\n<assistant>{CALL}\n<tool>21\n<assistant>")


@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_a_texts_logprobs_are_reported_streamed_or_not(openai_client: OpenAI, tools: Any) -> None:
    body: Any = {
        "model": "demo",
        "input": "ROMEO:",
        "max_output_tokens": 8,
        "temperature": 0,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    body["extra_body"] = {
        "chat_template": "{{ tools | length if tools }}{{ messages[0].content }}{# <tool_call> "
        "<think> #}",
        "seed": 1,
    }
    whole = openai_client.responses.create(**body, tools=tools)
    with openai_client.responses.create(**body, tools=tools, stream=True) as stream:
        events = list(stream)
    told: Any = whole.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert "".join(one.token for one in told) == whole.output_text
    assert all(
        len(one.top_logprobs) == 2 and one.top_logprobs[0].logprob == one.logprob for one in told
    )
    assert bytes(byte for one in told for byte in one.bytes).decode() == whole.output_text
    deltas = [
        one
        for event in events
        if event.type == "response.output_text.delta"
        for one in event.logprobs
    ]
    [done] = (event for event in events if event.type == "response.output_text.done")
    assert [(one.token, one.logprob) for one in deltas] == [
        (one.token, one.logprob) for one in told
    ]
    assert [one.token for one in done.logprobs] == [one.token for one in told]


def test_all_tokens_of_a_character_have_logprobs_and_so_has_what_comes_before_it() -> None:
    parts = AnswerParts()
    logprobs = [{"token": f"\\x{byte:02x}", "bytes": [byte]} for byte in "\U0001f642".encode()]
    parts.add(
        [Content("a\U0001f642")],
        [{"token": "<mark>", "bytes": list(b"<mark>")}, {"token": "a", "bytes": [97]}, *logprobs],
    )
    assert (
        b"".join(bytes(one["bytes"]) for one in parts.parts[0].logprobs).decode() == "a\U0001f642"
    )


def test_only_a_texts_tokens_have_logprobs() -> None:
    parts = AnswerParts()
    reader = AnswerReader(parser_named("hermes", "think", tools=[TOOL]))
    for token in (
        "<think>",
        "a",
        "</think>",
        "b",
        " <",
        "c",
        '<tool_call>{"name": ',
        '"f"}',
        "</tool_call>",
        "d",
        "",
    ):
        sample = CompletionOutput(0, token, (1,), finish_reason=None if token else "stop")
        parts.add(reader.read(sample), [{"token": token, "bytes": list(token.encode())}])
    assert [[one["token"] for one in part.logprobs] for part in parts.parts] == [
        [],
        ["b", " <", "c"],
        [],
        ["d"],
    ]


def test_the_tokens_of_thoughts_are_counted(client: OpenAI, engine: ScriptedEngine) -> None:
    # a token a character, three of them an output
    engine.script = Script("<think>Rome?</think>Sunny.")
    whole = client.responses.create(model="fake", input="Weather?")
    with client.responses.create(model="fake", input="Weather?", stream=True) as stream:
        streamed = next(event for event in stream if event.type == "response.completed").response
    assert whole.usage == streamed.usage
    assert whole.usage is not None
    assert (
        len("<think>Rome?</think>")
        <= whole.usage.output_tokens_details.reasoning_tokens
        < len("<think>Rome?</think>") + 3
    )


def test_a_stream_that_is_cut_ends_incomplete(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = Script("Sunny.")
    with client.responses.create(
        model="fake", input="Weather?", max_output_tokens=3, stream=True
    ) as stream:
        last = list(stream)[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == "Sun"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": "yes"}, "store"),
        ({"input": []}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]"),
        ({"inputs": "x"}, "inputs"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ],
)
def test_a_wrong_field_is_named(client: OpenAI, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/responses", body={"model": "fake", "input": "Hi", **fields}, cast_to=object)
    assert re.search(named, str(refused.value.param))


def test_a_stream_whose_engine_dies_ends_with_an_error(
    client: OpenAI, engine: ScriptedEngine
) -> None:
    engine.script = Script("Sunny.", fails=True)
    with client.responses.create(model="fake", input="Weather?", stream=True) as stream:
        told = list(stream)
    assert told[-1].type == "error"
    assert (told[-1].message, told[-1].sequence_number) == ("the engine died", len(told) - 1)
