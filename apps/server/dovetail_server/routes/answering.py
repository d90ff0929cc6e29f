"""The common part of `/v1/responses` and `/v1/messages`: conversations become prompts, and the model's text becomes an answer's parts as it comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from dovetail.front.chat import ChatOptions
from dovetail.front.tokenizer import TokenizedText
from dovetail.request import CompletionOutput, RequestOutput
from dovetail.sampling_params import SamplingParams, changed_unchecked
from dovetail_server.errors import ErrorShape
from dovetail_server.exchange import Exchange, Part
from dovetail_server.parsers import AnswerReader, OutputParser
from dovetail_server.protocol.answer_parts import AnswerParts, PartWriter
from dovetail_server.streams import EventStream


class AnswerWriter(PartWriter, Protocol):
    """A writer that makes a stream's events."""

    def take(self) -> bytes:
        """Return the events since the last call."""


class Answer(Part):
    """The listener of one answer. Subclasses write what comes before the parts and behind them, if the answer is streamed."""

    output: CompletionOutput  # the last one

    def __init__(self, exchange: Exchange, parser: OutputParser | None, writer: AnswerWriter | None, shape: ErrorShape | None = None) -> None:
        """`shape`: how an event tells of an error, if not as other answers do."""
        super().__init__(exchange)
        self.reader = AnswerReader(parser)
        self._writer = writer
        self._stream: EventStream | None = None if writer is None else exchange.begin_stream("error", shape)
        self._started = False
        self.parts = AnswerParts(writer)

    def start(self) -> None:
        """Write what comes before the parts. The prompt's tokens are known."""

    def end(self) -> None:
        """Write what comes behind them. `output` is known."""

    def logprobs_of(self, sample: CompletionOutput) -> Sequence[dict[str, Any]]:
        """Return the log-probabilities of an output's tokens, as the API tells them; none unless a subclass has them."""
        return ()

    def take(self, output: RequestOutput) -> None:
        if not self._started:
            self._started = True
            self.start()
        sample = output.outputs[0]
        self.parts.add(self.reader.read(sample), self.logprobs_of(sample))
        if output.finished:
            self.parts.finish(cut=sample.finish_reason == "length" or self.reader.in_call)
            self.output = sample
            self.end()
        if self._stream is not None and self._writer is not None and (data := self._writer.take()):
            self._stream.write(data)


async def rendered(exchange: Exchange, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> TokenizedText:
    """Let a conversation in, and return its prompt. Raises what `Exchange.prepared` does, and `RequestError`."""
    return await exchange.prepared(partial(exchange.engine.chat.prompt, messages, options), given_template=options.chat_template is not None)


def answer_parser(exchange: Exchange, prompt: TokenizedText, options: ChatOptions) -> OutputParser | None:
    """Return the parser of an answer to this prompt; None if all of its text is content."""
    return exchange.server.parsing.parser(prompt, tools=options.tools, template=options.chat_template)


def as_parsed(params: SamplingParams, parser: OutputParser | None) -> SamplingParams:
    """Return the parameters with the special tokens in the text, if the parser looks for them."""
    return changed_unchecked(params, skip_special_tokens=False) if parser is not None and parser.needs_special_tokens else params
