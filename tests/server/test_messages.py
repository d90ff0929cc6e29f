"""`/v1/messages`: its conversations, answers and streams, by hand and by Anthropic's own client."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
from hypothesis import given
from pydantic import TypeAdapter

from dovetail.api.parser import Event
from dovetail.errors import RequestError
from dovetail.request.outputs import CompletionOutput
from dovetail_server.protocol import messages as protocol
from dovetail_server.protocol.answer_parts import AnswerParts
from dovetail_server.protocol.message_events import MessageWriter
from dovetail_server.protocol.openai_common import TokenCounts
from dovetail_server.settings import ServerSettings
from dovetail_server.streams import EventStream
from dovetail_server.wire import DirectProtocol
from tests.server.answers import answers, read_events
from tests.server.fake_engine import FakeEngine
from tests.server.scripted import Script, ScriptedEngine
from tests.server.serving import PATIENCE_S, serving, serving_in_thread
from tests.support import examples

if TYPE_CHECKING:
    from anthropic import Anthropic


def read(**fields: Any) -> protocol.MessagesRequest:
    return msgspec.convert(
        {"model": "m", "max_tokens": 5, "messages": [], **fields}, protocol.MessagesRequest
    )


def message(content: Any, role: str = "user") -> list[dict[str, Any]]:
    return protocol.chat_messages(read(messages=[{"role": role, "content": content}]))


@pytest.fixture(scope="module")
def accumulated(anthropic: ModuleType) -> Callable[[bytes], Any]:
    """Makes a message of a stream, as Anthropic's client does."""
    from anthropic.lib.streaming._messages import accumulate_event
    from anthropic.types import RawMessageStreamEvent

    stream_event: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)

    def accumulate(stream: bytes) -> Any:
        snapshot: Any = None
        buffers: dict[int, bytes] = {}
        for event in read_events(stream):
            if event["type"] != "ping":
                snapshot = accumulate_event(
                    event=stream_event.validate_python(event),
                    current_snapshot=snapshot,
                    json_bufs=buffers,
                    output_format=anthropic.NOT_GIVEN,
                )
        return snapshot

    return accumulate


def writer_of(max_tokens: int = 5) -> MessageWriter:
    return MessageWriter(
        protocol.MessageAnswer(id="msg_1", model="m", content=[], usage=protocol.Usage(0, 0)),
        max_tokens,
    )


@given(events=answers())
@examples(quick=50, full=2000)
def test_a_streams_deltas_add_up_to_the_whole_answer(
    accumulated: Callable[[bytes], Any], events: list[Event]
) -> None:
    writer, whole = writer_of(), AnswerParts()
    streamed = AnswerParts(writer)
    writer.start(TokenCounts(3, 0, 0))
    for event in events:
        streamed.add([event])
    streamed.finish(cut=True)
    whole.add(events)
    whole.finish(cut=True)
    answer = writer.whole(
        CompletionOutput(0, "", [], finish_reason="stop"), whole, TokenCounts(3, 7, 0)
    )
    writer.finish(answer)
    body = msgspec.to_builtins(answer.content)
    told = accumulated(writer.take()).to_dict()
    assert told["content"] == body
    assert (told["stop_reason"], told["usage"]["output_tokens"]) == ("end_turn", 7)


def test_system_text_comes_first() -> None:
    body = read(system="Be kind.", messages=[{"role": "user", "content": "Hi"}])
    assert protocol.chat_messages(body) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
    ]


def test_tool_results_become_messages_of_their_own() -> None:
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": "21"}],
    }
    failed = {
        "type": "tool_result",
        "tool_use_id": "t2",
        "content": "no such city",
        "is_error": True,
    }
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
            "tool_calls": [
                {
                    "id": "t1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": "Rome"}},
                }
            ],
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
def test_a_block_in_the_wrong_place_is_refused_by_its_place(
    role: str, block: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]\.content"):
        message([block], role)


def test_a_model_that_may_call_no_tools_is_shown_none() -> None:
    tools = [
        {"name": "weather", "description": "Weather of a city", "input_schema": {"type": "object"}}
    ]
    function = {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object"},
    }
    assert read(tools=tools).to_conversation(images=False).options.tools == [
        {"type": "function", "function": function}
    ]
    none = read(tools=tools, tool_choice={"type": "none"}).to_conversation(images=False)
    assert none.options.tools is None


def stop_of(output: CompletionOutput, *, used_tokens: int) -> tuple[str | None, str | None]:
    answer = writer_of(max_tokens=5).whole(output, AnswerParts(), TokenCounts(3, used_tokens, 0))
    return answer.stop_reason, answer.stop_sequence


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (CompletionOutput(0, "", [], finish_reason="stop"), ("end_turn", None)),
        (
            CompletionOutput(0, "", [], finish_reason="stop", stop_reason="END"),
            ("stop_sequence", "END"),
        ),
        (CompletionOutput(0, "", [], finish_reason="length"), ("max_tokens", None)),
    ],
)
def test_the_stop_reason_says_why_it_stopped(
    output: CompletionOutput, expected: tuple[str, str | None]
) -> None:
    assert stop_of(output, used_tokens=5) == expected


def test_an_answer_that_filled_the_context_has_that_stop_reason() -> None:
    output = CompletionOutput(0, "", [], finish_reason="length")
    assert stop_of(output, used_tokens=4) == ("model_context_window_exceeded", None)


# Over loopback, by Anthropic's client


TOOL: Any = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = (
    '<think>Rome?</think>Let me see.<tool_call>{"name": "weather", "arguments": {"city": '
    '"Rome"}}</tool_call>'
)
USER: Any = [{"role": "user", "content": "Weather in Rome?"}]


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def url(engine: ScriptedEngine) -> Iterator[str]:
    with serving_in_thread(lambda: engine, ServerSettings(api_keys=("secret",))) as url:
        yield url


@pytest.fixture
def client(anthropic: ModuleType, url: str) -> Iterator[Anthropic]:
    with anthropic.Anthropic(
        base_url=url, api_key="secret", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "max_tokens": 500, "messages": USER, **fields}


def test_a_message_is_answered(client: Anthropic, engine: ScriptedEngine) -> None:
    engine.script = Script("Sunny.")
    told = client.messages.create(
        **asked(system="Be kind.", extra_body={"temperature": 0.5, "top_k": 7, "top_p": 0.9})
    )
    [block] = told.content
    assert block.type == "text"
    assert (block.text, told.stop_reason, told.role, told.model) == (
        "Sunny.",
        "end_turn",
        "assistant",
        "fake",
    )
    prompt, params = engine.last_prompt, engine.last.params
    assert prompt == "<system>Be kind.\n<user>Weather in Rome?\n<assistant>"
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.5, 7, 0.9, 500)
    assert (told.usage.input_tokens, told.usage.cache_read_input_tokens) == (len(prompt) - 2, 2)
    assert told.usage.output_tokens == len("Sunny.")


def test_thoughts_text_and_calls_are_blocks_streamed_or_not(
    client: Anthropic, engine: ScriptedEngine
) -> None:
    engine.script = Script(CALL)
    whole = client.messages.create(**asked(tools=[TOOL]))
    with client.messages.stream(**asked(tools=[TOOL])) as stream:
        streamed = stream.get_final_message()
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    thinking, text, call = whole.content
    assert (thinking.thinking, text.text, call.name, call.input) == (
        "Rome?",
        "Let me see.",
        "weather",
        {"city": "Rome"},
    )
    assert (whole.stop_reason, streamed.stop_reason) == ("tool_use", "tool_use")
    assert without_ids(streamed) == without_ids(whole)


def without_ids(message: Any) -> Any:
    """Return the part that is equal in two answers to the same request."""
    return [{**block.to_dict(), "id": None} for block in message.content], message.usage.to_dict()


def test_a_conversation_continues_with_an_answer_and_a_tools_result(
    client: Anthropic, engine: ScriptedEngine
) -> None:
    engine.script = Script(CALL)
    first = client.messages.create(**asked(tools=[TOOL]))
    engine.script = Script("21 degrees.")
    result: Any = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "21"}],
    }
    client.messages.create(
        **asked(
            tools=[TOOL], messages=[*USER, {"role": "assistant", "content": first.content}, result]
        )
    )
    assert engine.last_prompt.endswith(f"<assistant>{CALL}\n<tool>21\n<assistant>")


def test_the_beginning_of_an_answer_is_gone_on_with(
    client: Anthropic, engine: ScriptedEngine
) -> None:
    client.messages.create(**asked(messages=[*USER, {"role": "assistant", "content": "It is"}]))
    assert engine.last_prompt.endswith("<assistant>It is")


def test_a_stop_sequence_is_reported(client: Anthropic, engine: ScriptedEngine) -> None:
    engine.script = Script("Sunny", stop_reason=".")
    told = client.messages.create(**asked(stop_sequences=["."]))
    assert (told.stop_reason, told.stop_sequence) == ("stop_sequence", ".")
    assert engine.last.params.stop == (".",)


def test_an_answer_that_is_cut_says_so(client: Anthropic, engine: ScriptedEngine) -> None:
    engine.script = Script("Sunny.")
    with client.messages.stream(**asked(max_tokens=3)) as stream:
        told = stream.get_final_message()
    assert (told.stop_reason, told.content[0].text) == ("max_tokens", "Sun")  # type: ignore[union-attr]


def test_thinking_can_be_turned_off(client: Anthropic, engine: ScriptedEngine) -> None:
    client.messages.create(**asked(thinking={"type": "disabled"}))
    assert engine.last_prompt.endswith("<assistant><think></think>")


def test_tokens_are_counted_as_the_model_reads_them(
    client: Anthropic, engine: ScriptedEngine
) -> None:
    count = client.messages.count_tokens(model="fake", messages=USER, tools=[TOOL]).input_tokens
    told = client.messages.create(**asked(tools=[TOOL]))
    assert count == told.usage.input_tokens + (told.usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/messages", 200),
        ("/v1/messages", 400),
        ("/v1/messages/count_tokens", 200),
        ("/v1/messages/x", 404),
    ],
)
def test_each_answer_has_anthropics_name_of_its_id(
    url: str, engine: ScriptedEngine, path: str, status: int
) -> None:
    body = asked(**({"top_p": 9} if status == 400 else {}))
    told = httpx.post(
        url + path, json=body, headers={"x-api-key": "secret", "x-request-id": "mine"}
    )
    assert (told.status_code, told.headers["request-id"], told.headers["x-request-id"]) == (
        status,
        "mine",
        "mine",
    )
    assert httpx.post(url + path, json=body).headers["request-id"]


@pytest.mark.anyio
@pytest.mark.parametrize("http", ["httptools", DirectProtocol])
async def test_a_silent_stream_pings_until_its_end(
    fake: Callable[..., FakeEngine], monkeypatch: pytest.MonkeyPatch, http: Any
) -> None:
    monkeypatch.setattr("dovetail_server.streams.PING_S", 0.03)
    engine = fake(paced=True)
    body = asked(stream=True, chat_template="{{ messages[0].content }}")

    async def first_token() -> None:
        await engine.until_requests(1)
        engine.step()

    async with serving(engine, http=http) as url, httpx.AsyncClient(base_url=url) as client:
        beginning = asyncio.create_task(first_token())
        async with client.stream("POST", "/v1/messages", json=body) as answer:
            lines = answer.aiter_lines()
            kinds = await events_until(lines, "ping", 3)
            engine.die()
            kinds += await events_until(lines, "error", 1)
        await beginning
    assert kinds[:2] == ["message_start", "ping"]


@pytest.mark.anyio
async def test_a_stream_whose_client_goes_away_leaves_no_timer(
    fake: Callable[..., FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[EventStream] = []
    ping = EventStream.ping
    monkeypatch.setattr(
        EventStream, "ping", lambda stream, data: (streams.append(stream), ping(stream, data))
    )
    engine = fake(paced=True)
    body = asked(stream=True, chat_template="{{ messages[0].content }}")
    async with serving(engine) as url, httpx.AsyncClient(base_url=url) as client:
        asking = asyncio.create_task(client.post("/v1/messages", json=body))
        await engine.until_requests(1)
        engine.step()
        asking.cancel()
        await engine.until_aborted(1)
        assert streams[0]._timer is None


async def events_until(lines: AsyncIterator[str], kind: str, number: int) -> list[str]:
    """Return the types of a stream's events, up to this many of one type."""
    kinds: list[str] = []
    async for line in lines:
        if line.startswith("event: "):
            kinds.append(line.removeprefix("event: "))
            if kinds.count(kind) == number:
                return kinds
    raise AssertionError(f"the stream ended after {kinds}")


def test_errors_have_anthropics_shape(anthropic: ModuleType, client: Anthropic, url: str) -> None:
    with pytest.raises(anthropic.NotFoundError, match="isn't served here"):
        client.messages.create(**asked(model="claude"))
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**asked(tool_choice={"type": "any"}))
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    stranger = anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as kept_out:
        stranger.messages.count_tokens(model="fake", messages=USER)
    assert kept_out.value.body["type"] == "error"  # type: ignore[index]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop"),
        ({"messages": []}, "conversation"),
        ({"mesages": []}, "mesages: unknown parameter, did you mean messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            r"messages\[0\]\.content\[0\]\.source\.type: it is required",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\]"),
    ],
)
def test_a_wrong_field_is_named(url: str, fields: dict[str, Any], named: str) -> None:
    told = httpx.post(f"{url}/v1/messages", json=asked(**fields), headers={"x-api-key": "secret"})
    assert told.status_code == 400
    assert re.search(named, told.json()["error"]["message"])


def test_a_stream_whose_engine_dies_ends_with_an_error(
    anthropic: ModuleType, client: Anthropic, engine: ScriptedEngine
) -> None:
    engine.script = Script("Sunny.", fails=True)
    with (
        pytest.raises(anthropic.APIStatusError, match="the engine died"),
        client.messages.stream(**asked()) as stream,
    ):
        stream.get_final_message()


def test_an_engine_that_is_dead_is_reported_by_the_status(
    anthropic: ModuleType, client: Anthropic, engine: ScriptedEngine
) -> None:
    engine.script = Script("", fails=True)
    for ask in (
        client.messages.create,
        lambda **fields: client.messages.create(**fields, stream=True),
    ):
        with pytest.raises(anthropic.APIStatusError) as dead:
            ask(**asked())
        assert (dead.value.status_code, dead.value.body["error"]["type"]) == (
            503,
            "overloaded_error",
        )  # type: ignore[index]
