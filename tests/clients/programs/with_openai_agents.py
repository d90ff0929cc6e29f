"""openai-agents: agents with tools, handed from one to another, and outputs of a type; over chat
completions and responses."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from run import MODEL, spoken

set_tracing_disabled(True)
_END = {
    "min_tokens": 4,
    "logit_bias": {"0": 100},
}  # the demo's end token: the package takes no answer that is cut off


class _Visit(BaseModel):
    who: Literal["Romeo", "Juliet"]
    late: bool


def _agent(
    url: str,
    kind: Any = OpenAIChatCompletionsModel,
    max_tokens: int = 8,
    choice: str | None = None,
    extra_body: Any = None,
    **arguments: Any,
) -> Agent[Any]:
    model = kind(
        model=MODEL, openai_client=AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    )
    settings = ModelSettings(
        max_tokens=max_tokens,
        temperature=0,
        tool_choice=choice,
        parallel_tool_calls=False if choice else None,
        extra_body=extra_body,
    )
    return Agent(name="Nurse", model=model, model_settings=settings, **arguments)


def _both(check: Any) -> None:
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        check(kind)


def chat(url: str) -> None:
    _both(
        lambda kind: _same(
            Runner.run_sync(_agent(url, kind, extra_body=_END), "Speak!").final_output,
            spoken(url, 4),
        )
    )


def _same(one: Any, other: Any) -> None:
    assert one == other, (one, other)


def stream(url: str) -> None:
    async def read(kind: Any) -> str:
        result = Runner.run_streamed(_agent(url, kind, extra_body=_END), "Speak!")
        events = [
            event.data
            async for event in result.stream_events()
            if event.type == "raw_response_event"
        ]
        return "".join(data.delta for data in events if data.type == "response.output_text.delta")

    _both(lambda kind: _same(asyncio.run(read(kind)), spoken(url, 4)))


def tools(url: str) -> None:
    called: list[str] = []

    @function_tool
    def weather(city: Literal["Verona", "Mantua"]) -> str:
        """Return the weather of a city."""
        called.append(city)
        return f"Rain in {city}."

    def check(kind: Any) -> None:
        agent = _agent(
            url, kind, 200, "required", tools=[weather], tool_use_behavior="stop_on_first_tool"
        )
        assert "Rain in" in Runner.run_sync(agent, "Is it raining?").final_output

    _both(check)
    assert len(called) == 2


def loop(url: str) -> None:
    """A call, its result and an answer: after the first call the package no longer demands one."""

    @function_tool
    def weather(city: Literal["Verona", "Mantua"]) -> str:
        """Return the weather of a city."""
        return f"Rain in {city}."

    agent = _agent(url, max_tokens=60, choice="weather", tools=[weather])
    items = Runner.run_sync(agent, "Is it raining?").new_items
    assert [item.type for item in items][:3] == [
        "tool_call_item",
        "tool_call_output_item",
        "message_output_item",
    ]


def schema(url: str) -> None:
    def check(kind: Any) -> None:
        assert isinstance(
            Runner.run_sync(
                _agent(url, kind, 200, output_type=_Visit), "Who is there?"
            ).final_output,
            _Visit,
        )

    _both(check)
