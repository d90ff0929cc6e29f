"""`prepare_chat`: submits a chat request to the engine, the same way for all APIs. `constrained`: a request's `Demand` as sampling parameters, once
its prompt is known. `Answer`: the listener of APIs whose answers consist of parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct

from dovetail.front.chat import ChatOptions
from dovetail.front.tokenizer import TokenizedText
from dovetail.request import CompletionOutput, RequestOutput
from dovetail.sampling_params import SamplingParams, changed_unchecked
from dovetail.structured import Structured
from dovetail_server.errors import ErrorShape
from dovetail_server.exchange import Exchange, OutputListener
from dovetail_server.parsers.pieces import AnswerReader, OutputParser
from dovetail_server.parsers.registry import call_rule
from dovetail_server.parsers.think import THINK, THINK_MARKS
from dovetail_server.protocol.answer_parts import AnswerParts, PartWriter
from dovetail_server.protocol.chat import ChatRequest
from dovetail_server.protocol.decoding import unsupported
from dovetail_server.protocol.messages import MessagesRequest
from dovetail_server.protocol.openai_common import TokenCounts, engine_fields, logprobs_json
from dovetail_server.protocol.responses import ResponsesRequest
from dovetail_server.protocol.structured import CallDemand, Demand
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


def constrained(exchange: Exchange, params: SamplingParams, demand: Demand, rule: Structured | None = None) -> SamplingParams:
    """Return the parameters with a rule, by default the demanded one. Raises `RequestError`."""
    rule = rule or demand.rule
    if rule is None:
        return params
    exchange.renamed = {**exchange.renamed, "structured": demand.param}
    return exchange.check(dataclasses.replace(params, structured=rule))


def constrained_chat(
    exchange: Exchange, params: SamplingParams, demand: Demand, options: ChatOptions, prompt: TokenizedText
) -> tuple[SamplingParams, TokenizedText]:
    """Return the parameters with the rule of a chat answer, and its prompt. Reasoning stays unconstrained: the rule begins after it. If the prompt
    leaves it open whether the model reasons first, the mark that begins reasoning is appended.

    Raises `RequestError`, and `HttpError` if the model's format of tool calls can't be constrained.
    """
    rule = demand.rule if demand.calls is None else _rule_of_calls(exchange, demand.param, demand.calls, options)
    if rule is not None and rule.after is None and _reasons_first(exchange, options, prompt):
        rule = dataclasses.replace(rule, after=THINK_MARKS[1])
        if not prompt.text.rstrip().endswith(THINK):
            begun = f"{THINK}\n"
            ids = exchange.engine.tokenizer.encode(begun, special_tokens=False)
            prompt = TokenizedText(prompt.text + begun, [*prompt.token_ids, *ids])
    return constrained(exchange, params, demand, rule), prompt


def _rule_of_calls(exchange: Exchange, param: str, calls: CallDemand, options: ChatOptions) -> Structured:
    parsing = exchange.server.parsing
    parser = parsing.names(options.chat_template).tool_parser
    if parser is None:
        reason = "no tool parser fits the model's chat template, so the format of its calls is unknown (set one with --tool-parser)"
        raise unsupported(param, reason)
    template = parsing.template(options.chat_template)
    try:
        return Structured(structural_tag=call_rule(parser, template, calls.tools, required=calls.required, single=calls.single))
    except ValueError as error:  # including `RequestError`
        raise unsupported(param, str(error)) from None


def _reasons_first(exchange: Exchange, options: ChatOptions, prompt: TokenizedText) -> bool:
    """Return True if the answer begins with reasoning: the prompt has opened it; or the template could disable it, and wasn't asked to; or the
    server's settings name a reasoning parser."""
    parsing, text = exchange.server.parsing, prompt.text.rstrip()
    if parsing.names(options.chat_template).reasoning_parser is None or options.continue_final_message:
        return False
    if text.endswith(THINK_MARKS):
        return text.endswith(THINK)
    variables = dict(options.chat_template_kwargs or {})
    if False in (variables.get("enable_thinking"), variables.get("thinking")):
        return False
    return parsing.expects_reasoning or "enable_thinking" in parsing.template(options.chat_template)
