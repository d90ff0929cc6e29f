"""anthropic: messages, streams, tools, schemas, the count of tokens, images."""

from __future__ import annotations

from anthropic import Anthropic, BadRequestError
from run import ASK, LOOK, MODEL, PICTURE, WEATHER_TOOL, images_url, seen, spoken

_TOOL = {
    "name": "weather",
    "description": WEATHER_TOOL["function"]["description"],
    "input_schema": WEATHER_TOOL["function"]["parameters"],
}
_ONE = {"type": "any", "disable_parallel_tool_use": True}
_GREEDY = {"temperature": 0}  # a field that the API has and the package dropped in version 2


def _client(url: str) -> Anthropic:
    return Anthropic(base_url=url, api_key="none", max_retries=0)


def chat(url: str) -> None:
    answer = _client(url).messages.create(
        model=MODEL, messages=ASK, max_tokens=8, extra_body=_GREEDY
    )
    assert answer.content[0].text == spoken(url)
    assert answer.stop_reason == "max_tokens"


def stream(url: str) -> None:
    with _client(url).messages.stream(
        model=MODEL, messages=ASK, max_tokens=8, extra_body=_GREEDY
    ) as events:
        assert "".join(events.text_stream) == spoken(url)
        assert events.get_final_message().usage.output_tokens == 8


def tools(url: str) -> None:
    client, messages = _client(url), list(ASK)
    asked = client.messages.create(
        model=MODEL, messages=messages, tools=[_TOOL], tool_choice=_ONE, max_tokens=200
    )
    call = next(block for block in asked.content if block.type == "tool_use")
    assert call.input["city"] in ("Verona", "Mantua")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}
    messages += [
        {"role": "assistant", "content": asked.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(
        model=MODEL, messages=messages, tools=[_TOOL], tool_choice={"type": "none"}, max_tokens=8
    )
    assert answer.content[0].text


def tools_streamed(url: str) -> None:
    with _client(url).messages.stream(
        model=MODEL,
        messages=ASK,
        tools=[_TOOL],
        tool_choice={"type": "tool", "name": "weather"},
        max_tokens=200,
    ) as events:
        message = events.get_final_message()
    assert message.content[-1].input["city"] in ("Verona", "Mantua")
    assert message.stop_reason == "tool_use"


def schema(url: str) -> None:
    form = {"format": {"type": "json_schema", "schema": WEATHER_TOOL["function"]["parameters"]}}
    answer = _client(url).messages.create(
        model=MODEL, messages=ASK, max_tokens=60, output_config=form
    )
    assert '"city"' in answer.content[0].text


def count(url: str) -> None:
    assert (
        _client(url).messages.count_tokens(model=MODEL, messages=ASK, system="A play.").input_tokens
        > 0
    )


def images(url: str) -> None:
    client = _client(images_url())
    source = {"type": "base64", "media_type": "image/png", "data": PICTURE}
    content = [{"type": "image", "source": source}, {"type": "text", "text": LOOK}]
    messages = [{"role": "user", "content": content}]
    answer = client.messages.create(
        model=MODEL, messages=messages, max_tokens=4, extra_body=_GREEDY
    )
    assert answer.content[0].text == seen()
    counted = client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
    assert counted == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


def errors(url: str) -> None:
    said = ""
    try:
        _client(url).messages.create(
            model=MODEL, messages=ASK, max_tokens=8, extra_body={"top_k": -5}
        )
    except BadRequestError as error:
        said = str(error)
    assert "top_k" in said
