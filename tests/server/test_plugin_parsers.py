"""Parsers of plugins: chosen by name or by the chat template, and guarded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest

from dovetail.api.parser import Content
from dovetail.errors import ConfigError, DovetailError, PluginError
from dovetail.request.outputs import CompletionOutput
from dovetail.request.structured import Structured
from dovetail_server.app import create_app
from dovetail_server.parsers.reader import AnswerReader
from dovetail_server.settings import ServerSettings
from tests.registry.fakes import Site, components
from tests.registry.site import site  # noqa: F401
from tests.server.answers import parser_named
from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving

pytestmark = pytest.mark.anyio

PARSERS = """
from dataclasses import replace
from dovetail.api.parser import Content, ParserCapabilities, Reasoning, ToolCallArguments, ToolCallStart
from dovetail_server.parsers.hermes import HermesCalls
from dovetail_server.parsers.think import ThinkReasoning
from pydantic import BaseModel, ConfigDict

class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    depth: int = 1

class Calls(HermesCalls):
    capabilities = ParserCapabilities(calls=True, templates=(("@calls",),))

class Raises(HermesCalls):
    def feed(self, text):
        if "!" in text:
            raise ValueError("no exclamations")
        return super().feed(text)

class Exits(HermesCalls):
    def __init__(self, options, context):
        raise SystemExit("no")

class Repeats(HermesCalls):
    def feed(self, text):
        return [event for event in super().feed(text) for _ in range(2)]

class Odd(HermesCalls):
    def finish(self):
        return ["the end"]

class Halves(HermesCalls):
    def feed(self, text):
        return [Content(text + "\\ud800")]

class Twins(HermesCalls):
    def feed(self, text):
        return [ToolCallStart(index, "one", "f") for index in range(2)]

class Yields(HermesCalls):
    def feed(self, text):
        yield from super().feed(text)

class Flags(HermesCalls):
    @property
    def in_call(self):
        raise ValueError("who knows")

class Forms(HermesCalls):
    @classmethod
    def call_form(cls, template):
        raise ValueError("no form")

class Brackets(HermesCalls):
    capabilities = ParserCapabilities(calls=True, reasoning=("[R]", "[/R]"), templates=(("[R]",),))
    inside = False
    in_reasoning = property(lambda self: self.inside)

    def feed(self, text):
        if text == "[R]":
            self.inside = True
        elif text == "[/R]":
            self.inside = False
        else:
            return [Reasoning(text)] if self.inside else super().feed(text)
        return []
"""
NAMES = (
    "Calls",
    "Raises",
    "Exits",
    "Repeats",
    "Odd",
    "Halves",
    "Twins",
    "Yields",
    "Flags",
    "Forms",
    "Brackets",
)
SPECS = [
    f'kind="parser", name="{name.lower()}", target="acme_parsers:{name}", '
    f'options="acme_parsers:Options"'
    for name in NAMES
]
BROKEN = 'kind="parser", name="broken", target="nowhere:At"'
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TEMPLATE = "{{ messages[0].content }}{% if tools %}{{ tools | length }}{% endif %}"
MARKED = TEMPLATE + "{# @calls #}"


@pytest.fixture
def acme(site: Site) -> Site:  # noqa: F811
    site.install(
        "dovetail-acme",
        modules={"acme_plugin": components(*SPECS, BROKEN), "acme_parsers": PARSERS},
    )
    return site


def body(**fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [TOOL],
        "chat_template": MARKED,
        **fields,
    }


async def asked(
    engine: FakeEngine, settings: ServerSettings | None = None, **fields: Any
) -> httpx.Response:
    async with serving(engine, settings) as url, httpx.AsyncClient(base_url=url) as http:
        return await http.post("/v1/chat/completions", json=body(**fields))


def named(parser: str) -> ServerSettings:
    return ServerSettings(tool_parser=parser)


@pytest.mark.usefixtures("acme")
async def test_a_template_that_no_built_in_matches_finds_the_parser_of_a_plugin(
    fake: Callable[..., FakeEngine], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "dovetail.server")
    answer = (await asked(fake("So", *CALL))).json()["choices"][0]
    assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", "So")
    assert answer["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert "using parser dovetail-acme:calls: the chat template has its marks" in caplog.text
    assert "parser dovetail-acme:broken isn't considered for `auto`" in caplog.text


@pytest.mark.usefixtures("acme")
async def test_a_built_in_comes_before_a_plugin_and_plugins_that_are_not_allowed_do_not_come(
    fake: Callable[..., FakeEngine],
) -> None:
    mistral = await asked(fake("[TOOL_CALLS]f{}"), chat_template=MARKED + "{# [TOOL_CALLS] #}")
    assert mistral.json()["choices"][0]["finish_reason"] == "tool_calls"
    engine = fake(CALL)
    engine.info = dataclasses.replace(engine.info, allowed_plugins=())
    assert (await asked(engine)).json()["choices"][0]["message"]["content"] == CALL


async def test_two_plugins_that_match_are_refused_with_both_names(
    acme: Site, fake: Callable[..., FakeEngine]
) -> None:
    acme.install(
        "dovetail-other",
        modules={
            "other_plugin": components('kind="parser", name="calls", target="other_parsers:Calls"'),
            "other_parsers": PARSERS,
        },
    )
    refused = await asked(fake(CALL))
    assert refused.status_code == 400
    assert (
        "it matches the parsers dovetail-acme:calls and dovetail-other:calls: choose one with "
        "--tool-parser" in refused.text
    )
    chosen = await asked(fake(CALL), named("dovetail-acme:calls"))
    assert chosen.json()["choices"][0]["finish_reason"] == "tool_calls"
    with pytest.raises(ConfigError, match="dovetail-acme:calls and dovetail-other:calls"):
        create_app(fake(), ServerSettings(chat_template=MARKED))


@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize(
    ("parser", "error", "told"),
    [
        ("calls", PluginError, None),
        ("dovetail-acme:calls", None, None),
        ("{name: calls, depth: 2}", None, None),
        (
            "{name: calls, dept: 2}",
            ConfigError,
            "tool_parser.dept: unknown option, did you mean depth?",
        ),
        ("dovetail-acme:broken", PluginError, "importing nowhere failed"),
        ("dovetail-acm:calls", PluginError, "did you mean dovetail-acme:calls?"),
    ],
)
async def test_a_name_is_found_as_that_of_any_component(
    parser: str,
    error: type[DovetailError] | None,
    told: str | None,
    fake: Callable[..., FakeEngine],
) -> None:
    if told is None:
        create_app(fake(), named(parser))
        return
    assert error is not None
    with pytest.raises(error) as refused:
        create_app(fake(), named(parser))
    assert told in str(refused.value)


@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize(
    ("parser", "text", "content"),
    [
        ("raises", "Ah <tool!" + CALL, "Ah <tool!" + CALL),
        ("raises", ("Ah <tool", "!", CALL), "Ah <tool!" + CALL),
        ("halves", "Ah", "Ah"),
        ("twins", "Ah", "Ah"),
        ("exits", "Ah! " + CALL, "Ah! " + CALL),
        ("odd", "Ah", "Ah"),
    ],
)
async def test_the_answer_of_a_parser_that_fails_is_content_from_there_and_the_log_names_it_once(
    parser: str,
    text: Sequence[str],
    content: str,
    fake: Callable[..., FakeEngine],
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = fake(*text)
    async with serving(engine, named(parser)) as url, httpx.AsyncClient(base_url=url) as http:
        answers = [await http.post("/v1/chat/completions", json=body()) for _ in range(2)]
    assert [one.json()["choices"][0]["message"]["content"] for one in answers] == [content] * 2
    assert [one.json()["choices"][0]["finish_reason"] for one in answers] == ["stop"] * 2
    assert caplog.text.count(f"parser dovetail-acme:{parser} failed") == 1


@pytest.mark.usefixtures("acme")
async def test_a_call_that_begins_twice_is_no_call(
    fake: Callable[..., FakeEngine], caplog: pytest.LogCaptureFixture
) -> None:
    answer = (await asked(fake(CALL), named("repeats"))).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == (CALL, "stop")
    assert "it emitted ToolCallStart(index=0" in caplog.text


@pytest.mark.usefixtures("acme")
async def test_events_may_be_yielded(fake: Callable[..., FakeEngine]) -> None:
    answer = (await asked(fake("So", CALL), named("yields"))).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("So", "tool_calls")


@pytest.mark.usefixtures("acme")
async def test_a_parser_that_cannot_say_where_it_is_ends_no_answer(
    fake: Callable[..., FakeEngine], caplog: pytest.LogCaptureFixture
) -> None:
    assert (await asked(fake(CALL), named("flags"))).json()["choices"][0][
        "finish_reason"
    ] == "tool_calls"
    assert (
        "parser dovetail-acme:flags failed, and its in_call counts as False: ValueError: who knows"
        in caplog.text
    )


@pytest.mark.usefixtures("acme")
async def test_a_form_of_calls_that_fails_refuses_the_demand(
    fake: Callable[..., FakeEngine],
) -> None:
    refused = await asked(fake(CALL), named("forms"), tool_choice="required")
    assert refused.status_code == 400
    assert "tool parser dovetail-acme:forms raised in call_form()" in refused.text


@pytest.mark.usefixtures("acme")
async def test_one_parser_may_find_both_and_its_marks_begin_and_end_the_reasoning(
    fake: Callable[..., FakeEngine],
) -> None:
    engine = fake("[R]", "Hm", "[/R]", "So", CALL)
    answer = (await asked(engine, chat_template=TEMPLATE + "[R]")).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"], len(message["tool_calls"])) == (
        "Hm",
        "So",
        1,
    )
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    engine = fake("x")
    await asked(
        engine, chat_template=TEMPLATE + "[R]", tools=None, response_format={"type": "json_object"}
    )
    structured = engine.submitted[0].params.structured
    assert isinstance(structured, Structured)
    assert structured.after == "[/R]"


def test_a_megabyte_of_what_may_be_a_mark_is_content() -> None:
    reader, text = AnswerReader(parser_named("hermes", "think", tools=[TOOL])), "<" * 2**20
    events = [
        event
        for begin in range(0, len(text), 4096)
        for event in reader.read(CompletionOutput(0, text[begin : begin + 4096], ()))
    ]
    events += reader.read(CompletionOutput(0, "", (), finish_reason="stop"))
    assert "".join(event.text for event in events if isinstance(event, Content)) == text
