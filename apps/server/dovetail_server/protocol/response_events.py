"""Answers of `/v1/responses`: the events of a stream as bytes, and the items of an answer that isn't streamed. Both are made of an answer's parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dovetail_server.errors import HttpError
from dovetail_server.protocol.answer_parts import AnswerPart, PartKind
from dovetail_server.protocol.responses import (
    IncompleteDetails,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputTextPart,
    ReasoningTextPart,
    ResponseAnswer,
    ResponseUsage,
    Status,
)

_encode = msgspec.json.Encoder().encode
_PREFIXES = {PartKind.TEXT: "msg", PartKind.REASONING: "rs", PartKind.CALL: "fc"}
_EVENTS = {PartKind.TEXT: "response.output_text", PartKind.REASONING: "response.reasoning_text", PartKind.CALL: "response.function_call_arguments"}


class ResponseWriter:
    """A `PartWriter` that makes a stream's events. The caller takes them with `take()`."""

    def __init__(self, answer: ResponseAnswer) -> None:
        self._answer = answer  # without output: what the first events hold
        self._chunks: list[bytes] = []
        self._events = 0  # so far: the next one's sequence_number
        self._delta = b""  # a delta's event before its text

    def start(self) -> None:
        """Begin the stream."""
        self._event("response.created", response=self._answer)
        self._event("response.in_progress", response=self._answer)

    def opened(self, part: AnswerPart) -> None:
        item = item_of(part, self._answer.id, "in_progress", empty=True)
        self._event("response.output_item.added", output_index=part.index, item=item)
        if not isinstance(item, OutputFunctionCall):
            self._event("response.content_part.added", **self._place(part), part=_content(part, empty=True))
        type = f"{_EVENTS[part.kind]}.delta"
        body = _encode({"type": type, **self._place(part)})[:-1]
        self._delta = b'event: %b\ndata: %b,"delta":' % (type.encode(), body)

    def grew(self, part: AnswerPart, text: str, logprobs: Sequence[dict[str, Any]]) -> None:
        told = b""
        if part.kind is PartKind.TEXT:
            told = b',"logprobs":%b' % _encode(logprobs) if logprobs else b',"logprobs":[]'
        self._chunks.append(b'%b%b%b,"sequence_number":%d}\n\n' % (self._delta, _encode(text), told, self._events))
        self._events += 1

    def closed(self, part: AnswerPart, *, cut: bool) -> None:
        status: Status = "incomplete" if cut else "completed"
        place = self._place(part)
        if part.kind is PartKind.CALL:
            self._event("response.function_call_arguments.done", **place, name=part.name, arguments=part.text)
        else:
            logprobs: dict[str, Any] = {"logprobs": part.logprobs} if part.kind is PartKind.TEXT else {}
            self._event(f"{_EVENTS[part.kind]}.done", **place, text=part.text, **logprobs)
            self._event("response.content_part.done", **place, part=_content(part))
        self._event("response.output_item.done", output_index=part.index, item=item_of(part, self._answer.id, status))

    def finish(self, answer: ResponseAnswer) -> None:
        """End the stream with the whole answer, after the parts have been closed."""
        self._event(f"response.{answer.status}", response=answer)

    def error(self, error: HttpError) -> dict[str, Any]:
        """Return an error as the stream's last event."""
        number, self._events = self._events, self._events + 1
        return {"type": "error", "code": error.code, "message": error.message, "param": error.param, "sequence_number": number}

    def take(self) -> bytes:
        """Return the events since the last call."""
        chunks = b"".join(self._chunks)
        self._chunks.clear()
        return chunks

    def _place(self, part: AnswerPart) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": item_id(part, self._answer.id), "output_index": part.index}
        return place if part.kind is PartKind.CALL else {**place, "content_index": 0}

    def _event(self, type: str, **fields: Any) -> None:
        data = _encode({"type": type, **fields, "sequence_number": self._events})
        self._events += 1
        self._chunks.append(b"event: %b\ndata: %b\n\n" % (type.encode(), data))


def item_id(part: AnswerPart, response_id: str) -> str:
    """Return an id that is the same in a stream and in its last event."""
    return f"{_PREFIXES[part.kind]}_{response_id.removeprefix('resp_')}_{part.index}"


def item_of(part: AnswerPart, response_id: str, status: Status, *, empty: bool = False) -> OutputItem:
    """Return a part as an item of the output; `empty`: as it begins."""
    id = item_id(part, response_id)
    match part.kind:
        case PartKind.TEXT:
            return OutputMessage(id=id, status=status, content=[] if empty else [OutputTextPart(part.text, logprobs=part.logprobs)])
        case PartKind.REASONING:
            return OutputReasoning(id=id, status=status, content=[] if empty else [ReasoningTextPart(part.text)])
        case PartKind.CALL:
            return OutputFunctionCall(id=id, status=status, call_id=part.id, name=part.name, arguments="" if empty else part.text)


def _content(part: AnswerPart, *, empty: bool = False) -> OutputTextPart | ReasoningTextPart:
    text = "" if empty else part.text
    return OutputTextPart(text, logprobs=[] if empty else part.logprobs) if part.kind is PartKind.TEXT else ReasoningTextPart(text)


def finished_answer(
    answer: ResponseAnswer, parts: Sequence[AnswerPart], usage: ResponseUsage, completed_at: int, *, full: bool, cut: bool
) -> ResponseAnswer:
    """Return the whole answer. One that was `cut` is incomplete, and so is its last item; `full`: for want of room."""
    last = len(parts) - 1
    return msgspec.structs.replace(
        answer,
        status="incomplete" if cut else "completed",
        completed_at=None if cut else completed_at,
        incomplete_details=IncompleteDetails("max_output_tokens") if full else None,
        output=[item_of(part, answer.id, "incomplete" if cut and part.index == last else "completed") for part in parts],
        usage=usage,
    )
