"""Tokenizers with one thing wrong."""

from __future__ import annotations

import json
import threading
import time
import unicodedata
from collections.abc import Collection, Sequence
from typing import Any

from pydantic import BaseModel

from dovetail.api.tokenizer import Chat, Tokenizer, TokenizerCapabilities, TokenizerContext
from dovetail.errors import RequestError
from tests.conformance.mutants import mutant

NAMES = ("<s>", "</s>", "<user>", "<assistant>")
BOS, EOS, USER, ASSISTANT = range(256, 260)


class Bytes(Tokenizer):
    """Right: an id for each byte."""

    capabilities = TokenizerCapabilities(chat=True, exact=True)

    def vocabulary(self) -> Sequence[bytes]:
        return [bytes([byte]) for byte in range(256)] + [name.encode() for name in NAMES]

    @property
    def special_ids(self) -> Collection[int]:
        return range(256, 260)

    @property
    def eos_ids(self) -> Collection[int]:
        return (EOS,)

    @property
    def around(self) -> tuple[Sequence[int], Sequence[int]]:
        return (BOS,), ()

    def encode(self, text: str) -> Sequence[int]:
        return list(text.encode())

    def encode_chat(self, chat: Chat) -> Sequence[int]:
        self.check(chat)
        ids = [BOS]
        for message in chat.messages:
            if message["role"] not in ("user", "assistant") or not message.keys() <= {
                "role",
                "content",
            }:
                raise RequestError("messages: no form for this")
            content = message["content"]
            text = (
                content if isinstance(content, str) else "".join(part["text"] for part in content)
            )
            ids += [USER if message["role"] == "user" else ASSISTANT, *self.said(text)]
            ids += [] if chat.continues and message is chat.messages[-1] else [EOS]
        return [*ids, ASSISTANT] if chat.begins_answer else ids

    def said(self, text: str) -> Sequence[int]:
        return self.encode(text)

    def check(self, chat: Chat) -> None:
        if chat.tools or chat.variables:
            raise RequestError(
                f"tools, or chat_template_kwargs {', '.join(chat.variables)}: no form for them"
            )


def with_specials(text: str) -> list[int]:
    """The names of special tokens in a text as these."""
    for token_id, name in enumerate(NAMES, start=256):
        if name in text:
            before, _, after = text.partition(name)
            return [*with_specials(before), token_id, *with_specials(after)]
    return list(text.encode())


@mutant(caught_by="tokenizer.vocabulary")
class TellsTexts(Bytes):
    def vocabulary(self) -> Sequence[Any]:
        return [piece.decode("latin-1") for piece in super().vocabulary()]


@mutant(caught_by="tokenizer.vocabulary")
class EndsWithAnIdBeyond(Bytes):
    @property
    def eos_ids(self) -> Collection[int]:
        return (260,)


@mutant(caught_by="tokenizer.vocabulary")
class HidesSpecialTokens(Bytes):
    def vocabulary(self) -> Sequence[bytes]:
        return [*super().vocabulary()[:256], *(b"" for _ in NAMES)]


@mutant(caught_by="tokenizer.encode")
class BeginsEachText(Bytes):
    def encode(self, text: str) -> Sequence[int]:
        return [0, *super().encode(text)]


@mutant(caught_by="tokenizer.encode")
class KnowsNoEmptyText(Bytes):
    def encode(self, text: str) -> Sequence[int]:
        return [ord(text[0]) % 256, *super().encode(text)[1:]]


@mutant(caught_by="tokenizer.encode")
class Recurses(Bytes):
    """Too deep for long texts."""

    def encode(self, text: str) -> Sequence[int]:
        return (
            list(text.encode())
            if len(text) < 300
            else [*self.encode(text[:100]), *self.encode(text[100:])]
        )


@mutant(caught_by="tokenizer.encode")
class MakesUnknownIds(Bytes):
    def encode(self, text: str) -> Sequence[int]:
        return [ord(character) for character in text]


@mutant(caught_by="tokenizer.exact")
class Normalizes(Bytes):
    def encode(self, text: str) -> Sequence[int]:
        return super().encode(unicodedata.normalize("NFC", text))


@mutant(caught_by="tokenizer.exact")
class StripsSpaces(Bytes):
    def encode(self, text: str) -> Sequence[int]:
        return super().encode(text.strip(" "))


@mutant(caught_by="tokenizer.special")
class FindsSpecialTokensInTexts(Bytes):
    def encode(self, text: str) -> Sequence[int]:
        return with_specials(text)

    def said(self, text: str) -> Sequence[int]:
        return list(text.encode())


@mutant(caught_by="tokenizer.repeatable")
class LearnsTexts(Bytes):
    """A text that was seen before has a shorter form."""

    def __init__(self, options: BaseModel, context: TokenizerContext) -> None:
        super().__init__(options, context)
        self.seen: dict[str, int] = {}

    def vocabulary(self) -> Sequence[bytes]:
        return [*super().vocabulary(), b""]

    def encode(self, text: str) -> Sequence[int]:
        self.seen[text] = self.seen.get(text, 0) + 1
        return (
            [*super().encode(text), 260]
            if self.seen[text] > 1 and len(text) > 20
            else super().encode(text)
        )


@mutant(caught_by="tokenizer.threads")
class BelongsToOneThread(Bytes):
    def __init__(self, options: BaseModel, context: TokenizerContext) -> None:
        super().__init__(options, context)
        self.owner = threading.get_ident()

    def encode(self, text: str) -> Sequence[int]:
        if threading.get_ident() != self.owner:
            raise RuntimeError("this tokenizer belongs to another thread")
        return super().encode(text)


@mutant(caught_by="tokenizer.chat_threads")
class KeepsTheChatThatItEncodes(Bytes):
    def encode_chat(self, chat: Chat) -> Sequence[int]:
        self.chat = chat
        time.sleep(0.001)
        return super().encode_chat(self.chat)


@mutant(caught_by="tokenizer.damaged")
class LetsItsLibraryRaise(Bytes):
    def __init__(self, options: BaseModel, context: TokenizerContext) -> None:
        super().__init__(options, context)
        for file in context.directory.glob("*.json"):
            json.loads(file.read_bytes())


@mutant(caught_by="tokenizer.damaged")
class NeedsAFile(Bytes):
    def vocabulary(self) -> Sequence[bytes]:
        (self.context.directory / "tokenizer.json").read_bytes()
        return super().vocabulary()


@mutant(caught_by="tokenizer.chat")
class LeavesOutAnswers(Bytes):
    def encode_chat(self, chat: Chat) -> Sequence[int]:
        self.check(chat)
        return super().encode_chat(
            Chat([message for message in chat.messages if message["role"] == "user"])
        )


@mutant(caught_by="tokenizer.chat")
class EndsWhatContinues(Bytes):
    def encode_chat(self, chat: Chat) -> Sequence[int]:
        return [*super().encode_chat(chat), EOS] if chat.continues else super().encode_chat(chat)


@mutant(caught_by="tokenizer.chat_text")
class WritesConversationsAsText(Bytes):
    def said(self, text: str) -> Sequence[int]:
        return with_specials(text)


@mutant(caught_by="tokenizer.chat_refuses")
class IgnoresVariables(Bytes):
    def check(self, chat: Chat) -> None:
        if chat.tools:
            raise RequestError("tools: no form for them")


@mutant(caught_by="tokenizer.chat_refuses")
class IgnoresTools(Bytes):
    def check(self, chat: Chat) -> None:
        for name in chat.variables:
            raise RequestError(f"chat_template_kwargs.{name}: unknown")


@mutant(caught_by="tokenizer.chat_refuses", error=AssertionError)
class ExpectsQuestionsFirst(Bytes):
    def encode_chat(self, chat: Chat) -> Sequence[int]:
        assert chat.messages[0]["role"] == "user"
        return super().encode_chat(chat)
