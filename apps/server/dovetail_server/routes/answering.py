"""`prepare_chat`: the way of a chat request to the engine, the same for all APIs. `Answer`: the listener of APIs whose answers consist of parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct

from dovetail.front.chat import ChatOptions
from dovetail.front.tokenizer import TokenizedText
from dovetail.request import CompletionOutput, RequestOutput
from dovetail.sampling_params import SamplingParams, changed_unchecked
from dovetail_server.constraining import constrained_chat
from dovetail_server.errors import ErrorShape
from dovetail_server.exchange import Exchange, OutputListener
from dovetail_server.parsers import AnswerReader, OutputParser
from dovetail_server.protocol.answer_parts import AnswerParts, PartWriter
from dovetail_server.protocol.chat import ChatRequest
from dovetail_server.protocol.messages import MessagesRequest
from dovetail_server.protocol.openai_common import TokenCounts, engine_fields, logprobs_json
from dovetail_server.protocol.responses import ResponsesRequest
from dovetail_server.streams import EventStream

B = TypeVar("B", ChatRequest, MessagesRequest, ResponsesRequest)


@dataclass(frozen=True, slots=True)
class PreparedChat(Generic[B]):
    """A chat request that is ready for the engine."""

    exchange: Exchange
    body: B
    model: str  # the name to return
    prompt: TokenizedText
    params: SamplingParams
    parsers: list[OutputParser | None]  # one per sample; None: all text is content

    async def run(self, listener: OutputListener, answer_id: str) -> None:
        """See `Exchange.run`."""
        await self.exchange.run(answer_id, self.params, engine_fields(self.body, self.exchange.engine), [(self.prompt, listener)])


async def prepare_chat(exchange: Exchange, kind: type[B]) -> PreparedChat[B]:
    """Read a chat request, render and tokenize its conversation, and resolve its constraints. Raises `HttpError` and `RequestError`."""
    body, model = await exchange.generation_body(kind)
    messages, options, params, demand = body.to_conversation(exchange.engine.tokenizer.chat_templates)
    exchange.check(params)
    params, prompt = constrained_chat(exchange, params, demand, options, await rendered(exchange, messages, options))
    parsers = [exchange.server.parsing.parser(prompt, tools=options.tools, template=options.chat_template) for _ in range(params.n)]
    if parsers[0] is not None and parsers[0].needs_special_tokens:
        params = changed_unchecked(params, skip_special_tokens=False)
    return PreparedChat(exchange, body, model, prompt, params, parsers)


async def rendered(exchange: Exchange, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> TokenizedText:
    """Admit a conversation, and return its prompt. Raises what `Exchange.prepared` does, and `RequestError`."""
    return await exchange.prepared(partial(exchange.engine.chat.prompt, messages, options), given_template=options.chat_template is not None)


class AnswerWriter(PartWriter, Protocol):
    """Builds the answers of one API: whole ones, and the events of streams."""

    ping: bytes | None  # the event that keeps an idle stream alive

    def whole(self, last: CompletionOutput, parts: AnswerParts, counts: TokenCounts) -> Struct:
        """Return the complete answer after its last output."""

    def start(self, counts: TokenCounts) -> None:
        """Begin a stream."""

    def finish(self, answer: Any) -> None:
        """End a stream, after its parts have been closed. `answer`: what `whole` returned."""

    def take(self) -> bytes:
        """Return the events since the last call."""


class Answer(OutputListener):
    """Listener that collects one answer's parts, and streams them if requested."""

    whole: Struct  # once it has ended

    def __init__(
        self,
        chat: PreparedChat[Any],
        writer: AnswerWriter,
        *,
        error_shape: ErrorShape | None = None,
        top_logprobs: int | None = None,
    ) -> None:
        """`error_shape`: the form of an error event, if it isn't that of the API's other errors. `top_logprobs`: see `told_logprobs`."""
        super().__init__(chat.exchange)
        self._reader, self._writer, self._top_logprobs = AnswerReader(chat.parsers[0]), writer, top_logprobs
        self._stream: EventStream | None = chat.exchange.begin_stream("error", error_shape) if chat.body.stream else None
        self._parts = AnswerParts(writer if chat.body.stream else None)
        self._started = False

    @property
    def reasoning_tokens(self) -> int | None:
        return self._reader.reasoning_tokens

    def take(self, output: RequestOutput) -> None:
        if self._stream is not None and not self._started:
            self._started = True
            if self._writer.ping is not None:
                self._stream.ping(self._writer.ping)
            self._writer.start(self.counts)
        sample = output.outputs[0]
        tokenizer, top = self.exchange.engine.tokenizer, self._top_logprobs
        self._parts.add(self._reader.read(sample), () if top is None else logprobs_json(sample, top, tokenizer))
        if output.finished:
            self._parts.finish(cut=sample.finish_reason == "length" or self._reader.in_call)
            self.whole = self._writer.whole(sample, self._parts, self.counts)
        if self._stream is not None:
            if output.finished:
                self._writer.finish(self.whole)
            if data := self._writer.take():
                self._stream.write(data)
