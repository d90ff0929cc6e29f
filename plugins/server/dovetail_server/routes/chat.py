"""`/v1/chat/completions`: OpenAI's chat, as one answer or as a stream."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
from starlette.routing import Route

from dovetail.request import CompletionOutput, Logprob, RequestOutput, TokenLogprobMap
from dovetail_server.exchange import Endpoint, Exchange, Job, Part, new_id
from dovetail_server.protocol.chat import ChatRequest, chat_options, chat_params, renamed_fields
from dovetail_server.protocol.openai_common import StreamOptions, at_least, check_stream, engine_fields, prompt_logprobs_json, usage
from dovetail_server.streams import DONE, event


async def chat(exchange: Exchange) -> None:
    """Answer a conversation."""
    body = await exchange.body(ChatRequest)
    exchange.renamed = renamed_fields(body)
    model = exchange.record.model = exchange.server.model_named(body.model)
    params, options = chat_params(body), chat_options(body)
    prompt = await asyncio.to_thread(exchange.engine.chat.prompt, body.messages, options)
    name = new_id("chatcmpl")
    head = {"id": name, "object": "chat.completion", "created": int(time.time()), "model": model}
    fields = engine_fields(body, exchange.engine)
    if body.stream:
        stream = ChatStream(exchange, body, head, params.n)
        exchange.on_finished = stream.finish
        await exchange.run([Job(prompt, params, stream, fields)], name)
    else:
        answer = ChatAnswer(exchange, body, params.n)
        await exchange.run([Job(prompt, params, answer, fields)], name)
        await exchange.reply({**head, **answer.content()})


class Choice:
    """One sample of an answer that is told at its end."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[dict[str, Any]] = []
        self.last: CompletionOutput | None = None

    def take(self, sample: CompletionOutput, top: int | None) -> None:
        self.text.append(sample.text)
        self.token_ids += sample.token_ids
        if top is not None:
            self.logprobs += logprobs_json(sample, top)
        self.last = sample


class ChatAnswer(Part):
    """An answer in one piece."""

    def __init__(self, exchange: Exchange, body: ChatRequest, n: int) -> None:
        super().__init__(exchange)
        self._body = body
        self._top = (body.top_logprobs or 0) if body.logprobs else None
        self._choices = [Choice(index) for index in range(n)]
        self._last: RequestOutput | None = None

    def take(self, output: RequestOutput) -> None:
        for sample in output.outputs:
            self._choices[sample.index].take(sample, self._top)
        self._last = output

    def content(self) -> dict[str, Any]:
        """Return choices and usage."""
        content: dict[str, Any] = {
            "choices": [self._choice(choice) for choice in self._choices],
            "usage": usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens),
        }
        if self._last is not None and self._body.prompt_logprobs is not None:
            content["prompt_logprobs"] = prompt_logprobs_json(self._last.prompt_logprobs)
        if self._last is not None and self._body.return_token_ids:
            content["prompt_token_ids"] = [int(token) for token in self._last.prompt_token_ids]
        return content

    def _choice(self, choice: Choice) -> dict[str, Any]:
        last = choice.last
        made: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": None if self._top is None else {"content": choice.logprobs, "refusal": None},
            "finish_reason": last.finish_reason if last is not None else None,
            "stop_reason": last.stop_reason if last is not None else None,
        }
        if self._body.return_token_ids:
            made["token_ids"] = choice.token_ids
        return made


class ChatStream(Part):
    """An answer as chunks. A sample's plain text goes out between two ready pieces of JSON; all else is made with dicts."""

    def __init__(self, exchange: Exchange, body: ChatRequest, head: dict[str, Any], n: int) -> None:
        super().__init__(exchange)
        self._head = {**head, "object": "chat.completion.chunk"}
        self._stream = exchange.begin_stream()
        self._options: StreamOptions = check_stream(body)
        self._top = (body.top_logprobs or 0) if body.logprobs else None
        self._token_ids = bool(body.return_token_ids)
        self._said_role = [False] * n
        self._plain = self._top is None and not self._token_ids and not self._options.continuous_usage_stats
        self._prefixes, self._suffix = [], b""
        for index in range(n):
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
            first = self._chunk([self._choice(index, {"role": "assistant", "content": ""})])
            if self._token_ids:
                first["prompt_token_ids"] = [int(token) for token in output.prompt_token_ids]
            events.append(event(first))
        if sample.text or not self._plain:
            choice = self._choice(index, {"content": sample.text})
            if self._top is not None:
                choice["logprobs"] = {"content": logprobs_json(sample, self._top), "refusal": None}
            if self._token_ids:
                choice["token_ids"] = list(sample.token_ids)
            events.append(event(self._chunk([choice])))
        if sample.finish_reason is not None:
            choice = {**self._choice(index, {}), "finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason}
            events.append(event(self._chunk([choice])))
        if events:
            self._stream.write(b"".join(events))

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
        return usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens)


def logprobs_json(sample: CompletionOutput, top: int) -> list[dict[str, Any]]:
    """Return a sample's log-probabilities, one item a token, with the `top` likeliest beside each."""
    items = []
    for token, position in zip(sample.token_ids, sample.logprobs or (), strict=False):
        item = _logprob_json(position[token])
        item["top_logprobs"] = [_logprob_json(one) for one in likeliest(position, top)]
        items.append(item)
    return items


def likeliest(position: TokenLogprobMap, top: int) -> list[Logprob]:
    """Return the `top` likeliest tokens of a position, without the sampled one if that isn't among them."""
    return sorted(position.values(), key=lambda one: one.rank or 0)[:top]


def _logprob_json(one: Logprob) -> dict[str, Any]:
    text = one.decoded_token or ""
    return {"token": text, "logprob": at_least(one.logprob), "bytes": list(text.encode())}


ROUTES = [Route("/v1/chat/completions", Endpoint(chat), methods=["POST"])]
