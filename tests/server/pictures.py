"""Requests with images, in the form of each API, and a faked engine that reads images."""

from __future__ import annotations

import base64
import json
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from dovetail.front.media.facts import MediaFacts
from dovetail.front.tokenizer import Tokenizer
from tests.media.checkpoints import checkpoint, picture
from tests.server.fake_engine import FakeEngine

KIND = "qwen2_vl"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
APIS = (CHAT, RESPONSES, MESSAGES)


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.load(checkpoint(KIND))


def media_facts(kind: str = KIND, **changes: Any) -> MediaFacts:
    directory = checkpoint(kind)
    config = json.loads((directory / "config.json").read_text())
    fields = {"cache_rows": 1024, "step_tokens": 1024, **changes}
    return MediaFacts(model_dir=str(directory), config=config, **fields)


def seeing(*pieces: str, hosts: tuple[str, ...] = (), **options: Any) -> FakeEngine:
    """Return a faked engine of a model that reads images."""
    media = media_facts(hosts=hosts)
    return FakeEngine(_tokenizer(), pieces or ("A", " cat"), media=media, **options)


def png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@cache
def small(seed: int = 0) -> str:
    """Return a small picture as base64."""
    return base64.b64encode(png(picture(24, 16, seed))).decode()


@cache
def large() -> str:
    """Return a picture of 1.6 MB as base64."""
    pixels = np.random.default_rng(0).integers(0, 256, (740, 740, 3), np.uint8)
    return base64.b64encode(png(Image.fromarray(pixels))).decode()


def data_url(data: str) -> str:
    return f"data:image/png;base64,{data}"


def image(path: str, data: str, **fields: Any) -> dict[str, Any]:
    """Return an image as an API has it. `data`: base64. `fields`: of the image."""
    if path == CHAT:
        return {"type": "image_url", "image_url": {"url": data_url(data), **fields}}
    if path == RESPONSES:
        return {"type": "input_image", "image_url": data_url(data), **fields}
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {"type": "image", "source": source, **fields}


def image_at(path: str, url: str) -> dict[str, Any]:
    """Return an image by its URL as an API has it."""
    if path == CHAT:
        return {"type": "image_url", "image_url": {"url": url}}
    if path == RESPONSES:
        return {"type": "input_image", "image_url": url}
    return {"type": "image", "source": {"type": "url", "url": url}}


def text(path: str, content: str) -> dict[str, Any]:
    return {"type": "input_text" if path == RESPONSES else "text", "text": content}


def asked(path: str, *parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a body with a user's message of these parts."""
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    key = "input" if path == RESPONSES else "messages"
    return {limit: 4, key: [{"role": "user", "content": list(parts)}], **fields}


# one that writes calls and images
_TEMPLATE = """\
{%- for message in messages -%}{{ message.role }}:
{%- if message.content is string -%}{{ message.content }}
{%- else -%}{%- for part in message.content or [] -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text -}}
{%- endfor -%}{%- endif -%}
{%- for call in message.tool_calls or [] -%}{{ call.function.name }}{%- endfor -%}
{%- endfor -%}"""


def with_result(path: str, *parts: dict[str, Any]) -> dict[str, Any]:
    """Return a body in which a tool has returned these parts."""
    body = asked(path, text(path, "Look."), chat_template=_TEMPLATE)
    if path == RESPONSES:
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": "c", "output": list(parts)}
        body["input"] += [call, result]
        return body
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    answer = {"type": "tool_result", "tool_use_id": "c", "content": list(parts)}
    body["messages"] += [
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [answer]},
    ]
    return body


def place_of(path: str, message: int, part: int) -> str:
    """Return how errors name a part of a message."""
    return f"{'input' if path == RESPONSES else 'messages'}[{message}].content[{part}]"
