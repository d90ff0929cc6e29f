"""Images in bodies of the chat APIs, as parts of OpenAI's chat format. Those of other APIs become
parts whose content is an `ImageSource`, which names the image's place in the body.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dovetail.serving import ImageSource
from dovetail_server.errors import HttpError
from dovetail_server.protocol.decoding import not_read

_TYPES = ("image_url", "image")  # of parts; each is also the key of its content


def image_part(source: ImageSource) -> dict[str, Any]:
    """Return an image as a part of a message."""
    return {"type": "image_url", "image_url": source}


def text_part(text: str) -> dict[str, Any]:
    """Return a text as a part of a message."""
    return {"type": "text", "text": text}


def image_not_read(place: str, kind: str) -> HttpError:
    """Return the error for an image in a prompt of a model that reads none. `kind`: its type, as
    the API has it."""
    return not_read(place, kind, "this model reads only text")


def refuse_images(messages: Sequence[Any]) -> None:
    """Raise `HttpError` 400 naming the place of the first image, if there is one."""
    for place, part in _images(messages):
        raise image_not_read(place, part["type"])


def image_chars(messages: Sequence[Any]) -> int:
    """Return the number of characters of all images together."""
    return sum(_chars(part.get(part["type"])) for _, part in _images(messages))


def _images(messages: Sequence[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the place of each image, and its part. Messages aren't validated yet."""
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            continue
        for place, part in enumerate(content):
            if isinstance(part, Mapping) and part.get("type") in _TYPES:
                yield f"messages[{index}].content[{place}]", part


def _chars(content: Any) -> int:
    if isinstance(content, Mapping):
        content = content.get("url")
    text = content.content if isinstance(content, ImageSource) else content
    return len(text) if isinstance(text, str) else 0
