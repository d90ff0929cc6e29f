"""litellm: chat, streams, tools, schemas, embeddings, ranks."""

from __future__ import annotations

import json
from typing import Any

import litellm
from run import ASK, MODEL, TEXTS, WEATHER_TOOL, alike, embedded, spoken

litellm.suppress_debug_info = True


def _completion(url: str, provider: str = "openai", **arguments: Any) -> Any:
    base = url if provider == "anthropic" else f"{url}/v1"
    return litellm.completion(
        model=f"{provider}/{MODEL}", messages=ASK, api_base=base, api_key="none", **arguments
    )


def chat(url: str) -> None:
    for provider in ("openai", "hosted_vllm"):
        assert _completion(url, provider, max_tokens=8, temperature=0).choices[
            0
        ].message.content == spoken(url)


def messages(url: str) -> None:
    assert _completion(url, "anthropic", max_tokens=8, temperature=0).choices[
        0
    ].message.content == spoken(url)


def stream(url: str) -> None:
    chunks = _completion(url, max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == spoken(url)


def tools(url: str) -> None:
    answer = _completion(
        url, tools=[WEATHER_TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=200
    )
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments)["city"] in (
        "Verona",
        "Mantua",
    )


def schema(url: str) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "weather", "schema": WEATHER_TOOL["function"]["parameters"]},
    }
    assert "city" in json.loads(
        _completion(url, response_format=form, max_tokens=60).choices[0].message.content
    )


def embeddings(url: str) -> None:
    made = litellm.embedding(
        model=f"openai/{MODEL}",
        input=TEXTS,
        api_base=f"{url}/v1",
        api_key="none",
        encoding_format="float",
    )
    assert made.usage.prompt_tokens > 0
    assert alike([one["embedding"] for one in made.data], embedded(url))


def rerank(url: str) -> None:
    ranked = litellm.rerank(
        model=f"hosted_vllm/{MODEL}",
        query=TEXTS[0],
        documents=TEXTS,
        top_n=1,
        api_base=url,
        api_key="none",
    )
    assert ranked.results[0]["index"] == 0
