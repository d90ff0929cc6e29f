"""llama-index: chat, streams, tools, schemas, embeddings."""

from __future__ import annotations

from typing import Any, Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict
from run import MODEL, TEXTS, alike, embedded, spoken


class _Visit(BaseModel):
    """A visit."""

    model_config = ConfigDict(extra="forbid")
    who: Literal["Romeo", "Juliet"]
    late: bool


class _Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Verona", "Mantua"]


def _llm(url: str, **arguments: Any) -> OpenAILike:
    options = {"max_tokens": 8, "temperature": 0, "max_retries": 0, "timeout": 300}
    options |= {"is_chat_model": True, "is_function_calling_model": True, **arguments}
    return OpenAILike(model=MODEL, api_base=f"{url}/v1", api_key="none", **options)


def _weather(city: str) -> str:
    """Return the weather of a city."""
    return f"Rain in {city}."


def chat(url: str) -> None:
    assert _llm(url).chat([ChatMessage(role="user", content="Speak!")]).message.content == spoken(
        url
    )


def stream(url: str) -> None:
    assert "".join(
        one.delta or ""
        for one in _llm(url).stream_chat([ChatMessage(role="user", content="Speak!")])
    ) == spoken(url)


def completions(url: str) -> None:
    assert _llm(url, is_chat_model=False).complete("ROMEO:").text


def tools(url: str) -> None:
    tool = FunctionTool.from_defaults(_weather, name="weather", fn_schema=_Place)
    llm = _llm(url, max_tokens=200)
    answer = llm.chat_with_tools(
        [tool], user_msg="Is it raining?", tool_required=True, allow_parallel_tool_calls=False
    )
    [call] = llm.get_tool_calls_from_response(answer)
    assert call.tool_kwargs["city"] in ("Verona", "Mantua")


def schema(url: str) -> None:
    llm = _llm(url, max_tokens=200).as_structured_llm(_Visit)
    assert isinstance(llm.complete("Who is there?").raw, _Visit)


def schema_by_format(url: str) -> None:
    llm = _llm(url, max_tokens=200, should_use_structured_outputs=True).as_structured_llm(_Visit)
    assert isinstance(llm.complete("Who is there?").raw, _Visit)


def embeddings(url: str) -> None:
    client = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{url}/v1", api_key="none")
    assert alike(client.get_text_embedding_batch(TEXTS), embedded(url))
