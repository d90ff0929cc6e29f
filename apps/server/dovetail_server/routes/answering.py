"""`prepare_chat`: submits a chat request to the engine, the same way for all APIs: steers the
model's reasoning, renders the conversation, and constrains the answer to a rule. `Answer`: the
listener of APIs whose answers consist of parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct

from dovetail.request.outputs import CompletionOutput, RequestOutput
from dovetail.request.sampling_params import SamplingParams, changed_unchecked
from dovetail.request.structured import Structured
from dovetail.serving import (
    ChatOptions,
    MediaPrompt,
    TokenizedText,
    check_template_chars,
    cuts,
    speller,
)
from dovetail_server.errors import ErrorShape
from dovetail_server.exchange import Exchange
from dovetail_server.listeners import OutputListener
from dovetail_server.parsers.reader import AnswerParser, AnswerReader
from dovetail_server.parsers.registry import (
    call_rule,
    needs_special_tokens,
    opens_reasoning,
    parser_for,
)
from dovetail_server.protocol.answer_parts import AnswerParts, PartWriter
from dovetail_server.protocol.chat import ChatRequest
from dovetail_server.protocol.decoding import unsupported
from dovetail_server.protocol.images import image_chars
from dovetail_server.protocol.messages import MessagesRequest
from dovetail_server.protocol.openai_common import TokenCounts, engine_fields, logprobs_json
from dovetail_server.protocol.reasoning import EFFORT, AskedReasoning
from dovetail_server.protocol.responses import ResponsesRequest
from dovetail_server.protocol.structured import CallDemand
from dovetail_server.streams import EventStream

B = TypeVar("B", ChatRequest, MessagesRequest, ResponsesRequest)


@dataclass(frozen=True, slots=True)
class PreparedChat(Generic[B]):
    """A chat request that is ready for the engine."""

    exchange: Exchange
    body: B
    model: str  # the name to return
    prompts: list[TokenizedText | MediaPrompt]  # one, until it is submitted
    params: SamplingParams
    parsers: list[AnswerParser | None]  # one per sample; None: all text is content
    single: bool  # further tool calls than the first are dropped
    only_calls: bool  # a call is demanded

    def reader(self, parser: AnswerParser | None) -> AnswerReader:
        """Return the reader of a sample's outputs."""
        return AnswerReader(parser, single=self.single, only_calls=self.only_calls)

    async def run(self, listener: OutputListener, answer_id: str) -> None:
        """See `Exchange.run`."""
        await self.exchange.run(
            answer_id,
            self.params,
            engine_fields(self.body, self.exchange.engine),
            [(self.prompts.pop(), listener)],
        )


async def prepare_chat(exchange: Exchange, kind: type[B]) -> PreparedChat[B]:
    """Read a chat request, render and tokenize its conversation, and resolve its constraints.
    Raises `HttpError` and `RequestError`."""
    body, model = await exchange.generation_body(kind)
    messages, options, params, demand, asked = await exchange.beside(
        partial(body.to_conversation, images=exchange.reads_images)
    )
    exchange.check_samples(1, params.n)
    options = steered(exchange, options, asked)
    prompt = await rendered(exchange, messages, options, cut=cuts(params))
    del messages
    if isinstance(prompt, MediaPrompt):
        body.drop_images()
    limit = limited(exchange, body, asked, options, prompt)
    rule, single = (
        (demand.rule, False)
        if demand.calls is None
        else _rule_of_calls(exchange, demand.param, demand.calls, options, params)
    )
    params, prompt = constrained_chat(
        exchange,
        params,
        demand.param if rule is not None else asked.field,
        rule,
        limit,
        options,
        prompt,
    )
    chosen = exchange.served.parsing.parsers(options.chat_template)
    if needs_special_tokens(chosen, options.tools):
        params = changed_unchecked(params, skip_special_tokens=False)
    parsers = [parser_for(chosen, prompt.text or "", options.tools) for _ in range(params.n)]
    only_calls = demand.calls is not None and demand.calls.required
    return PreparedChat(exchange, body, model, [prompt], params, parsers, single, only_calls)


async def rendered(
    exchange: Exchange,
    messages: Sequence[Mapping[str, Any]],
    options: ChatOptions,
    *,
    cut: bool = False,
) -> TokenizedText | MediaPrompt:
    """Admit a conversation, and return its prompt. `cut`: the request's parameters truncate it.
    Raises what `Exchange.prepared` does, and `RequestError`."""
    chars = 0
    if exchange.reads_images:
        chars = await exchange.beside(partial(image_chars, messages))
    return await exchange.prompt_of(
        partial(exchange.engine.chat.prompt, messages, options, cut=cut),
        chars,
        given_template=options.chat_template is not None,
        cut=cut,
    )


def steered(exchange: Exchange, options: ChatOptions, asked: AskedReasoning) -> ChatOptions:
    """Return the options with variables of the chat template that do what is asked of the model's
    reasoning; the request's own come first. Raises `HttpError` if it can't be turned off."""
    parsing = exchange.served.parsing
    own = options.chat_template_kwargs or {}
    if options.chat_template is not None:
        check_template_chars(options.chat_template, exchange.engine.info.intake.limits)
    reasons = parsing.parsers(options.chat_template).reasoning is not None
    variables = {**asked.variables(parsing.template(options.chat_template), reasons=reasons), **own}
    return dataclasses.replace(options, chat_template_kwargs=variables or None)


def limited(
    exchange: Exchange,
    body: Any,
    asked: AskedReasoning,
    options: ChatOptions,
    prompt: TokenizedText | MediaPrompt,
) -> int | None:
    """Return the most tokens of reasoning, None for no limit. Fields of the body that have no
    effect on this model are ignored. Raises what `Exchange.ignore` raises."""
    steered_by = options.chat_template_kwargs or {}
    limit = asked.limit(steered_by)
    can_limit = (
        exchange.engine.info.intake.has_masks and speller(exchange.engine.tokenizer) is not None
    )
    if (limit is None or can_limit) and _reasons_first(exchange, options, prompt):
        return limit
    unmet = asked.unmet(steered_by)
    for field in body.ADVISORY:
        if field.steers and field.path in unmet:
            exchange.ignore(field)
    return None


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
        """`error_shape`: the form of an error event, if it isn't that of the API's other errors.
        `top_logprobs`: see `told_logprobs`."""
        super().__init__(chat.exchange)
        self._reader = chat.reader(chat.parsers[0])
        self._writer = writer
        self._top_logprobs = top_logprobs
        self._stream: EventStream | None = (
            chat.exchange.begin_stream("error", error_shape) if chat.body.stream else None
        )
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
        tokenizer = self.exchange.engine.tokenizer
        top = self._top_logprobs
        self._parts.add(
            self._reader.read(sample), () if top is None else logprobs_json(sample, top, tokenizer)
        )
        if output.finished:
            self._parts.finish(cut=sample.finish_reason == "length" or self._reader.in_call)
            self.whole = self._writer.whole(sample, self._parts, self.counts)
        if self._stream is not None:
            if output.finished:
                self._writer.finish(self.whole)
            if data := self._writer.take():
                self._stream.write(data)


def constrained_chat(
    exchange: Exchange,
    params: SamplingParams,
    param: str,
    rule: Structured | None,
    limit: int | None,
    options: ChatOptions,
    prompt: TokenizedText | MediaPrompt,
) -> tuple[SamplingParams, TokenizedText | MediaPrompt]:
    """Return the parameters with the rule of a chat answer, demanded by `param`, and its prompt.
    Reasoning stays unconstrained, up to `limit` tokens of it: the rule begins after it. If the
    prompt leaves it open whether the model reasons first, the mark that begins reasoning is
    appended. Raises `RequestError`."""
    marks = exchange.served.parsing.parsers(options.chat_template).marks
    if marks is not None and (
        limit is not None
        or (rule is not None and rule.after is None and _reasons_first(exchange, options, prompt))
    ):
        begin, end = marks
        rule = (
            Structured(after=end, after_tokens=limit)
            if rule is None
            else dataclasses.replace(rule, after=end, after_tokens=limit)
        )
        text = prompt.text or ""
        if not opens_reasoning(text, marks):
            begun = f"{begin}\n"
            ids = exchange.engine.tokenizer.encode(begun, special_tokens=False)
            prompt = dataclasses.replace(
                prompt, text=text + begun, token_ids=[*prompt.token_ids, *ids]
            )
    return exchange.constrained(params, param, rule), prompt


def _rule_of_calls(
    exchange: Exchange, param: str, calls: CallDemand, options: ChatOptions, params: SamplingParams
) -> tuple[Structured | None, bool]:
    """Return the rule of demanded calls; or None and True if dropping all calls but the first does
    what is demanded. Raises `HttpError` if the model's format of calls can't be constrained."""
    parsing = exchange.served.parsing
    parser = parsing.parsers(options.chat_template).calls
    if parser is None:
        if calls.cut:
            return None, True
        reason = (
            "no tool parser fits the model's chat template, so the format of its calls is "
            "unknown (set one with --tool-parser)"
        )
        raise unsupported(param, reason)
    template = parsing.template(options.chat_template)
    one_line = _ends_at_line_break(exchange, params)
    try:
        rule = call_rule(
            parser,
            template,
            calls.tools,
            required=calls.required,
            single=calls.single,
            one_line=one_line,
        )
        return Structured(structural_tag=rule), False
    except ValueError as error:  # including `RequestError`
        if calls.cut:
            return None, True
        raise unsupported(param, str(error)) from None


def _ends_at_line_break(exchange: Exchange, params: SamplingParams) -> bool:
    """Return True if a line break ends the answer, as an end token of the model or a stop of the
    request."""
    if any("\n" in stop for stop in params.stop or ()):
        return True
    spell = speller(exchange.engine.tokenizer)
    ends = (*exchange.engine.info.intake.defaults.eos_token_ids, *(params.stop_token_ids or ()))
    return spell is not None and any(b"\n" in spell(token) for token in ends)


def _reasons_first(
    exchange: Exchange, options: ChatOptions, prompt: TokenizedText | MediaPrompt
) -> bool:
    """Return True if the answer begins with reasoning: the prompt has opened it; or the template
    could disable it, and wasn't asked to; or the server's settings name a reasoning parser."""
    parsing = exchange.served.parsing
    marks = parsing.parsers(options.chat_template).marks
    if marks is None or options.continue_final_message:
        return False
    text = prompt.text or ""
    if opens_reasoning(text, marks) or text.rstrip().endswith(marks[1].rstrip()):
        return opens_reasoning(text, marks)
    variables = dict(options.chat_template_kwargs or {})
    if (
        False in (variables.get("enable_thinking"), variables.get("thinking"))
        or variables.get(EFFORT) == "none"
    ):
        return False
    template = parsing.template(options.chat_template)
    return parsing.expects_reasoning or "enable_thinking" in template or EFFORT in template
