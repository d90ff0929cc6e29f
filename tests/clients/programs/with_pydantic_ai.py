"""pydantic-ai: agents with tools and outputs of a type, streams, embeddings; over OpenAI's two APIs
and Anthropic's."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from run import MODEL, spoken


class _Visit(BaseModel):
    """A visit."""

    model_config = ConfigDict(extra="forbid")
    who: Literal["Romeo", "Juliet"]
    late: bool


def _provider(url: str) -> OpenAIProvider:
    return OpenAIProvider(
        openai_client=AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    )


def _agent(url: str, max_tokens: int = 8, **arguments: Any) -> Agent[Any, Any]:
    settings = {"max_tokens": max_tokens, "temperature": 0, "parallel_tool_calls": False}
    return Agent(
        OpenAIChatModel(MODEL, provider=_provider(url)), model_settings=settings, **arguments
    )


def chat(url: str) -> None:
    assert _agent(url).run_sync("Speak!").output == spoken(url)


def stream(url: str) -> None:
    async def read() -> str:
        async with _agent(url).run_stream("Speak!") as result:
            return "".join(
                [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
            )

    assert asyncio.run(read()) == spoken(url)


def responses(url: str) -> None:
    agent: Agent[Any, Any] = Agent(
        OpenAIResponsesModel(MODEL, provider=_provider(url)),
        model_settings={"max_tokens": 8, "temperature": 0},
    )
    assert agent.run_sync("Speak!").output == spoken(url)


def messages(url: str) -> None:
    model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=url, api_key="none"))
    assert Agent(model, model_settings={"max_tokens": 8}).run_sync("Speak!").output


def schema(url: str) -> None:
    for kind in (ToolOutput, NativeOutput):
        assert isinstance(
            _agent(url, 200, output_type=kind(_Visit)).run_sync("Who is there?").output, _Visit
        ), kind


def schema_in_prompt(url: str) -> None:
    settings = {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "visit", "schema": _Visit.model_json_schema()},
        }
    }
    agent = _agent(url, 200, output_type=PromptedOutput(_Visit))
    assert isinstance(
        agent.run_sync("Who is there?", model_settings={"extra_body": settings}).output, _Visit
    )


def tools(url: str) -> None:
    called: list[str] = []

    def weather(city: Literal["Verona", "Mantua"]) -> _Visit:
        """Return the weather of a city, and who is there."""
        called.append(city)
        return _Visit(who="Romeo", late=False)

    agent = _agent(url, 200, output_type=[weather])
    assert isinstance(agent.run_sync("Is it raining?").output, _Visit)
    assert called[0] in ("Verona", "Mantua")
