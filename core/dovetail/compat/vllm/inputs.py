"""vLLM's forms of prompts."""

from __future__ import annotations

from typing import TypedDict

from dovetail.compat.vllm.gaps import missing


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


__all__ = ["TextPrompt", "TokensPrompt"]
__getattr__ = missing(__name__)
