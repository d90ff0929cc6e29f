"""Answers of `/v1/responses`, whole and as the events of a stream, built from an answer's parts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from dovetail.request.outputs import CompletionOutput
from dovetail_server.errors import HttpError
from dovetail_server.protocol.answer_parts import AnswerPart, AnswerParts, PartKind, arguments_of
from dovetail_server.protocol.openai_common import TokenCounts
from dovetail_server.protocol.response_answer import (
    IncompleteDetails,
    InputTokensDetails,
    OutputCall,
    OutputCustomCall,
    OutputFunctionCall,
    OutputItem,
    OutputLocalShellCall,
    OutputMessage,
    OutputReasoning,
    OutputTextPart,
    OutputTokensDetails,
    OutputToolSearchCall,
    ReasoningTextPart,
    ResponseAnswer,
    ResponseUsage,
)
from dovetail_server.protocol.response_items import Status
from dovetail_server.protocol.response_tools import Callee, ResponseTools

_encode = msgspec.json.Encoder().encode
_PREFIXES = {PartKind.TEXT: "msg", PartKind.REASONING: "rs", PartKind.CALL: "fc"}
_EVENTS = {
    PartKind.TEXT: "response.output_text",
    PartKind.REASONING: "response.reasoning_text",
    PartKind.CALL: "response.function_call_arguments",
}


class ResponseWriter:
    """`AnswerWriter` of `/v1/responses`."""

    ping: bytes | None = None

    def __init__(self, head: ResponseAnswer, tools: ResponseTools) -> None:
        """`head`: the answer without output, which the first events contain."""
        self._head = head
        self._tools = tools
        self._chunks: list[bytes] = []
        self._events = 0  # sequence_number of the next one
        # of a delta event; None: the part has none before its end
        self._before_text: bytes | None = None

    def start(self, counts: TokenCounts) -> None:
        self._event("response.created", response=self._head)
        self._event("response.in_progress", response=self._head)

    def opened(self, part: AnswerPart) -> None:
        item = self._item(part, "in_progress", empty=True)
        self._event("response.output_item.added", output_index=part.index, item=item)
        if part.kind is not PartKind.CALL:
            self._event(
                "response.content_part.added", **self._place(part), part=_content(part, empty=True)
            )
        self._before_text = None
        if part.kind is not PartKind.CALL or isinstance(item, OutputFunctionCall):
            type = f"{_EVENTS[part.kind]}.delta"
            body = _encode({"type": type, **self._place(part)})[:-1]
            self._before_text = b'event: %b\ndata: %b,"delta":' % (type.encode(), body)

    def grew(self, part: AnswerPart, text: str, logprobs: Sequence[dict[str, Any]]) -> None:
        if self._before_text is None:
            return
        logprobs_json = b""
        if part.kind is PartKind.TEXT:
            logprobs_json = b',"logprobs":%b' % _encode(logprobs) if logprobs else b',"logprobs":[]'
        self._chunks.append(
            b'%b%b%b,"sequence_number":%d}\n\n'
            % (self._before_text, _encode(text), logprobs_json, self._events)
        )
        self._events += 1

    def closed(self, part: AnswerPart, *, cut: bool) -> None:
        status: Status = "incomplete" if cut else "completed"
        place = self._place(part)
        item = self._item(part, status)
        if isinstance(item, OutputFunctionCall):
            self._event(
                "response.function_call_arguments.done",
                **place,
                name=item.name,
                arguments=part.text,
            )
        elif isinstance(item, OutputCustomCall):
            self._event("response.custom_tool_call_input.delta", **place, delta=item.input)
            self._event("response.custom_tool_call_input.done", **place, input=item.input)
        elif part.kind is not PartKind.CALL:
            logprobs: dict[str, Any] = (
                {"logprobs": part.logprobs} if part.kind is PartKind.TEXT else {}
            )
            self._event(f"{_EVENTS[part.kind]}.done", **place, text=part.text, **logprobs)
            self._event("response.content_part.done", **place, part=_content(part))
        self._event("response.output_item.done", output_index=part.index, item=item)

    def finish(self, answer: ResponseAnswer) -> None:
        self._event(f"response.{answer.status}", response=answer)

    def error(self, error: HttpError) -> dict[str, Any]:
        """`ErrorShape` of the stream's last event."""
        number = self._events
        self._events += 1
        return {
            "type": "error",
            "code": error.code,
            "message": error.told,
            "param": error.param,
            "sequence_number": number,
        }

    def take(self) -> bytes:
        chunks = b"".join(self._chunks)
        self._chunks.clear()
        return chunks

    def whole(
        self, last: CompletionOutput, parts: AnswerParts, counts: TokenCounts
    ) -> ResponseAnswer:
        cut = parts.cut
        final = len(parts.parts) - 1
        return msgspec.structs.replace(
            self._head,
            status="incomplete" if cut else "completed",
            completed_at=None if cut else int(time.time()),
            incomplete_details=IncompleteDetails("max_output_tokens")
            if last.finish_reason == "length"
            else None,
            output=[
                self._item(part, "incomplete" if cut and part.index == final else "completed")
                for part in parts.parts
            ],
            usage=ResponseUsage(
                input_tokens=counts.prompt,
                input_tokens_details=InputTokensDetails(counts.cached),
                output_tokens=counts.completion,
                output_tokens_details=OutputTokensDetails(counts.reasoning or 0),
                total_tokens=counts.prompt + counts.completion,
            ),
        )

    def _item(self, part: AnswerPart, status: Status, *, empty: bool = False) -> OutputItem:
        """Return a part as an output item; `empty`: without its text, as a stream begins it."""
        id = item_id(part, self._head.id)
        match part.kind:
            case PartKind.TEXT:
                return OutputMessage(
                    id=id,
                    status=status,
                    content=[] if empty else [OutputTextPart(part.text, logprobs=part.logprobs)],
                )
            case PartKind.REASONING:
                return OutputReasoning(
                    id=id, status=status, content=[] if empty else [ReasoningTextPart(part.text)]
                )
            case PartKind.CALL:
                return call_of(part, id, status, self._tools.callee(part.name), empty=empty)

    def _place(self, part: AnswerPart) -> dict[str, Any]:
        place: dict[str, Any] = {
            "item_id": item_id(part, self._head.id),
            "output_index": part.index,
        }
        return place if part.kind is PartKind.CALL else {**place, "content_index": 0}

    def _event(self, type: str, **fields: Any) -> None:
        data = _encode({"type": type, **fields, "sequence_number": self._events})
        self._events += 1
        self._chunks.append(b"event: %b\ndata: %b\n\n" % (type.encode(), data))


def item_id(part: AnswerPart, response_id: str) -> str:
    """Return a part's id, the same in all events of a stream and in the whole answer."""
    return f"{_PREFIXES[part.kind]}_{response_id.removeprefix('resp_')}_{part.index}"


def call_of(
    part: AnswerPart, id: str, status: Status, callee: Callee, *, empty: bool = False
) -> OutputCall:
    """Return a call as an output item of its tool's kind; `empty`: without its arguments."""
    namespace = msgspec.UNSET if callee.namespace is None else callee.namespace
    arguments = {} if empty or callee.kind == "function" else arguments_of(part.text)
    match callee.kind:
        case "custom":
            text = arguments.get("input")
            given = "" if empty else text if isinstance(text, str) else part.text
            return OutputCustomCall(
                id=id,
                status=status,
                call_id=part.id,
                name=callee.name,
                input=given,
                namespace=namespace,
            )
        case "local_shell":
            action = {"type": "exec", "command": [], "env": {}, **arguments}
            return OutputLocalShellCall(id=id, status=status, call_id=part.id, action=action)
        case "tool_search":
            return OutputToolSearchCall(id=id, status=status, call_id=part.id, arguments=arguments)
    written = "" if empty else part.text
    return OutputFunctionCall(
        id=id,
        status=status,
        call_id=part.id,
        name=callee.name,
        arguments=written,
        namespace=namespace,
    )


def _content(part: AnswerPart, *, empty: bool = False) -> OutputTextPart | ReasoningTextPart:
    text = "" if empty else part.text
    return (
        OutputTextPart(text, logprobs=[] if empty else part.logprobs)
        if part.kind is PartKind.TEXT
        else ReasoningTextPart(text)
    )
