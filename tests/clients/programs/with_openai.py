"""openai: chat, streams, tools, schemas, responses, embeddings, images."""

from __future__ import annotations

from typing import Literal

from openai import BadRequestError, OpenAI
from pydantic import BaseModel
from run import (
    ASK,
    LOOK,
    MODEL,
    PICTURE,
    TEXTS,
    WEATHER_TOOL,
    alike,
    embedded,
    images_url,
    seen,
    spoken,
)


class _Visit(BaseModel):
    who: Literal["Romeo", "Juliet"]
    late: bool


def _client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def models(url: str) -> None:
    assert MODEL in [model.id for model in _client(url).models.list()]


def chat(url: str) -> None:
    answer = _client(url).chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=8, temperature=0
    )
    assert answer.choices[0].message.content == spoken(url)
    assert answer.usage.completion_tokens == 8


def stream(url: str) -> None:
    options = {"include_usage": True}
    chunks = list(
        _client(url).chat.completions.create(
            model=MODEL,
            messages=ASK,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options=options,
        )
    )
    assert "".join(
        chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
    ) == spoken(url)
    assert chunks[-1].usage.completion_tokens == 8


def completions(url: str) -> None:
    answer = _client(url).completions.create(model=MODEL, prompt=TEXTS, max_tokens=4, logprobs=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert len(answer.choices[0].logprobs.token_logprobs) == 4


def tools(url: str) -> None:
    client, messages = _client(url), list(ASK)
    asked = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        tools=[WEATHER_TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
    )
    [call] = asked.choices[0].message.tool_calls[:1]
    assert call.function.name == "weather"
    messages += [
        asked.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "Rain."},
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[WEATHER_TOOL], tool_choice="none", max_tokens=8
    )
    assert answer.choices[0].message.content


def schema(url: str) -> None:
    answer = _client(url).chat.completions.parse(
        model=MODEL, messages=ASK, response_format=_Visit, max_tokens=100
    )
    assert isinstance(answer.choices[0].message.parsed, _Visit)


def schema_streamed(url: str) -> None:
    with _client(url).chat.completions.stream(
        model=MODEL, messages=ASK, response_format=_Visit, max_tokens=100
    ) as events:
        for _ in events:
            pass
        assert isinstance(events.get_final_completion().choices[0].message.parsed, _Visit)


def responses(url: str) -> None:
    client = _client(url)
    answer = client.responses.create(
        model=MODEL, input="Speak!", max_output_tokens=8, temperature=0
    )
    assert answer.output_text == spoken(url)
    with client.responses.stream(
        model=MODEL, input="Speak!", max_output_tokens=8, temperature=0
    ) as events:
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == answer.output_text
    parsed = client.responses.parse(
        model=MODEL, input="Speak!", text_format=_Visit, max_output_tokens=100
    )
    assert isinstance(parsed.output_parsed, _Visit)


def embeddings(url: str) -> None:
    made = _client(url).embeddings.create(model=MODEL, input=TEXTS)  # as base64, its default
    assert alike([one.embedding for one in made.data], embedded(url))


def images(url: str) -> None:
    client, data = _client(images_url()), f"data:image/png;base64,{PICTURE}"
    content = [
        {"type": "image_url", "image_url": {"url": data}},
        {"type": "text", "text": LOOK},
    ]
    messages = [{"role": "user", "content": content}]
    chat = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=4, temperature=0
    )
    assert chat.choices[0].message.content == seen()
    parts = [
        {"type": "input_image", "image_url": data, "detail": "auto"},
        {"type": "input_text", "text": LOOK},
    ]
    made = client.responses.create(
        model=MODEL,
        input=[{"role": "user", "content": parts}],
        max_output_tokens=4,
        temperature=0,
    )
    assert made.output_text == seen()
    assert made.usage.input_tokens == chat.usage.prompt_tokens


def errors(url: str) -> None:
    said: BadRequestError | None = None
    try:
        _client(url).chat.completions.create(model=MODEL, messages=ASK, temperature=-1)
    except BadRequestError as error:
        said = error
    assert said is not None
    assert said.param == "temperature"
