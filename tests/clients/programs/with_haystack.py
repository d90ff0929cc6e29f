"""haystack: chat, streams, tools, schemas, embeddings."""

from __future__ import annotations

import json
from typing import Any

from haystack import Document
from haystack.components.agents import Agent
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret
from run import MODEL, TEXTS, WEATHER_TOOL, alike, embedded, spoken

_KEY = Secret.from_token("none")


def _weather(city: str) -> str:
    """Return the weather of a city."""
    return f"Rain in {city}."


def _generator(url: str, **options: Any) -> OpenAIChatGenerator:
    arguments = {"max_tokens": 8, "temperature": 0, **options}
    return OpenAIChatGenerator(
        model=MODEL,
        api_base_url=f"{url}/v1",
        api_key=_KEY,
        generation_kwargs=arguments,
        max_retries=0,
        timeout=300,
    )


def chat(url: str) -> None:
    assert _generator(url).run([ChatMessage.from_user("Speak!")])["replies"][0].text == spoken(url)


def stream(url: str) -> None:
    pieces: list[str] = []
    _generator(url).run(
        [ChatMessage.from_user("Speak!")],
        streaming_callback=lambda chunk: pieces.append(chunk.content),
    )
    assert "".join(pieces) == spoken(url)


def tools(url: str) -> None:
    function = WEATHER_TOOL["function"]
    tool = Tool(
        name="weather",
        description=function["description"],
        parameters=function["parameters"],
        function=_weather,
    )
    generator = _generator(url, max_tokens=200, tool_choice="required", parallel_tool_calls=False)
    agent = Agent(chat_generator=generator, tools=[tool], exit_conditions=["weather"])
    assert (
        "Rain in"
        in agent.run([ChatMessage.from_user("Is it raining?")])[
            "last_message"
        ].tool_call_result.result
    )


def schema(url: str) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "weather", "schema": WEATHER_TOOL["function"]["parameters"]},
    }
    reply = _generator(url, max_tokens=60, response_format=form).run(
        [ChatMessage.from_user("Where?")]
    )["replies"][0]
    assert "city" in json.loads(reply.text)


def embeddings(url: str) -> None:
    documents = OpenAIDocumentEmbedder(
        model=MODEL, api_base_url=f"{url}/v1", api_key=_KEY, progress_bar=False
    )
    made = documents.run([Document(content=text) for text in TEXTS])["documents"]
    assert alike([document.embedding for document in made], embedded(url))
    text = OpenAITextEmbedder(model=MODEL, api_base_url=f"{url}/v1", api_key=_KEY).run(TEXTS[0])
    assert alike([text["embedding"]], embedded(url)[:1])
