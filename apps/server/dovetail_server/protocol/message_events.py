"""Answers of `/v1/messages`: the events of a stream as bytes, and the body of an answer that isn't streamed. Both are made of an answer's parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dovetail.request import CompletionOutput
from dovetail_server.protocol.answer_parts import AnswerPart, AnswerParts, PartKind
from dovetail_server.protocol.messages import MessageAnswer, StopReason, TextAnswer, ThinkingAnswer, ToolUseAnswer, Usage

_encode = msgspec.json.Encoder().encode
_DELTAS = {
    PartKind.TEXT: ("text_delta", "text"),
    PartKind.REASONING: ("thinking_delta", "thinking"),
    PartKind.CALL: ("input_json_delta", "partial_json"),
}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def sse(type: str, **fields: Any) -> bytes:
    """Return one event of a stream."""
    return b"event: %b\ndata: %b\n\n" % (type.encode(), _encode({"type": type, **fields}))


class MessageWriter:
    """A `PartWriter` that makes a stream's events. The caller takes them with `take()`."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._before_text = b""  # all of a delta's event before its text

    def start(self, answer: MessageAnswer) -> None:
        """Begin the stream. `answer` has no content yet."""
        self._chunks += (sse("message_start", message=answer), PING)

    def opened(self, part: AnswerPart) -> None:
        delta, field = _DELTAS[part.kind]
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
        self._before_text = head % (part.index, delta.encode(), field.encode())
        block: Any = _empty_block(part)
        self._chunks.append(sse("content_block_start", index=part.index, content_block=block))

    def grew(self, part: AnswerPart, text: str, logprobs: Sequence[dict[str, Any]]) -> None:
        self._chunks.append(b"%b%b}}\n\n" % (self._before_text, _encode(text)))

    def closed(self, part: AnswerPart, *, cut: bool) -> None:
        self._chunks.append(sse("content_block_stop", index=part.index))

    def finish(self, stop_reason: StopReason, stop_sequence: str | None, usage: Usage) -> None:
        """End the stream, after the parts have been closed."""
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        self._chunks += (sse("message_delta", delta=delta, usage=usage), sse("message_stop"))

    def take(self) -> bytes:
        """Return the events since the last call."""
        chunks = b"".join(self._chunks)
        self._chunks.clear()
        return chunks


def stop_of(output: CompletionOutput, parts: AnswerParts, *, used_tokens: int, max_tokens: int) -> tuple[StopReason, str | None]:
    """Return `stop_reason` and `stop_sequence` of a finished answer of `used_tokens` tokens, of which `max_tokens` were allowed."""
    if output.finish_reason == "length":
        return ("max_tokens" if used_tokens >= max_tokens else "model_context_window_exceeded"), None
    if isinstance(output.stop_reason, str):
        return "stop_sequence", output.stop_reason
    return ("tool_use" if parts.has_calls and not parts.cut else "end_turn"), None


def content_of(parts: Sequence[AnswerPart]) -> list[TextAnswer | ThinkingAnswer | ToolUseAnswer]:
    """Return the content blocks of an answer that isn't streamed."""
    return [_block(part) for part in parts]


def _block(part: AnswerPart) -> TextAnswer | ThinkingAnswer | ToolUseAnswer:
    if part.kind is PartKind.TEXT:
        return TextAnswer(part.text)
    if part.kind is PartKind.REASONING:
        return ThinkingAnswer(part.text)
    return ToolUseAnswer(part.id, part.name, _arguments(part.text))


def _empty_block(part: AnswerPart) -> TextAnswer | ThinkingAnswer | ToolUseAnswer:
    return _block(AnswerPart(part.kind, part.index, part.id, part.name))


def _arguments(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {"INVALID_JSON": text}
