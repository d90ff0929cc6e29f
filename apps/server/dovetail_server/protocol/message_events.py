"""Answers of `/v1/messages`, whole and as the events of a stream, built from an answer's parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dovetail.request.outputs import CompletionOutput
from dovetail_server.protocol.answer_parts import AnswerPart, AnswerParts, PartKind, arguments_of
from dovetail_server.protocol.messages import (
    MessageAnswer,
    StopReason,
    TextAnswer,
    ThinkingAnswer,
    ToolUseAnswer,
    Usage,
)
from dovetail_server.protocol.openai_common import TokenCounts

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
    """`AnswerWriter` of `/v1/messages`."""

    ping: bytes | None = PING

    def __init__(self, head: MessageAnswer, max_tokens: int) -> None:
        """`head`: the answer without content. `max_tokens`: the request's limit."""
        self._head = head
        self._max_tokens = max_tokens
        self._chunks: list[bytes] = []
        self._before_text = b""  # of a delta event

    def start(self, counts: TokenCounts) -> None:
        self._chunks += (
            sse("message_start", message=msgspec.structs.replace(self._head, usage=_usage(counts))),
            PING,
        )

    def opened(self, part: AnswerPart) -> None:
        delta, field = _DELTAS[part.kind]
        head = (
            b"event: content_block_delta\ndata: "
            b'{"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
        )
        self._before_text = head % (part.index, delta.encode(), field.encode())
        empty = _block(AnswerPart(part.kind, part.index, part.id, part.name))
        self._chunks.append(sse("content_block_start", index=part.index, content_block=empty))

    def grew(self, part: AnswerPart, text: str, logprobs: Sequence[dict[str, Any]]) -> None:
        self._chunks.append(b"%b%b}}\n\n" % (self._before_text, _encode(text)))

    def closed(self, part: AnswerPart, *, cut: bool) -> None:
        self._chunks.append(sse("content_block_stop", index=part.index))

    def finish(self, answer: MessageAnswer) -> None:
        delta = {"stop_reason": answer.stop_reason, "stop_sequence": answer.stop_sequence}
        self._chunks += (sse("message_delta", delta=delta, usage=answer.usage), sse("message_stop"))

    def take(self) -> bytes:
        chunks = b"".join(self._chunks)
        self._chunks.clear()
        return chunks

    def whole(
        self, last: CompletionOutput, parts: AnswerParts, counts: TokenCounts
    ) -> MessageAnswer:
        reason, sequence = self._stop(last, parts, counts.completion)
        content = [_block(part) for part in parts.parts]
        return msgspec.structs.replace(
            self._head,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=_usage(counts),
        )

    def _stop(
        self, last: CompletionOutput, parts: AnswerParts, used_tokens: int
    ) -> tuple[StopReason, str | None]:
        if last.finish_reason == "length":
            return (
                "max_tokens" if used_tokens >= self._max_tokens else "model_context_window_exceeded"
            ), None
        if isinstance(last.stop_reason, str):
            return "stop_sequence", last.stop_reason
        return ("tool_use" if parts.has_calls and not parts.cut else "end_turn"), None


def _usage(counts: TokenCounts) -> Usage:
    return Usage(
        counts.prompt - counts.cached, counts.completion, cache_read_input_tokens=counts.cached
    )


def _block(part: AnswerPart) -> TextAnswer | ThinkingAnswer | ToolUseAnswer:
    match part.kind:
        case PartKind.TEXT:
            return TextAnswer(part.text)
        case PartKind.REASONING:
            return ThinkingAnswer(part.text)
        case PartKind.CALL:
            return ToolUseAnswer(part.id, part.name, arguments_of(part.text))
