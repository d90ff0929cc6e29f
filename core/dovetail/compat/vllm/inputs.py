"""vLLM's forms of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from dovetail.compat.vllm.gaps import missing


class _Images(TypedDict):
    """Keys that prompts with images have in addition to their text or token ids."""

    multi_modal_data: NotRequired[Mapping[str, Any] | None]
    mm_processor_kwargs: NotRequired[Mapping[str, Any] | None]


class TextPrompt(_Images):
    """A prompt as text."""

    prompt: str


class TokensPrompt(_Images):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


__all__ = ["TextPrompt", "TokensPrompt"]
__getattr__ = missing(__name__)
