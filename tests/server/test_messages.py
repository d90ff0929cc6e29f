"""`/v1/messages`: what conversations and answers look like there."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from anthropic import NOT_GIVEN
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import given
from pydantic import TypeAdapter

from dovetail.errors import RequestError
from dovetail.request import CompletionOutput
from dovetail_server.errors import HttpError
from dovetail_server.parsers.events import Event
from dovetail_server.protocol import messages as protocol
from dovetail_server.protocol.answer_parts import AnswerParts
from dovetail_server.protocol.message_events import MessageWriter, content_of, stop_of
from tests.server.answers import answers, read_events
from tests.support import examples

STREAM_EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)


def read(**fields: Any) -> protocol.MessagesRequest:
    return msgspec.convert({"model": "m", "max_tokens": 5, "messages": [], **fields}, protocol.MessagesRequest)


def message(content: Any, role: str = "user") -> list[dict[str, Any]]:
    return protocol.conversation(read(messages=[{"role": role, "content": content}]))


def accumulated(stream: bytes) -> Any:
    """The message that Anthropic's client makes of a stream."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in read_events(stream):
        if event["type"] != "ping":
            snapshot = accumulate_event(
                event=STREAM_EVENT.validate_python(event), current_snapshot=snapshot, json_bufs=buffers, output_format=NOT_GIVEN
            )
    return snapshot


@given(answers())
@examples(quick=50, full=2000)
def test_a_streams_deltas_add_up_to_the_whole_answer(events: list[Event]) -> None:
    usage = protocol.Usage(3, 0)
    writer, whole = MessageWriter(), AnswerParts()
    streamed = AnswerParts(writer)
    writer.start(protocol.MessageAnswer(id="msg_1", model="m", content=[], usage=usage))
    for event in events:
        streamed.add([event])
    streamed.finish()
    writer.finish("end_turn", None, protocol.Usage(3, 7))
    whole.add(events)
    body = msgspec.to_builtins(content_of(whole.parts))
    told = accumulated(writer.take()).to_dict()
    assert told["content"] == body
    assert (told["stop_reason"], told["usage"]["output_tokens"]) == ("end_turn", 7)


def test_system_text_comes_first() -> None:
    body = read(system="Be kind.", messages=[{"role": "user", "content": "Hi"}])
    assert protocol.conversation(body) == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]


def test_tool_results_become_messages_of_their_own() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "21"}]}
    failed = {"type": "tool_result", "tool_use_id": "t2", "content": "no such city", "is_error": True}
    assert message([result, failed, {"type": "text", "text": "And now?"}]) == [
        {"role": "tool", "tool_call_id": "t1", "content": "21"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no such city"},
        {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
    ]


def test_an_assistants_blocks_become_one_message() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
    ]
    assert message(blocks, "assistant") == [
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}],
        }
    ]


@pytest.mark.parametrize(
    ("role", "block"),
    [
        ("assistant", {"type": "tool_result", "tool_use_id": "t1"}),
        ("user", {"type": "tool_use", "id": "t1", "name": "f", "input": {}}),
        ("user", {"type": "thinking", "thinking": "Hm."}),
        ("system", {"type": "tool_result", "tool_use_id": "t1"}),
    ],
)
def test_a_block_in_the_wrong_place_is_refused_by_its_place(role: str, block: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]\.content"):
        message([block], role)


def test_a_model_that_may_call_no_tools_hears_of_none() -> None:
    tools = [{"name": "weather", "description": "Weather of a city", "input_schema": {"type": "object"}}]
    function = {"name": "weather", "description": "Weather of a city", "parameters": {"type": "object"}}
    assert protocol.tools(read(tools=tools)) == [{"type": "function", "function": function}]
    assert protocol.tools(read(tools=tools, tool_choice={"type": "none"})) is None


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "disable_parallel_tool_use"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(HttpError, match=name):
        protocol.check_supported(read(**fields))


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (CompletionOutput(0, "", [], finish_reason="stop"), ("end_turn", None)),
        (CompletionOutput(0, "", [], finish_reason="stop", stop_reason="END"), ("stop_sequence", "END")),
        (CompletionOutput(0, "", [], finish_reason="length"), ("max_tokens", None)),
    ],
)
def test_the_stop_reason_says_why_it_stopped(output: CompletionOutput, expected: tuple[str, str | None]) -> None:
    assert stop_of(output, AnswerParts(), used_tokens=5, max_tokens=5) == expected


def test_an_answer_that_filled_the_model_says_so() -> None:
    output = CompletionOutput(0, "", [], finish_reason="length")
    assert stop_of(output, AnswerParts(), used_tokens=4, max_tokens=5) == ("model_context_window_exceeded", None)
