"""A real chat model, served, and spoken with by OpenAI's own client: it says what is so, and stops
by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.soak import serving
from openai import OpenAI

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def client(smollm2: Path) -> Iterator[OpenAI]:
    with serving(
        str(smollm2), ["--served-model-name", "smollm2", "--set", "max_model_len=1024"]
    ) as server:
        yield OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)


def test_a_conversation_continues_and_each_answer_stops_by_itself(client: OpenAI) -> None:
    messages = [
        {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
    ]
    first = client.chat.completions.create(
        model="smollm2", messages=messages, temperature=0, max_tokens=200
    )  # type: ignore[arg-type]
    assert first.choices[0].finish_reason == "stop", "at its own end, not at max_tokens"
    assert "Paris" in (first.choices[0].message.content or "")
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And of Italy?"},
    ]  # type: ignore[dict-item]
    second = client.chat.completions.create(
        model="smollm2", messages=messages, temperature=0, max_tokens=200
    )  # type: ignore[arg-type]
    assert second.choices[0].finish_reason == "stop"
    assert "Rome" in (second.choices[0].message.content or "")
    assert second.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens  # type: ignore[union-attr]


def test_a_streamed_answer_is_the_same_as_a_whole_one(client: OpenAI) -> None:
    asked = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Name three colours."}],
        "temperature": 0,
        "max_tokens": 100,
    }
    whole = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    parts = list(client.chat.completions.create(**asked, stream=True))  # type: ignore[call-overload]
    assert (
        "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        == whole.choices[0].message.content
    )
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
