"""guidance: chat, choices, regular expressions and JSON, by its models of OpenAI and of vLLM's
server."""

from __future__ import annotations

import json
import re
from typing import Any

import guidance
from guidance import gen, models, select
from guidance.models.experimental import VLLMModel
from run import ASK, MODEL, WEATHER_TOOL


def _asked(url: str, kind: Any, *grammar: Any) -> Any:
    model = kind(MODEL, base_url=f"{url}/v1", api_key="none", echo=False)
    with guidance.user():
        model += ASK[0]["content"]
    with guidance.assistant():
        for one in grammar:
            model += one
    return model


def chat(url: str) -> None:
    assert _asked(url, models.OpenAI, gen("answer", max_tokens=8))["answer"]


def schema(url: str) -> None:
    made = _asked(
        url, models.OpenAI, guidance.json("answer", schema=WEATHER_TOOL["function"]["parameters"])
    )["answer"]
    assert "city" in json.loads(made)


def vllm_choice(url: str) -> None:
    assert _asked(url, VLLMModel, select(["Romeo", "Juliet"], name="who"))["who"] in (
        "Romeo",
        "Juliet",
    )


def vllm_regex(url: str) -> None:
    assert re.fullmatch(
        "[0-9]{2}:[0-9]{2}", _asked(url, VLLMModel, gen("when", regex="[0-9]{2}:[0-9]{2}"))["when"]
    )
