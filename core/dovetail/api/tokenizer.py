"""Tokenizer: text to token ids, and the bytes of each id.

Tokens are decoded by concatenating their bytes and reading them as UTF-8. From these bytes the
engine streams text without partial characters, finds stop strings, compiles grammars and reports
log-probabilities. A tokenizer is made once in the engine's process and once in each front end of a
server, before the first request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dovetail.errors import RequestError


@dataclass(frozen=True, slots=True)
class TokenizerContext:
    """Values passed to a tokenizer's constructor."""

    directory: Path  # the model's files


@dataclass(frozen=True, slots=True)
class Chat:
    """Conversation to encode. Messages are those of OpenAI's API, validated: a `role`; a `content`,
    text or a list of parts `{"type": "text", "text": …}`; `tool_calls`, whose arguments are
    mappings; an assistant's reasoning as `reasoning_content`. A key without a value is left out."""

    messages: Sequence[Mapping[str, Any]]  # one or more
    tools: Sequence[Mapping[str, Any]] = ()  # functions that the model may call
    begins_answer: bool = True  # end with the head of an assistant's message, if the format has one
    continues: bool = False  # end inside the last message, so that the model continues it
    # the request's `chat_template_kwargs`
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerCapabilities:
    """Features of a tokenizer; later versions may add some, which are False by default.

    `chat`: it has `encode_chat`; without it, requests with conversations are rejected. `exact`: the
    bytes of an encoded text are the text's. Without it, as for a tokenizer that normalizes texts, a
    text may come back changed, and this isn't checked when the engine starts."""

    chat: bool = False
    exact: bool = False


class Tokenizer(ABC):
    """Several threads may call `encode` and `encode_chat` at once. The constructor raises
    `ModelLoadError` for files that are missing or damaged."""

    capabilities = TokenizerCapabilities()
    options: BaseModel

    def __init__(self, options: BaseModel, context: TokenizerContext) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    def vocabulary(self) -> Sequence[bytes]:
        """Return the bytes that each token id, from 0 on, adds to a text: the name of a special
        token, and no bytes for an unused id. Ids that the model has beyond these are unused."""

    @property
    def special_ids(self) -> Collection[int]:
        """Ids that no text becomes, such as that of `<s>`. `skip_special_tokens` leaves them out of
        texts, and grammars never allow them."""
        return ()

    @property
    def eos_ids(self) -> Collection[int]:
        """Ids that end an answer, in addition to those that the model's config.json or
        generation_config.json names."""
        return ()

    @property
    def around(self) -> tuple[Sequence[int], Sequence[int]]:
        """Ids that the model expects before and after a prompt of text, such as BOS."""
        return (), ()

    @abstractmethod
    def encode(self, text: str) -> Sequence[int]:
        """Return the ids of a text, without those around it. Text that looks like a special token
        is text. The text is valid Unicode, and may be empty or megabytes long. Raises
        `RequestError` for a text that can't be encoded."""

    def encode_chat(self, chat: Chat) -> Sequence[int]:
        """Return the ids of a conversation, including those around it. What messages contain is
        text, as for `encode`. Raises `RequestError` for a conversation that the format can't
        express: every message, tool and variable is used, or rejected by name."""
        raise RequestError("this tokenizer has no form for conversations: it completes text")
