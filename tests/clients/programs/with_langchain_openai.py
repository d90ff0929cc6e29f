"""langchain-openai: chat, streams, tools, schemas, responses, embeddings."""

from __future__ import annotations

from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel
from run import MODEL, TEXTS, alike, embedded, spoken


class _Visit(BaseModel):
    """A visit."""

    who: Literal["Romeo", "Juliet"]
    late: bool


@tool
def weather(city: Literal["Verona", "Mantua"]) -> str:
    """Return the weather of a city."""
    return f"Rain in {city}."


def _chat(url: str, **arguments: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=f"{url}/v1",
        api_key="none",
        **{"max_tokens": 8, "temperature": 0, "max_retries": 0, **arguments},
    )


def chat(url: str) -> None:
    assert _chat(url).invoke("Speak!").content == spoken(url)


def stream(url: str) -> None:
    assert "".join(chunk.content for chunk in _chat(url).stream("Speak!")) == spoken(url)


def completions(url: str) -> None:
    assert OpenAI(
        model=MODEL, base_url=f"{url}/v1", api_key="none", max_tokens=4, n=1, best_of=1
    ).invoke("ROMEO:")


def tools(url: str) -> None:
    model = _chat(url, max_tokens=200)
    messages: list[Any] = [HumanMessage("Is it raining?")]
    asked = model.bind_tools(
        [weather], tool_choice="any", parallel_tool_calls=False, strict=True
    ).invoke(messages)
    [call] = asked.tool_calls
    messages += [asked, ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])]
    assert _chat(url).bind_tools([weather], tool_choice="none").invoke(messages).content


def schema(url: str) -> None:
    for method in ("json_schema", "function_calling"):
        model = _chat(url, max_tokens=200).with_structured_output(
            _Visit, method=method, strict=True
        )
        assert isinstance(model.invoke("Who is there?"), _Visit), method


def responses(url: str) -> None:
    assert _chat(url, use_responses_api=True).invoke("Speak!").text == spoken(url)


def embeddings(url: str) -> None:
    # otherwise it sends the ids of OpenAI's own tokenizer
    client = OpenAIEmbeddings(
        model=MODEL, base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    assert alike(client.embed_documents(TEXTS), embedded(url))
    assert alike([client.embed_query(TEXTS[0])], embedded(url)[:1])
