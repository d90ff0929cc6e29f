"""`AnswerParts`: an answer as a sequence of reasoning, text and tool calls, built from the parser's
events.

The event encoders of `/v1/responses` and `/v1/messages` are `PartWriter`s; whole answers need
none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import msgspec

from dovetail.api.parser import Content, Event, Reasoning, ToolCallArguments, ToolCallStart


class PartKind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class AnswerPart:
    """One part of an answer so far."""

    kind: PartKind
    index: int  # in the answer
    id: str = ""  # of a call
    name: str = ""  # of a call's function
    pieces: list[str] = field(default_factory=list)  # of its text, or of a call's JSON arguments
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # of a text's tokens, as JSON

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class PartWriter(Protocol):
    """Listener to an answer's growing parts, of which one is open at a time."""

    def opened(self, part: AnswerPart) -> None: ...

    def grew(self, part: AnswerPart, text: str, logprobs: Sequence[dict[str, Any]]) -> None:
        """`logprobs`: of the text's tokens in this piece."""

    def closed(self, part: AnswerPart, *, cut: bool) -> None:
        """`cut`: the answer ended within the part: at its length limit, or by a stop string within
        a call."""


class AnswerParts:
    """The parts of one answer. A part ends at an event of another kind, or at another call."""

    def __init__(self, writer: PartWriter | None = None) -> None:
        self._writer = writer
        self.parts: list[AnswerPart] = []
        self.cut = False  # the answer ended within the last one
        self._open: AnswerPart | None = None
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is still held back

    @property
    def has_calls(self) -> bool:
        return any(part.kind is PartKind.CALL for part in self.parts)

    def add(self, events: Sequence[Event], logprobs: Sequence[dict[str, Any]] = ()) -> None:
        """Add a parser's events for some tokens, and the log-probabilities of these. They belong to
        the text emitted with them or, if the parser held it back, next; those of reasoning, calls
        and marks are dropped."""
        self._logprobs += logprobs
        for event in events:
            match event:
                case Content(text):
                    self._grow(PartKind.TEXT, text)
                case Reasoning(text):
                    self._grow(PartKind.REASONING, text)
                case ToolCallStart(_, id, name):
                    self._begin(AnswerPart(PartKind.CALL, len(self.parts), id, name))
                case ToolCallArguments(_, text):
                    self._grow(PartKind.CALL, text)
        if events:
            self._logprobs = []

    def finish(self, *, cut: bool = False) -> None:
        """Close the last part. `cut`: see `PartWriter.closed`."""
        self.cut = cut
        if self._open is not None:
            if self._writer is not None:
                self._writer.closed(self._open, cut=cut)
            self._open = None

    def _logprobs_of(self, text: str) -> list[dict[str, Any]]:
        """Take the log-probabilities of the last tokens, which make up `text`, and drop earlier
        ones, of marks. Tokens that are parts of a character only have a text together."""
        waiting = self._logprobs
        self._logprobs = []
        begin = len(waiting)
        while begin and (_length(waiting[begin:]) < len(text) or _begins_within(waiting[begin])):
            begin -= 1
        return waiting[begin:]

    def _begin(self, part: AnswerPart) -> AnswerPart:
        self.finish()
        self.parts.append(part)
        self._open = part
        if self._writer is not None:
            self._writer.opened(part)
        return part

    def _grow(self, kind: PartKind, text: str) -> None:
        if not text:
            return
        part = self._open
        if part is None or part.kind is not kind:
            part = self._begin(AnswerPart(kind, len(self.parts)))
        part.pieces.append(text)
        logprobs: list[dict[str, Any]] = []
        if kind is PartKind.TEXT:
            logprobs = self._logprobs_of(text)
            part.logprobs += logprobs
        if self._writer is not None:
            self._writer.grew(part, text, logprobs)


def arguments_of(text: str) -> dict[str, Any]:
    """Return a call's arguments as an object. Those that aren't one (because the answer was cut
    off, say) become `{"INVALID_JSON": "…"}`."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {"INVALID_JSON": text}


def _length(logprobs: Sequence[dict[str, Any]]) -> int:
    """Return the number of characters of some tokens."""
    return len(b"".join(bytes(one["bytes"]) for one in logprobs).decode(errors="replace"))


def _begins_within(logprob: dict[str, Any]) -> bool:
    """True if a token begins within a character, or has no bytes."""
    spelled = logprob["bytes"]
    return not spelled or spelled[0] & 0xC0 == 0x80
