"""Coding agents: whole requests in the shapes of Claude Code's and Codex's are served, whatever
they ask of the model's reasoning is done or named as ignored, and what can't be done is refused
with what would be right."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest
from starlette.testclient import TestClient

from dovetail.config.limits import Limits
from dovetail.front.chat import ChatFrontEnd
from dovetail.request.structured import Structured
from dovetail_server.app import create_app
from dovetail_server.protocol.reasoning import EFFORT_TOKENS, reads
from dovetail_server.protocol.response_tools import ResponseTools
from dovetail_server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import demo_tokenizer, serving

MESSAGES_OF = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{% for call "
    "in message.tool_calls %}{{ call }}{% endfor %}\n{% endfor %}"
)
HEAD = "{{ tools }}{# <tool_call> #}" + MESSAGES_OF
SWITCHED = (
    HEAD
    + "assistant:{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>{% "
    "endif %}"
)
OFF_BY_DEFAULT = (
    HEAD
    + "{% if not thinking is defined %}{% set thinking = false %}{% endif %}assistant:{{ '<think>' "
    "if thinking else '</think>' }}"
)
LEVELS = HEAD + "Reasoning: {{ reasoning_effort | default('medium') }}\nassistant:"
LEVELS_OR_NONE = (
    HEAD
    + "{% if reasoning_effort not in ['none', 'high'] %}{% endif %}Reasoning: {{ reasoning_effort "
    "}}\nassistant:"
)
ALWAYS = HEAD + "assistant:<think>"
PLAIN = HEAD + "assistant:"
CODER = HEAD.replace("<tool_call>", "<tool_call> <function=") + "assistant:"

CLAUDE_CODE: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 32_000,
    "stream": True,
    "system": [
        {
            "type": "text",
            "text": "You are a coding agent.",
            "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"},
        },
        {"type": "text", "text": "Working directory: /src", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<reminder>Be brief.</reminder>"},
                {"type": "text", "text": "List the files"},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "A listing helps.", "signature": "c2ln"},
                {"type": "text", "text": "I look."},
                {
                    "type": "tool_use",
                    "id": "toolu_1",
                    "name": "Bash",
                    "input": {"command": "ls"},
                    "caller": {"type": "direct"},
                },
                {
                    "type": "tool_use",
                    "id": "toolu_2",
                    "name": "ToolSearch",
                    "input": {"query": "select:Notebook"},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "a.py"}],
                    "is_error": False,
                },
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "content": [{"type": "tool_reference", "tool_name": "Notebook"}],
                },
                {"type": "text", "text": "Go on", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ],
    "tools": [
        {
            "name": "Bash",
            "description": "Run a command",
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
                "required": ["command"],
                "additionalProperties": False,
            },
            "eager_input_streaming": True,
        },
        {
            "name": "ToolSearch",
            "description": "Find tools",
            "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
        {
            "name": "Notebook",
            "input_schema": {"type": "object"},
            "defer_loading": True,
            "cache_control": {"type": "ephemeral"},
        },
    ],
    "metadata": {"user_id": "user_1_account_2_session_3"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
}
BETAS = "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,effort-2025-11-24,advanced-tool-use-2025-11-20"
CODEX: dict[str, Any] = {
    "model": "fake",
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Sandboxed."}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "List the files"}],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "ls"}],
            "encrypted_content": None,
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "c1",
            "name": "shell",
            "arguments": '{"command":["ls"]}',
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on"}]},
    ],
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "Run a command",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "array", "items": {"type": "string"}}},
                "required": ["command"],
            },
        },
        {
            "type": "function",
            "name": "late",
            "parameters": {"type": "object"},
            "strict": False,
            "defer_loading": True,
        },
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "detailed"},
    "store": True,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "session-1",
    "client_metadata": {"session": "1"},
    "service_tier": "priority",
    "text": {"verbosity": "low"},
}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "reasoning_effort": "low",
    "verbosity": "low",
    "store": True,
    "metadata": {"run": "1"},
}
SHAPES = {"/v1/messages": CLAUDE_CODE, "/v1/responses": CODEX, "/v1/chat/completions": CHAT}
SAID = {
    "/v1/messages": "metadata, system[].cache_control, messages[].content[].cache_control, "
    "tools[].cache_control, context_management, "
    "tools[].defer_loading, tools[].eager_input_streaming",
    "/v1/responses": "prompt_cache_key, store, service_tier, client_metadata, text.verbosity, "
    "reasoning.summary, tools[].defer_loading",
    "/v1/chat/completions": "metadata, store, verbosity",
}


@pytest.fixture(scope="module")
def front_end() -> Iterator[ChatFrontEnd]:
    """Renders for all engines here, since its processes take a while to start."""
    shared = ChatFrontEnd(demo_tokenizer(), Limits(), 4096)
    yield shared
    shared.close()


@pytest.fixture
def ask(
    fake: Callable[..., FakeEngine], front_end: ChatFrontEnd
) -> Callable[..., tuple[httpx.Response, FakeEngine]]:
    """Sends a shape with changes to a faked engine; the answer, and the engine."""

    def asking(
        path: str,
        template: str = SWITCHED,
        pieces: tuple[str, ...] = (),
        *,
        masks: bool = True,
        mode: str = "ignore",
        **changes: Any,
    ) -> Any:
        engine = fake(*pieces)
        engine.chat = front_end
        engine.info = dataclasses.replace(
            engine.info, intake=dataclasses.replace(engine.info.intake, has_masks=masks)
        )
        body = {**copy.deepcopy(SHAPES[path]), "chat_template": template, **changes}
        settings = ServerSettings(advisory_fields=mode)  # type: ignore[arg-type]
        return TestClient(create_app(engine, settings)).post(
            path, json=body, headers={"anthropic-beta": BETAS}
        ), engine

    return asking


def message_of(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


# Whole requests


@pytest.mark.anyio
async def test_claude_codes_requests_are_answered_by_anthropics_client(
    anthropic: ModuleType,
    fake: Callable[..., FakeEngine],
) -> None:
    engine = fake(
        "<think>",
        "Hm.",
        "</think>",
        "Done",
        '<tool_call>{"name": "Bash", "arguments": {"command": "ls"}}',
        "</tool_call>",
    )
    fields = {name: value for name, value in CLAUDE_CODE.items() if name != "stream"}
    async with (
        serving(engine) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as client,
    ):
        async with client.beta.messages.stream(
            **fields, betas=BETAS.split(","), extra_body={"chat_template": SWITCHED}
        ) as stream:
            answer = await stream.get_final_message()
            assert stream.response.headers["x-dovetail-ignored"] == SAID["/v1/messages"]
        count = await client.beta.messages.count_tokens(
            **{
                name: value
                for name, value in fields.items()
                if name not in ("max_tokens", "metadata")
            },
            extra_body={"chat_template": SWITCHED},
        )
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    assert answer.stop_reason == "tool_use"
    [request] = engine.submitted
    assert count.input_tokens == len(
        engine.tokenizer.encode(str(request.prompt).removesuffix("<think>\n"), special_tokens=False)
    )
    for text in ("You are a coding agent.", "Be brief.", "Notebook", "a.py", "Go on"):
        assert text in str(request.prompt)
    assert request.params.structured == Structured(
        after="</think>", after_tokens=EFFORT_TOKENS["medium"]
    )


@pytest.mark.anyio
async def test_codexs_requests_are_answered_by_openais_client(
    fake: Callable[..., FakeEngine],
) -> None:
    call = '<tool_call>{"name": "shell", "arguments": {"command": ["ls"]}}</tool_call>'
    engine = fake("<think>", "Hm.", "</think>", "Done", call)
    fields = {name: value for name, value in CODEX.items() if name != "client_metadata"}
    further = {"chat_template": SWITCHED, "client_metadata": CODEX["client_metadata"]}
    async with (
        serving(engine) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        stream = await client.responses.create(**fields, extra_body=further)
        assert stream.response.headers["x-dovetail-ignored"] == SAID["/v1/responses"]
        events = [event async for event in stream]
    assert events[-1].type == "response.completed"
    answer = events[-1].response
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert not answer.store, "nothing is stored"
    [request] = engine.submitted
    assert request.params.structured == Structured(
        after="</think>", after_tokens=EFFORT_TOKENS["medium"]
    )


@pytest.mark.parametrize("path", SHAPES)
def test_ignored_fields_are_named_once_in_the_log(
    fake: Any, front_end: ChatFrontEnd, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = fake()
    engine.chat = front_end
    client = TestClient(create_app(engine))
    with caplog.at_level(logging.WARNING, "dovetail"):
        for _ in range(3):
            answer = client.post(path, json={**SHAPES[path], "chat_template": SWITCHED})
            assert answer.headers["x-dovetail-ignored"] == SAID[path]
    said = [
        record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()
    ]
    assert [line.split()[1] for line in said] == SAID[path].split(", ")


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/v1/messages", "context_management"),
        ("/v1/responses", "store"),
        ("/v1/chat/completions", "store"),
    ],
)
def test_who_wants_no_ignored_fields_gets_a_400(ask: Any, path: str, named: str) -> None:
    answer, engine = ask(path, mode="refuse")
    assert message_of(answer).startswith(f"{named}: ")
    assert "advisory_fields: refuse" in message_of(answer)
    assert not engine.submitted


# Tools of Codex


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
FURTHER: list[dict[str, Any]] = [
    {
        "type": "namespace",
        "name": "mcp__docs",
        "description": "Documents.",
        "tools": [
            {
                "type": "function",
                "name": "find",
                "description": "Find one.",
                "parameters": {"type": "object", "properties": {"q": {}}},
            },
            {"type": "custom", "name": "note"},
        ],
    },
    {"type": "custom", "name": "apply_patch", "description": "Edit files.", "format": GRAMMAR},
    {"type": "local_shell"},
    {"type": "tool_search", "execution": "client", "description": "Find tools."},
]
# what the model calls, with what, and the item that the client gets
CALLED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a function": (
        "shell",
        '{"command": ["ls"]}',
        {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}'},
    ),
    "a function of a namespace": (
        "mcp__docs__find",
        '{"q": 1}',
        {
            "type": "function_call",
            "namespace": "mcp__docs",
            "name": "find",
            "arguments": '{"q": 1}',
        },
    ),
    "a custom tool of a namespace": (
        "mcp__docs__note",
        '{"input": "a"}',
        {"type": "custom_tool_call", "namespace": "mcp__docs", "name": "note", "input": "a"},
    ),
    "a custom tool": (
        "apply_patch",
        '{"input": "*** Begin Patch\\n*** End Patch"}',
        {
            "type": "custom_tool_call",
            "name": "apply_patch",
            "input": "*** Begin Patch\n*** End Patch",
        },
    ),
    "a custom tool with other arguments": (
        "apply_patch",
        '{"text": 1}',
        {"type": "custom_tool_call", "name": "apply_patch", "input": '{"text": 1}'},
    ),
    "a local shell": (
        "local_shell",
        '{"command": ["ls"]}',
        {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"], "env": {}}},
    ),
    "a search for tools": (
        "tool_search",
        '{"query": "x"}',
        {"type": "tool_search_call", "execution": "client", "arguments": {"query": "x"}},
    ),
}


@pytest.mark.anyio
@pytest.mark.parametrize("name", CALLED)
async def test_calls_of_codexs_tools_come_in_their_own_form_and_can_be_sent_back(
    fake: Callable[..., FakeEngine], name: str
) -> None:
    function, arguments, expected = CALLED[name]
    engine = fake(f'<tool_call>{{"name": "{function}", "arguments": {arguments}}}</tool_call>')
    fields = {
        key: value
        for key, value in CODEX.items()
        if key not in ("client_metadata", "stream", "reasoning")
    }
    asked: Any = {
        **fields,
        "tools": [*CODEX["tools"], *FURTHER],
        "extra_body": {"chat_template": PLAIN},
    }
    async with (
        serving(engine) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        whole = await client.responses.create(**asked)
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        [item] = whole.output
        given = item.model_dump(exclude_unset=True)
        assert {
            key: value for key, value in given.items() if key not in ("id", "status", "call_id")
        } == expected
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [one.model_dump(exclude_unset=True, exclude={"id", "call_id"}) for one in done] == [
            {key: value for key, value in given.items() if key not in ("id", "call_id")}
        ]
        result = {"type": RESULTS[given["type"]], "call_id": given["call_id"], "output": "well"}
        if given["type"] == "tool_search_call":
            result = {**result, "tools": [{"type": "function", "name": "found"}]}
            del result["output"]
        again = await client.responses.create(
            **{**asked, "input": [*CODEX["input"], given, result]}
        )
    assert again.status == "completed"
    prompt = str(engine.submitted[-1].prompt)
    assert f"'name': '{function}'" in prompt.rpartition("Go on")[2], "the call"
    assert prompt.rstrip().endswith(("wellassistant:", "Found: foundassistant:"))
    assert given["type"] != "tool_search_call" or "'found'" in prompt.partition("developer: ")[0], (
        "what was found is a tool"
    )


RESULTS = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
    "local_shell_call": "local_shell_call_output",
    "tool_search_call": "tool_search_output",
}


def test_the_model_sees_codexs_tools_as_functions(ask: Any) -> None:
    answer, engine = ask("/v1/responses", PLAIN, tools=FURTHER, stream=False)
    assert answer.status_code == 200, answer.text
    prompt = engine.submitted[0].prompt
    for text in (
        "'mcp__docs__find'",
        "Documents.\\n\\nFind one.",
        "'apply_patch'",
        "*** Begin Patch",
        "'local_shell'",
        "'tool_search'",
    ):
        assert text in prompt
    assert answer.json()["tools"] == FURTHER


def test_a_namespaces_description_is_not_multiplied_by_its_tools() -> None:
    tools = [{"type": "function", "name": f"f{index}"} for index in range(1000)]
    read = ResponseTools(
        [{"type": "namespace", "name": "n", "description": "x" * 100_000, "tools": tools}]
    ).functions
    assert len(read) == 1000
    assert sum(len(str(function.template)) for function in read) < 300_000


def test_conversations_are_compacted_by_the_client(fake: Callable[..., FakeEngine]) -> None:
    answer = TestClient(create_app(fake())).post(
        "/v1/responses/compact", json={"model": "fake", "input": CODEX["input"]}
    )
    assert "ask for a summary in /v1/responses" in message_of(answer)


def test_a_custom_tool_can_be_demanded(ask: Any) -> None:
    answer, engine = ask(
        "/v1/responses", PLAIN, tools=FURTHER, tool_choice={"type": "custom", "name": "apply_patch"}
    )
    assert answer.status_code == 200, answer.text
    assert "apply_patch" in engine.submitted[0].params.structured.text


# Reasoning


def thinks(path: str, effort: str) -> Any:
    """Return a body's fields that ask for an effort."""
    return {
        "/v1/messages": {"output_config": {"effort": effort}},
        "/v1/responses": {"reasoning": {"effort": effort, "summary": "detailed"}},
        "/v1/chat/completions": {"reasoning_effort": effort},
    }[path]


@pytest.mark.parametrize("path", SHAPES)
@pytest.mark.parametrize("effort", EFFORT_TOKENS)
def test_effort_limits_the_tokens_of_reasoning(ask: Any, path: str, effort: str) -> None:
    _, engine = ask(path, SWITCHED, **thinks(path, effort))
    tokens = EFFORT_TOKENS[effort]
    assert engine.submitted[0].params.structured == (
        None if tokens is None else Structured(after="</think>", after_tokens=tokens)
    )


@pytest.mark.parametrize("path", SHAPES)
@pytest.mark.parametrize(
    ("effort", "level"),
    [("minimal", "low"), ("low", "low"), ("medium", "medium"), ("xhigh", "high"), ("max", "high")],
)
def test_a_template_that_knows_an_effort_gets_it(
    ask: Any, path: str, effort: str, level: str
) -> None:
    answer, engine = ask(path, LEVELS, **thinks(path, effort))
    assert f"Reasoning: {level}\n" in engine.submitted[0].prompt
    assert engine.submitted[0].params.structured is None
    assert answer.headers["x-dovetail-ignored"] == SAID[path]


OFF = [
    ("/v1/messages", {"thinking": {"type": "disabled"}}),
    *((path, thinks(path, "none")) for path in SHAPES),
]


@pytest.mark.parametrize(("path", "fields"), OFF)
@pytest.mark.parametrize(
    ("template", "end"),
    [
        (SWITCHED, "</think>"),
        (OFF_BY_DEFAULT, "</think>"),
        (LEVELS_OR_NONE, "none\nassistant:"),
        (PLAIN, "assistant:"),
    ],
)
def test_reasoning_is_turned_off_by_what_the_template_has(
    ask: Any, path: str, fields: dict[str, Any], template: str, end: str
) -> None:
    answer, engine = ask(path, template, **fields)
    assert answer.status_code == 200, answer.text
    assert engine.submitted[0].prompt.endswith(end)
    assert engine.submitted[0].params.structured is None


@pytest.mark.parametrize(("path", "fields"), OFF)
@pytest.mark.parametrize("template", [ALWAYS, LEVELS])
def test_reasoning_that_cannot_be_turned_off_is_said(
    ask: Any, path: str, fields: dict[str, Any], template: str
) -> None:
    answer, engine = ask(path, template, **fields)
    said = message_of(answer)
    assert said.startswith(
        ("thinking: ", "output_config.effort: ", "reasoning.effort: ", "reasoning_effort: ")
    )
    assert "no variable that turns its reasoning off" in said
    assert not engine.submitted


@pytest.mark.parametrize("template", [SWITCHED, OFF_BY_DEFAULT, ALWAYS])
def test_a_budget_turns_reasoning_on_and_ends_it(ask: Any, template: str) -> None:
    answer, engine = ask(
        "/v1/messages",
        template,
        thinking={"type": "enabled", "budget_tokens": 100},
        output_config=None,
    )
    assert engine.submitted[0].prompt.rstrip().endswith("<think>")
    assert engine.submitted[0].params.structured == Structured(after="</think>", after_tokens=100)
    assert "thinking" not in answer.headers["x-dovetail-ignored"].split(", ")


def test_the_smaller_of_budget_and_effort_counts(ask: Any) -> None:
    for budget, tokens in ((100, 100), (5000, EFFORT_TOKENS["low"])):
        _, engine = ask(
            "/v1/messages",
            thinking={"type": "enabled", "budget_tokens": budget},
            output_config={"effort": "low"},
        )
        assert engine.submitted[0].params.structured.after_tokens == tokens


@pytest.mark.parametrize(
    ("path", "template", "fields", "named"),
    [
        (
            "/v1/messages",
            PLAIN,
            {"thinking": {"type": "enabled", "budget_tokens": 100}},
            ["thinking", "output_config.effort"],
        ),
        (
            "/v1/messages",
            LEVELS,
            {"thinking": {"type": "enabled", "budget_tokens": 100}},
            ["thinking"],
        ),
        ("/v1/messages", PLAIN, {"output_config": {"effort": "max"}}, ["output_config.effort"]),
        (
            "/v1/messages",
            SWITCHED,
            {"chat_template_kwargs": {"enable_thinking": False}},
            ["output_config.effort"],
        ),
        ("/v1/responses", PLAIN, {}, ["reasoning.effort"]),
        ("/v1/chat/completions", PLAIN, {}, ["reasoning_effort"]),
    ],
)
def test_what_a_model_without_reasoning_cannot_do_is_named(
    ask: Any, path: str, template: str, fields: dict[str, Any], named: list[str]
) -> None:
    answer, engine = ask(path, template, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-dovetail-ignored"].removeprefix(f"{SAID[path]}, ").split(", ") == named
    assert engine.submitted[0].params.structured is None


def test_an_engine_that_cannot_mask_tokens_says_so_of_the_effort(ask: Any) -> None:
    answer, engine = ask("/v1/chat/completions", masks=False)
    assert answer.headers["x-dovetail-ignored"].endswith(", reasoning_effort")
    assert engine.submitted[0].params.structured is None


def test_the_requests_own_variables_come_first(ask: Any) -> None:
    _, engine = ask(
        "/v1/chat/completions", SWITCHED, chat_template_kwargs={"enable_thinking": False}
    )
    assert engine.submitted[0].prompt.endswith("</think>")
    _, engine = ask(
        "/v1/chat/completions", LEVELS, chat_template_kwargs={"reasoning_effort": "deep"}
    )
    assert "Reasoning: deep\n" in engine.submitted[0].prompt


@pytest.mark.parametrize(
    ("template", "reading"),
    [
        ("{% if thinking %}x{% endif %}", True),
        ("{{ thinking }}", True),
        ("{%- if x and not thinking is defined -%}", True),
        ("thinking", False),
        ("{# thinking #}", False),
        ("{{ message.thinking }}", False),
        ("{{ 'no thinking here' }}", False),
        ("{% set thinking = true %}", False),
        ("{{ enable_thinking }}", False),
        ("{{ thinking_budget }}", False),
    ],
)
def test_a_variable_is_found_where_a_template_looks_at_it(template: str, reading: bool) -> None:
    assert reads(template, "thinking") == reading


def test_a_limited_answer_ends_its_reasoning_in_time(server_url: str) -> None:
    body = {
        "messages": [{"role": "user", "content": "ROMEO"}],
        "chat_template": ALWAYS,
        "max_tokens": 40,
        "temperature": 0,
    }
    free = httpx.post(f"{server_url}/v1/messages", json=body).json()
    answer = httpx.post(
        f"{server_url}/v1/messages",
        json={**body, "thinking": {"type": "enabled", "budget_tokens": 6}},
    ).json()
    assert [block["type"] for block in free["content"]] == ["thinking"], (
        "the demo model doesn't end its reasoning by itself"
    )
    [thought, text] = answer["content"]
    assert free["content"][0]["thinking"].startswith(thought["thinking"])
    assert 0 < len(thought["thinking"]) < len(free["content"][0]["thinking"])
    assert text["text"]


# One call


SINGLE = {
    "/v1/responses": {"parallel_tool_calls": False},
    "/v1/messages": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
}
CALL = "<tool_call><function=shell><parameter=command>ls</parameter></function></tool_call>"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "single"), SINGLE.items())
def test_a_single_call_needs_no_grammar(
    ask: Any, path: str, single: dict[str, Any], stream: bool
) -> None:
    answer, engine = ask(path, CODER, ("Go. ", CALL, "\n", CALL, "More."), stream=stream, **single)
    assert answer.status_code == 200, answer.text
    assert engine.submitted[0].params.structured is None
    assert (
        answer.text.count("ls")
        == ask(path, CODER, ("Go. ", CALL), stream=stream, **single)[0].text.count("ls")
        > 0
    )
    assert "More." not in answer.text


# What is refused


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
LOOK = {"type": "input_image", "image_url": "data:"}
MEDIA: dict[str, tuple[str, str, dict[str, Any]]] = {  # path, place, what is sent
    "an image": (
        "/v1/messages",
        "messages[0].content[0]",
        {"messages": [{"role": "user", "content": [IMAGE]}]},
    ),
    "a document": (
        "/v1/messages",
        "messages[0].content[0]",
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
    ),
    "a system image": ("/v1/messages", "system[0]", {"system": [IMAGE]}),
    "responses: an image": (
        "/v1/responses",
        "input[0].content[0]",
        {"input": [{"role": "user", "content": [LOOK]}]},
    ),
    "chat: an image": (
        "/v1/chat/completions",
        "messages[0].content[0]",
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
            ]
        },
    ),
}


@pytest.mark.parametrize("name", MEDIA)
def test_media_are_refused_by_their_place_and_type(ask: Any, name: str) -> None:
    path, place, fields = MEDIA[name]
    answer, engine = ask(path, **fields)
    assert message_of(answer).startswith(f"{place} is of type '")
    assert "text" in message_of(answer)
    assert not engine.submitted


DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": ""}}
FILE = {"type": "input_file", "filename": "a.pdf", "file_data": "data:"}
FUNCTION_CALL: dict[str, Any] = {
    "type": "function_call",
    "call_id": "c",
    "name": "f",
    "arguments": "{}",
}


def with_result(path: str, *parts: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a conversation in which a tool has returned these parts."""
    if path == "/v1/responses":
        result = {"type": "function_call_output", "call_id": "c", "output": [*parts]}
        return {"input": [{"role": "user", "content": "Look."}, FUNCTION_CALL, result]}
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [*parts]}
    return {
        "messages": [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
    }


@pytest.mark.parametrize(
    ("path", "part", "what", "ignored"),
    [
        ("/v1/messages", IMAGE, "an image", "messages[].content[].content[].source"),
        ("/v1/messages", DOCUMENT, "a document", "messages[].content[].content[].source"),
        ("/v1/responses", LOOK, "an image", "input[].output[].image_url"),
        ("/v1/responses", FILE, "a file", "input[].output[].file_data"),
    ],
)
def test_a_model_reads_that_a_tools_result_has_media(
    ask: Any, path: str, part: dict[str, Any], what: str, ignored: str
) -> None:
    """The user didn't send it, and every later request of the conversation has it, too."""
    kind = "input_text" if path == "/v1/responses" else "text"
    told = {"type": kind, "text": f"[{what} that can't be shown here: this model reads only text]"}
    text = {"type": kind, "text": "a.png"}
    answer, engine = ask(path, **with_result(path, text, part))
    assert answer.status_code == 200, answer.text
    assert ignored in answer.headers["x-dovetail-ignored"]
    plain, other = ask(path, **with_result(path, text, told))
    assert ignored not in plain.headers["x-dovetail-ignored"]
    assert engine.submitted[0].prompt == other.submitted[0].prompt


BAD: dict[str, tuple[str, dict[str, Any], str]] = {  # path, what is sent, what is said
    "Anthropic's web search": (
        "/v1/messages",
        {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]},
        "searches no web",
    ),
    "web fetch": (
        "/v1/messages",
        {"tools": [{"type": "web_fetch_20250910", "name": "web_fetch"}]},
        "searches no web",
    ),
    "code execution": (
        "/v1/messages",
        {"tools": [{"type": "code_execution_20250825", "name": "code_execution"}]},
        "runs no code",
    ),
    "a tool without a schema": (
        "/v1/messages",
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        "describe it as a function",
    ),
    "tool search": (
        "/v1/messages",
        {"tools": [{"type": "tool_search_tool_regex_20251119", "name": "x"}]},
        "sees all tools",
    ),
    "MCP servers": (
        "/v1/messages",
        {"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]},
        "connects to no MCP servers",
    ),
    "compaction": (
        "/v1/messages",
        {"context_management": {"edits": [{"type": "compact_20260112"}]}},
        "compact_20260112",
    ),
    "a container": ("/v1/messages", {"container": "c"}, "runs no code"),
    "an unknown effort": (
        "/v1/messages",
        {"output_config": {"effort": "huge"}},
        "output_config.effort",
    ),
    "a budget of nothing": (
        "/v1/messages",
        {"thinking": {"type": "enabled", "budget_tokens": 0}},
        "thinking.budget_tokens",
    ),
    "an unknown field of thinking": (
        "/v1/messages",
        {"thinking": {"type": "adaptive", "speed": 1}},
        "thinking.speed",
    ),
    "an unknown field": ("/v1/messages", {"fallbacks": []}, "fallbacks"),
    "a tool that is text": ("/v1/messages", {"tools": ["Bash"]}, "tools"),
    "a type that is a number": (
        "/v1/messages",
        {"tools": [{"type": 7, "name": "x"}]},
        "tools[0].type",
    ),
    "a wrong field of a tool": (
        "/v1/messages",
        {"tools": [{"name": "x", "input_schema": {}, "strict": "yes"}]},
        "tools[0].strict",
    ),
    "Codex's web search": (
        "/v1/responses",
        {"tools": [{"type": "web_search", "external_web_access": False}]},
        'web_search = "disabled"',
    ),
    "a tool within a namespace": (
        "/v1/responses",
        {"tools": [{"type": "namespace", "name": "m", "tools": [{"type": "local_shell"}]}]},
        "tools[0].tools[0].type",
    ),
    "two tools of one name": (
        "/v1/responses",
        {
            "tools": [
                {"type": "function", "name": "m__f"},
                {"type": "namespace", "name": "m", "tools": [{"type": "function", "name": "f"}]},
            ]
        },
        "two tools as 'm__f'",
    ),
    "a long namespace": (
        "/v1/responses",
        {"tools": [{"type": "namespace", "name": "n" * 257, "tools": []}]},
        "tools[0].name",
    ),
    "a format of another kind": (
        "/v1/responses",
        {"tools": [{"type": "custom", "name": "x", "format": {"type": "yaml"}}]},
        "tools[0].format",
    ),
    "a search on the server": (
        "/v1/responses",
        {"tools": [{"type": "tool_search"}]},
        "sees all tools",
    ),
    "a found tool that is wrong": (
        "/v1/responses",
        {
            "input": [
                {"type": "tool_search_output", "call_id": "c", "tools": [{"type": "function"}]}
            ]
        },
        "input[0].tools[0].name",
    ),
    "image generation": ("/v1/responses", {"tools": [{"type": "image_generation"}]}, "write text"),
    "a tool without a type": ("/v1/responses", {"tools": [{"name": "x"}]}, "tools[0].type"),
    "an earlier answer": (
        "/v1/responses",
        {"previous_response_id": "resp_1"},
        "send the whole conversation",
    ),
    "an unknown tier": ("/v1/responses", {"service_tier": "gold"}, "service_tier"),
    "an unknown summary": (
        "/v1/responses",
        {"reasoning": {"summary": "long"}},
        "reasoning.summary",
    ),
    "an item of another type": (
        "/v1/responses",
        {"input": [{"type": "web_search_call", "id": "w"}]},
        "input[0].type",
    ),
    "labels that are no object": ("/v1/responses", {"client_metadata": "x"}, "client_metadata"),
    "chat: an unknown effort": (
        "/v1/chat/completions",
        {"reasoning_effort": "huge"},
        "reasoning_effort",
    ),
    "chat: a web search": ("/v1/chat/completions", {"web_search_options": {}}, "searches no web"),
    "chat: a free-form tool": (
        "/v1/chat/completions",
        {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
        "tools[0]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_done_is_refused_with_what_would_be_right(ask: Any, name: str) -> None:
    path, fields, said = BAD[name]
    answer, engine = ask(path, **fields)
    message = message_of(answer)
    assert said in message
    assert not engine.submitted
    if path != "/v1/messages":
        assert answer.json()["error"]["param"]
    assert len(json.dumps(answer.json())) < 1500
