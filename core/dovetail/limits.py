"""`Limits`: how far one request may go, so that it can't harm the others: the keys below `limits` in `engine.yaml`, which the front checks."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Limits(BaseModel):
    """Bounds of what one request may ask for. Each refusal names the limit and its value."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    max_n: Annotated[int, Field(gt=0)] = 1024
    """The most samples of one request (`n`)."""

    max_template_chars: Annotated[int, Field(gt=0)] = 100_000
    """The most characters of a chat template."""

    max_template_s: Annotated[float, Field(gt=0)] = 2.0
    """The longest that a chat template may take to render a conversation, in seconds."""

    max_template_bytes: Annotated[int, Field(ge=2**27)] = 2**30
    """The most memory that a process which renders chat templates may take, in bytes."""

    max_chat_chars: Annotated[int, Field(gt=0)] = 10_000_000
    """The most characters of a conversation, before and after the chat template."""
