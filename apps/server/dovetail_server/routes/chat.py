"""`/v1/chat/completions`: OpenAI's chat, as one answer or as a stream."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.routing import Route

from dovetail.request import CompletionOutput, RequestOutput
from dovetail_server.constraining import constrained_chat
from dovetail_server.exchange import Endpoint, Exchange, Job, Part, new_id
from dovetail_server.parsers import AnswerReader, Content, Event, OutputParser, Reasoning, ToolCallArguments, ToolCallStart, reasoning_tokens_of
from dovetail_server.protocol.chat import ChatRequest, chat_demand, chat_options, chat_params, renamed_fields
from dovetail_server.protocol.openai_common import StreamOptions, check_stream, engine_fields, logprobs_json, prompt_logprobs_json, usage
from dovetail_server.routes.answering import rendered
from dovetail_server.streams import DONE, event


async def chat(exchange: Exchange) -> None:
    """Answer a conversation."""
    body = await exchange.body(ChatRequest)
    exchange.renamed = renamed_fields(body)
    model = exchange.record.model = exchange.server.model_named(body.model)
    params, options, demand = exchange.check(chat_params(body)), chat_options(body), chat_demand(body)
    params, prompt = constrained_chat(exchange, params, demand, options, await rendered(exchange, body.messages, options))
    name = new_id("chatcmpl")
    head = {"id": name, "object": "chat.completion", "created": int(time.time()), "model": model}
    fields = engine_fields(body, exchange.engine)
    parsers = [exchange.server.parsing.parser(prompt, tools=options.tools, template=body.chat_template) for _ in range(params.n)]
    if any(parser is not None and parser.needs_special_tokens for parser in parsers):
        params = dataclasses.replace(params, skip_special_tokens=False)
    if body.stream:
        stream = ChatStream(exchange, body, head, parsers)
        exchange.on_finished = stream.finish
        await exchange.run([Job(prompt, params, stream, fields)], name)
    else:
        answer = ChatAnswer(exchange, body, parsers)
        await exchange.run([Job(prompt, params, answer, fields)], name)
        await exchange.reply({**head, **answer.content()})


class Message:
    """An assistant's message as its parser's events build it up."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[ToolCallStart, list[str]]] = []

    def take(self, events: Sequence[Event]) -> None:
        for one in events:
            match one:
                case Content(text):
                    self._content.append(text)
                case Reasoning(text):
                    self._reasoning.append(text)
                case ToolCallStart():
                    self._calls.append((one, []))
                case ToolCallArguments(index, text):
                    self._calls[index][1].append(text)

    def json(self) -> dict[str, Any]:
        made: dict[str, Any] = {"role": "assistant", "content": "".join(self._content), "refusal": None}
        if self._reasoning:
            made["reasoning_content"] = made["reasoning"] = "".join(self._reasoning)
        if self._calls:
            made["content"] = made["content"] or None
            made["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "".join(arguments)}}
                for call, arguments in self._calls
            ]
        return made


class Choice:
    """One sample of an answer that is told at its end."""

    def __init__(self, index: int, parser: OutputParser | None) -> None:
        self.index, self.reader = index, AnswerReader(parser)
        self._message = Message()
        self.token_ids: list[int] = []
        self.logprobs: list[dict[str, Any]] = []
        self.stop_reason: int | str | None = None
        self._finish: str | None = None

    def take(self, sample: CompletionOutput, logprobs: Sequence[dict[str, Any]]) -> None:
        self._message.take(self.reader.read(sample))
        self.token_ids += sample.token_ids
        self.logprobs += logprobs
        self._finish, self.stop_reason = sample.finish_reason, sample.stop_reason

    def message(self) -> tuple[dict[str, Any], str | None]:
        """Return the message, and why it ended."""
        made = self._message.json()
        return made, finish_reason(self._finish, "tool_calls" in made and not self.reader.in_call)


def finish_reason(reason: str | None, called: bool) -> str | None:
    """Return OpenAI's word for why an answer ended; `called`: it has tool calls, none of them cut off."""
    return "tool_calls" if called and reason == "stop" else reason


class ChatAnswer(Part):
    """An answer in one piece."""

    def __init__(self, exchange: Exchange, body: ChatRequest, parsers: Sequence[OutputParser | None]) -> None:
        super().__init__(exchange)
        self._body = body
        self._top = (body.top_logprobs or 0) if body.logprobs else None
        self._choices = [Choice(index, parser) for index, parser in enumerate(parsers)]
        self._last: RequestOutput | None = None

    def take(self, output: RequestOutput) -> None:
        for sample in output.outputs:
            logprobs = () if self._top is None else logprobs_json(sample, self._top, self.exchange.engine.tokenizer)
            self._choices[sample.index].take(sample, logprobs)
        self._last = output

    def content(self) -> dict[str, Any]:
        """Return choices and usage."""
        readers = [choice.reader for choice in self._choices]
        content: dict[str, Any] = {
            "choices": [self._choice(choice) for choice in self._choices],
            "usage": usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens, reasoning_tokens_of(readers)),
        }
        if self._last is not None and self._body.prompt_logprobs is not None:
            content["prompt_logprobs"] = prompt_logprobs_json(self._last.prompt_logprobs)
        if self._last is not None and self._body.return_token_ids:
            content["prompt_token_ids"] = [int(token) for token in self._last.prompt_token_ids]
        return content

    def _choice(self, choice: Choice) -> dict[str, Any]:
        message, finish = choice.message()
        made: dict[str, Any] = {
            "index": choice.index,
            "message": message,
            "logprobs": None if self._top is None else {"content": choice.logprobs, "refusal": None},
            "finish_reason": finish,
            "stop_reason": choice.stop_reason,
        }
        if self._body.return_token_ids:
            made["token_ids"] = choice.token_ids
        return made


class ChatStream(Part):
    """An answer as chunks. A sample's plain text goes out between two ready pieces of JSON; all else is made with dicts."""

    def __init__(self, exchange: Exchange, body: ChatRequest, head: dict[str, Any], parsers: Sequence[OutputParser | None]) -> None:
        super().__init__(exchange)
        self._head = {**head, "object": "chat.completion.chunk"}
        self._stream = exchange.begin_stream()
        self._options: StreamOptions = check_stream(body)
        self._top = (body.top_logprobs or 0) if body.logprobs else None
        self._token_ids = bool(body.return_token_ids)
        self._said_role = [False] * len(parsers)
        self._readers = [AnswerReader(parser) for parser in parsers]
        self._called = [False] * len(parsers)  # there were tool calls
        self._plain = parsers[0] is None and self._top is None and not self._token_ids and not self._options.continuous_usage_stats
        self._prefixes, self._suffix = [], b""
        for index in range(len(parsers)):
            whole = event(self._chunk([self._choice(index, {"content": "@"})]))
            prefix, _, self._suffix = whole.partition(b'"@"')
            self._prefixes.append(prefix)

    def take(self, output: RequestOutput) -> None:
        if self._plain:
            for sample in output.outputs:
                index = sample.index
                if sample.finish_reason is None and self._said_role[index]:
                    if sample.text:
                        self._stream.write(b"%b%b%b" % (self._prefixes[index], orjson.dumps(sample.text), self._suffix))
                else:
                    self._write_sample(sample, output)
        else:
            for sample in output.outputs:
                self._write_sample(sample, output)

    def finish(self) -> None:
        """Write what follows the last choice."""
        last = b""
        if self._options.include_usage:
            last = event({**self._head, "choices": [], "usage": self._usage()})
        self._stream.write(last + DONE)

    def _write_sample(self, sample: CompletionOutput, output: RequestOutput) -> None:
        index, events = sample.index, []
        if not self._said_role[index]:
            self._said_role[index] = True
            if self._plain and len(self._readers) == 1:
                self.tell_plainly(self._prefixes[0], self._suffix)
            first = self._chunk([self._choice(index, {"role": "assistant", "content": ""})])
            if self._token_ids:
                first["prompt_token_ids"] = [int(token) for token in output.prompt_token_ids]
            events.append(event(first))
        deltas = self._deltas(index, sample)
        if deltas or not self._plain:
            choice = self._choice(index, deltas.pop(0) if deltas else {"content": ""})
            if self._top is not None:
                choice["logprobs"] = {"content": logprobs_json(sample, self._top, self.exchange.engine.tokenizer), "refusal": None}
            if self._token_ids:
                choice["token_ids"] = list(sample.token_ids)
            chunks = [choice, *(self._choice(index, delta) for delta in deltas)]
            if self._tells(sample) or chunks[0]["delta"] != {"content": ""}:
                events += [event(self._chunk([one])) for one in chunks]
        if sample.finish_reason is not None:
            reason = finish_reason(sample.finish_reason, self._called[index] and not self._readers[index].in_call)
            choice = {**self._choice(index, {}), "finish_reason": reason, "stop_reason": sample.stop_reason}
            events.append(event(self._chunk([choice])))
        if events:
            self._stream.write(b"".join(events))

    def _deltas(self, index: int, sample: CompletionOutput) -> list[dict[str, Any]]:
        """Return what is new of a sample's message."""
        events = self._readers[index].read(sample)
        self._called[index] |= any(type(one) is ToolCallStart for one in events)
        return [delta_json(one) for one in events]

    def _tells(self, sample: CompletionOutput) -> bool:
        """Return True if an output is told though it brought no text: because its tokens are counted or told."""
        return not self._plain and (self._top is not None or self._token_ids or self._options.continuous_usage_stats) and bool(sample.token_ids)

    def _choice(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "choices": choices}
        if self._options.continuous_usage_stats:
            chunk["usage"] = self._usage()
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def _usage(self) -> dict[str, Any]:
        return usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens, reasoning_tokens_of(self._readers))


def delta_json(one: Event) -> dict[str, Any]:
    """Return an event of a parser as the delta of a chunk."""
    match one:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case ToolCallStart(index, call_id, name):
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}]}
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


ROUTES = [Route("/v1/chat/completions", Endpoint(chat), methods=["POST"])]
