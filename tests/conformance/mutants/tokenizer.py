"""Tokenizers with one thing wrong."""

from __future__ import annotations

import json
import threading
import time
import unicodedata
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

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
            content = message.get("content", "")
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


class Tools(Bytes):
    """Right, with a form for tools, calls and their results."""

    def encode_chat(self, chat: Chat) -> Sequence[int]:
        for name in chat.variables:
            raise RequestError(f"chat_template_kwargs.{name}: unknown")
        ids = [BOS, *self.said("".join(map(self.written, chat.tools)))]
        for message in chat.messages:
            ids += [self.begin(message), *self.said(self.body(message))]
            ids += [] if chat.continues and message is chat.messages[-1] else [EOS]
        return [*ids, ASSISTANT] if chat.begins_answer else ids

    def begin(self, message: Mapping[str, Any]) -> int:
        return ASSISTANT if message["role"] == "assistant" else USER

    def body(self, message: Mapping[str, Any]) -> str:
        content = message.get("content", "")
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        known = message["role"] in ("user", "assistant")
        rest = {
            key: value
            for key, value in message.items()
            if key != "content" and not (known and key == "role")
        }
        return text + (self.written(rest) if rest else "")

    def written(self, value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)


@mutant(caught_by="tokenizer.exact")
class DropsAByteOrderMark(Bytes):
    def encode(self, text: str) -> Sequence[int]:
        return super().encode(text.removeprefix("\ufeff"))


@mutant(caught_by="tokenizer.exact")
class SplitsAtEachLineBreak(Bytes):
    def encode(self, text: str) -> Sequence[int]:
        lines = text.splitlines()
        return super().encode("\n".join(lines) + "\n" * (text[-1:] == "\n"))


@mutant(caught_by="tokenizer.exact")
class UnescapesEntities(Bytes):
    def encode(self, text: str) -> Sequence[int]:
        return super().encode(text.replace("&amp;", "&"))


class Large(Bytes):
    """Right, with 70,000 names more, each of which is a token if it is the whole text."""

    names: ClassVar[list[bytes]] = [b"word%06d" % number for number in range(70_000)]
    number: ClassVar[dict[bytes, int]] = {name: 260 + at for at, name in enumerate(names)}

    def vocabulary(self) -> Sequence[bytes]:
        return [*super().vocabulary(), *self.names]

    def encode(self, text: str) -> Sequence[int]:
        known = self.number.get(text.encode())
        return super().encode(text) if known is None else [known]


@mutant(caught_by="tokenizer.exact")
class CutsIdsTo16Bits(Large):
    def encode(self, text: str) -> Sequence[int]:
        return [token_id & 0xFFFF for token_id in super().encode(text)]


@mutant(caught_by="tokenizer.repeatable")
class KeepsTextsByTheirBeginning(Bytes):
    """And by their length, in a cache that is read once it is large."""

    def __init__(self, options: BaseModel, context: TokenizerContext) -> None:
        super().__init__(options, context)
        self.kept: dict[tuple[str, int], Sequence[int]] = {}

    def encode(self, text: str) -> Sequence[int]:
        ids = super().encode(text)
        kept = self.kept.setdefault((text[:16], len(text)), ids)
        return kept if len(self.kept) > 256 else ids


@mutant(caught_by="tokenizer.repeatable")
class ForgetsItsWordsInTime(Bytes):
    """Its thousandth call is not like its first."""

    calls = 0

    def vocabulary(self) -> Sequence[bytes]:
        return [*super().vocabulary(), b"th"]

    def encode(self, text: str) -> Sequence[int]:
        self.calls += 1
        ids = super().encode(text)
        if self.calls > 800 and "th" in text:
            before, after = text.split("th", 1)
            return [*before.encode(), 260, *after.encode()]
        return ids


@mutant(caught_by="tokenizer.repeatable")
class SharesItsNames(Bytes):
    """Each further tokenizer has its special tokens at other ids."""

    pieces: ClassVar[list[bytes]] = [bytes([byte]) for byte in range(256)]

    def __init__(self, options: BaseModel, context: TokenizerContext) -> None:
        super().__init__(options, context)
        self.pieces.extend(name.encode() for name in NAMES)

    def vocabulary(self) -> Sequence[bytes]:
        return list(self.pieces)


@mutant(caught_by="tokenizer.processes")
class MergesInTheOrderOfASet(Bytes):
    merges: ClassVar[set[str]] = {"th", "he", "in", "er", "an", "re", "on", "at", "ou", "nd"}

    def vocabulary(self) -> Sequence[bytes]:
        return [*super().vocabulary(), *(merge.encode() for merge in sorted(self.merges))]

    def encode(self, text: str) -> Sequence[int]:
        places = {merge: 260 + at for at, merge in enumerate(sorted(self.merges))}
        for merge in self.merges:
            if merge in text:
                before, after = text.split(merge, 1)
                return [*before.encode(), places[merge], *after.encode()]
        return super().encode(text)


@mutant(caught_by="tokenizer.linear")
class MergesOneAfterTheOther(Bytes):
    """Looks through all of a text for each merge that it makes."""

    def vocabulary(self) -> Sequence[bytes]:
        return [*super().vocabulary(), b"a "]

    def encode(self, text: str) -> Sequence[int]:
        ids = super().encode(text)
        data = bytes(ids)
        place = data.find(b"a ")
        out = list[int]()
        while place >= 0:
            out += [*data[:place], 260]
            data = data[place + 2 :]
            place = data.find(b"a ")
        return [*out, *data]


@mutant(caught_by="tokenizer.chat_threads", soon=True)
class WritesConversationsInOnePlace(Bytes):
    def encode_chat(self, chat: Chat) -> Sequence[int]:
        self.place: list[int] = []
        for token_id in super().encode_chat(chat):
            self.place.append(token_id)
            self.place = [*self.place]
        return list(self.place)


@mutant(caught_by="tokenizer.chat_refuses")
class LeavesOutCalls(Tools):
    def body(self, message: Mapping[str, Any]) -> str:
        return super().body({key: message[key] for key in message.keys() - {"tool_calls"}})


@mutant(caught_by="tokenizer.chat_refuses")
class LeavesOutCallsAndRefusesTools(Bytes):
    def encode_chat(self, chat: Chat) -> Sequence[int]:
        without = [
            {"role": one["role"], "content": one.get("content", "")} for one in chat.messages
        ]
        return super().encode_chat(
            Chat(without, chat.tools, chat.begins_answer, chat.continues, chat.variables)
        )


@mutant(caught_by="tokenizer.chat_refuses")
class WritesTheFirstCall(Tools):
    def body(self, message: Mapping[str, Any]) -> str:
        calls = message.get("tool_calls", ())[:1]
        return super().body({**message, "tool_calls": calls} if calls else message)


@mutant(caught_by="tokenizer.chat_refuses")
class WritesTheFirstTool(Tools):
    def encode_chat(self, chat: Chat) -> Sequence[int]:
        return super().encode_chat(
            Chat(chat.messages, chat.tools[:1], chat.begins_answer, chat.continues, chat.variables)
        )


@mutant(caught_by="tokenizer.chat_refuses")
class WritesTheFirstPart(Bytes):
    def encode_chat(self, chat: Chat) -> Sequence[int]:
        messages = [
            one
            if isinstance(one.get("content", ""), str)
            else {**one, "content": one["content"][:1]}
            for one in chat.messages
        ]
        return super().encode_chat(
            Chat(messages, chat.tools, chat.begins_answer, chat.continues, chat.variables)
        )


@mutant(caught_by="tokenizer.chat_refuses")
class IgnoresFalseVariables(Bytes):
    def check(self, chat: Chat) -> None:
        super().check(
            Chat(
                chat.messages,
                chat.tools,
                variables={name: value for name, value in chat.variables.items() if value},
            )
        )


@mutant(caught_by="tokenizer.chat")
class WritesAllRolesAlike(Tools):
    def begin(self, message: Mapping[str, Any]) -> int:
        return USER


@mutant(caught_by="tokenizer.chat")
class AlwaysBeginsAnAnswer(Bytes):
    def encode_chat(self, chat: Chat) -> Sequence[int]:
        return super().encode_chat(
            Chat(chat.messages, chat.tools, True, chat.continues, chat.variables)
        )


@mutant(caught_by="tokenizer.chat")
class TakesMessagesApart(Bytes):
    def encode_chat(self, chat: Chat) -> Sequence[int]:
        ids = super().encode_chat(chat)
        for message in chat.messages:
            if isinstance(message, dict):
                message.pop("content")
        return ids


@mutant(caught_by="tokenizer.chat_text")
class ComposesWhatMessagesSay(Bytes):
    def said(self, text: str) -> Sequence[int]:
        return list(unicodedata.normalize("NFC", text).encode())


@mutant(caught_by="tokenizer.chat_refuses")
class ContinuesOnlyWithoutTools(Tools):
    def encode_chat(self, chat: Chat) -> Sequence[int]:
        return super().encode_chat(
            Chat(
                chat.messages,
                chat.tools,
                chat.begins_answer,
                chat.continues and not chat.tools,
                chat.variables,
            )
        )


@mutant(caught_by="tokenizer.chat_refuses")
class ContinuesTextsOnly(Bytes):
    """Ends a last message of parts."""

    def encode_chat(self, chat: Chat) -> Sequence[int]:
        is_text = isinstance(chat.messages[-1].get("content", ""), str)
        return super().encode_chat(replace(chat, continues=chat.continues and is_text))


@mutant(caught_by="tokenizer.chat_refuses")
class LeavesOutTheMiddle(Bytes):
    """Drops the middle messages of long conversations."""

    def encode_chat(self, chat: Chat) -> Sequence[int]:
        most = 64
        messages = [*chat.messages[: most // 2], *chat.messages[-most // 2 :]]
        whole = len(chat.messages) <= most
        return super().encode_chat(chat if whole else replace(chat, messages=messages))


@mutant(caught_by="tokenizer.chat_refuses")
class LeavesOutEqualMessages(Bytes):
    def encode_chat(self, chat: Chat) -> Sequence[int]:
        messages = [one for at, one in enumerate(chat.messages) if one not in chat.messages[:at]]
        return super().encode_chat(replace(chat, messages=messages))


@mutant(caught_by="tokenizer.chat_refuses")
class LeavesOutDescriptions(Tools):
    def encode_chat(self, chat: Chat) -> Sequence[int]:
        functions = [{**tool["function"], "description": ""} for tool in chat.tools]
        return super().encode_chat(replace(chat, tools=functions))


@mutant(caught_by="tokenizer.chat_refuses")
class LeavesOutEmptyArguments(Tools):
    def body(self, message: Mapping[str, Any]) -> str:
        calls = [self.filled(call) for call in message.get("tool_calls", ())]
        return super().body({**message, "tool_calls": calls} if calls else message)

    def filled(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        given = call["function"]["arguments"]
        arguments = {key: value for key, value in given.items() if value}
        return {**call, "function": {**call["function"], "arguments": arguments}}


@mutant(caught_by="tokenizer.chat_refuses")
class ExpectsContents(Bytes):
    def encode_chat(self, chat: Chat) -> Sequence[int]:
        for message in chat.messages:
            len(message["content"])
        return super().encode_chat(chat)


@mutant(caught_by="tokenizer.chat_repeatable")
class KeepsConversationsByTheirLastMessage(Bytes):
    def __init__(self, options: BaseModel, context: TokenizerContext) -> None:
        super().__init__(options, context)
        self.kept: dict[Any, Sequence[int]] = {}

    def encode_chat(self, chat: Chat) -> Sequence[int]:
        ids = super().encode_chat(chat)
        last = str(chat.messages[-1].get("content"))
        key = (last, len(ids), chat.begins_answer, chat.continues)
        return self.kept.setdefault(key, ids)


@mutant(caught_by="tokenizer.chat_repeatable", soon=True)
class TakesToolsApart(Tools):
    def encode_chat(self, chat: Chat) -> Sequence[int]:
        for tool in chat.tools:
            if isinstance(tool, dict):
                tool.pop("type", None)
        return super().encode_chat(chat)


@mutant(caught_by="tokenizer.exact")
class KeepsTextsByACheckSum(Bytes):
    """Caches token ids by a 32-bit checksum of the text."""

    def __init__(self, options: BaseModel, context: TokenizerContext) -> None:
        super().__init__(options, context)
        self.kept: dict[int, Sequence[int]] = {}

    def encode(self, text: str) -> Sequence[int]:
        return self.kept.setdefault(zlib.crc32(text.encode()), super().encode(text))


@mutant(caught_by="tokenizer.exact")
class CutsLongTexts(Bytes):
    def encode(self, text: str) -> Sequence[int]:
        return super().encode(text[:100_000])


@mutant(caught_by="tokenizer.repeatable", soon=True)
class GivesOneList(Bytes):
    """Writes the ids of the next text over those of the last."""

    def __init__(self, options: BaseModel, context: TokenizerContext) -> None:
        super().__init__(options, context)
        self.ids: list[int] = []

    def encode(self, text: str) -> Sequence[int]:
        self.ids[:] = super().encode(text)
        return self.ids


@mutant(caught_by="tokenizer.chat_text")
class TrustsParts(Bytes):
    """Names of special tokens are these in a content of parts."""

    def encode_chat(self, chat: Chat) -> Sequence[int]:
        self.is_text = all(isinstance(one.get("content", ""), str) for one in chat.messages)
        return super().encode_chat(chat)

    def said(self, text: str) -> Sequence[int]:
        return super().said(text) if self.is_text else with_specials(text)


@mutant(caught_by="tokenizer.chat_text")
class TrustsResults(Tools):
    def body(self, message: Mapping[str, Any]) -> str:
        self.is_result = message["role"] == "tool"
        return super().body(message)

    def said(self, text: str) -> Sequence[int]:
        return with_specials(text) if getattr(self, "is_result", False) else super().said(text)


@mutant(caught_by="tokenizer.chat_text", soon=True)
class TidiesInstructions(Tools):
    def body(self, message: Mapping[str, Any]) -> str:
        text = super().body(message)
        return text.replace("\r\n", "\n") if message["role"] == "system" else text


@mutant(caught_by="tokenizer.processes", soon=True)
class WritesKeysInTheOrderOfASet(Tools):
    def written(self, value: Any) -> str:
        keys = set(value)
        return super().written({key: value[key] for key in keys})


@mutant(caught_by="tokenizer.linear", soon=True)
class ReadsAllMessagesForEach(Bytes):
    def encode_chat(self, chat: Chat) -> Sequence[int]:
        for at in range(len(chat.messages)):
            sum(len(one["role"]) for one in chat.messages[:at])
        return super().encode_chat(chat)


@mutant(caught_by="tokenizer.vocabulary")
class YieldsItsVocabulary(Bytes):
    def vocabulary(self) -> Any:
        return iter(super().vocabulary())


@mutant(caught_by="tokenizer.exact_long")
class CutsOffMegabytes(Bytes):
    def encode(self, text: str) -> Sequence[int]:
        return list(text.encode()[: 2**20])
