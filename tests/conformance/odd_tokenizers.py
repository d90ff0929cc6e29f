"""Right tokenizers in styles that a suite might take for wrong."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache, cached_property

import numpy as np
from pydantic import BaseModel

from dovetail.api.tokenizer import Chat, Tokenizer, TokenizerCapabilities, TokenizerContext
from dovetail.errors import RequestError


class BytesAsIds(Tokenizer):
    """Returns bytes, which are a sequence of ids, tuples, and a view of keys; made when needed."""

    capabilities = TokenizerCapabilities(exact=True)

    @cached_property
    def names(self) -> dict[int, bytes]:
        return {256: b"<end>"}

    def vocabulary(self) -> Sequence[bytes]:
        return (*(bytes([byte]) for byte in range(256)), *self.names.values())

    @property
    def special_ids(self) -> Collection[int]:
        return self.names.keys()

    def encode(self, text: str) -> Sequence[int]:
        return text.encode()


class Reluctant(Tokenizer):
    """Refuses all conversations but questions and answers of up to 300 messages in turns, that
    don't repeat; strips contents, and joins parts by line breaks. Ids are numpy's; long texts are
    refused. Keeps what it has encoded in a function."""

    capabilities = TokenizerCapabilities(chat=True, exact=True)

    def __init__(self, options: BaseModel, context: TokenizerContext) -> None:
        super().__init__(options, context)
        self.encode_kept = cache(lambda text: tuple(np.frombuffer(text.encode(), np.uint8)))

    def vocabulary(self) -> Sequence[bytes]:
        return [*(bytes([byte]) for byte in range(256)), b"", b"<q>", b"<a>"]

    @property
    def special_ids(self) -> Collection[int]:
        return frozenset([257, 258])

    def encode(self, text: str) -> Sequence[int]:
        if len(text) > 150_000:
            raise RequestError("the text is too long")
        return self.encode_kept(text)

    def encode_chat(self, chat: Chat) -> Sequence[int]:
        if chat.tools or chat.variables:
            raise RequestError(f"tools, {', '.join(chat.variables)}: no form for them")
        ids = list[int]()
        for at, message in enumerate(chat.messages):
            role = ("user", "assistant")[at % 2]
            if message["role"] != role or message.keys() - {"role", "content"}:
                raise RequestError(f"messages[{at}]: expected a plain message of the {role}")
            content = message.get("content", "")
            parts = [content] if isinstance(content, str) else [one["text"] for one in content]
            text = "\n\n".join(filter(None, (part.strip() for part in parts)))
            ids += [257 + at % 2, *self.encode_kept(text)]
        if chat.continues and role == "user":
            raise RequestError("messages: only an answer is continued")
        return [*ids, 258] if chat.begins_answer and role == "user" else ids
