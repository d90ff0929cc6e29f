"""`/v1/completions`: OpenAI's completions of texts and token ids, as one answer or as a stream."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.routing import Route

from dovetail.request import CompletionOutput, Logprob, RequestOutput, TokenLogprobMap
from dovetail_server.constraining import constrained
from dovetail_server.exchange import Endpoint, Exchange, Job, Part, new_id
from dovetail_server.protocol.completions import CompletionRequest, completion_demand, completion_params, prompts_of, scores_only
from dovetail_server.protocol.openai_common import RENAMED, at_least, check_stream, engine_fields, likeliest, prompt_logprobs_json, usage
from dovetail_server.streams import DONE, event


async def completions(exchange: Exchange) -> None:
    """Go on with one prompt or several."""
    body = await exchange.body(CompletionRequest)
    exchange.renamed = RENAMED
    model = exchange.record.model = exchange.server.model_named(body.model)
    params, prompts = exchange.check(completion_params(body)), prompts_of(body)
    params = constrained(exchange, params, completion_demand(body))
    prompts = await exchange.tokenized(prompts)
    fields = engine_fields(body, exchange.engine)
    name = new_id("cmpl")
    head = {"id": name, "object": "text_completion", "created": int(time.time()), "model": model}
    parts: list[CompletionPart]
    if body.stream:
        stream = CompletionStream(exchange, body, head)
        parts = [StreamedPart(exchange, body, index * params.n, params.n, stream) for index in range(len(prompts))]
        exchange.on_finished = lambda: stream.finish(parts)
    else:
        parts = [AnswerPart(exchange, body, index * params.n, params.n) for index in range(len(prompts))]
    await exchange.run([Job(prompt, params, part, fields) for prompt, part in zip(prompts, parts, strict=True)], name)
    if not body.stream:
        choices = [choice for part in parts if isinstance(part, AnswerPart) for choice in part.choices()]
        await exchange.reply({**head, "choices": choices, "usage": _usage(parts)})


class Logprobs:
    """Log-probabilities of one sample's tokens in the form of this API. Offsets count characters of the sample's text."""

    def __init__(self, top: int) -> None:
        self._top, self._offset = top, 0

    def of_prompt(self, output: RequestOutput, texts: Sequence[str]) -> dict[str, list[Any]]:
        made = _no_logprobs()
        for token, text, position in zip(output.prompt_token_ids, texts, output.prompt_logprobs or (), strict=False):
            self._add(made, text, None if position is None else position[int(token)], position)
        return made

    def of_sample(self, sample: CompletionOutput) -> dict[str, list[Any]]:
        made = _no_logprobs()
        for token, position in zip(sample.token_ids, sample.logprobs or (), strict=False):
            one = position[token]
            self._add(made, one.decoded_token or "", one, position)
        return made

    def _add(self, made: dict[str, list[Any]], text: str, one: Logprob | None, position: TokenLogprobMap | None) -> None:
        made["tokens"].append(text)
        made["token_logprobs"].append(None if one is None else at_least(one.logprob))
        top = None if position is None else {other.decoded_token or "": at_least(other.logprob) for _, other in likeliest(position, self._top)}
        made["top_logprobs"].append(top)
        made["text_offset"].append(self._offset)
        self._offset += len(text)


def _no_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


class CompletionPart(Part):
    """The samples of one prompt. Their choices count from `first`."""

    def __init__(self, exchange: Exchange, body: CompletionRequest, first: int, n: int) -> None:
        super().__init__(exchange)
        self._scores_only = scores_only(body)
        self.body, self.first = body, first
        self.logprobs = [None if body.logprobs is None else Logprobs(body.logprobs) for _ in range(n)]

    def take(self, output: RequestOutput) -> None:
        if self._scores_only:
            self.completion_tokens = 0
            output = without_answer(output)
        self.tell(output)

    def tell(self, output: RequestOutput) -> None:
        """Write what is new, or keep it."""
        raise NotImplementedError

    def echo(self, output: RequestOutput, index: int) -> tuple[str, dict[str, list[Any]] | None]:
        """Return the prompt's text, and its log-probabilities."""
        tokenizer, log = self.exchange.engine.tokenizer, self.logprobs[index]
        ids = [int(token) for token in output.prompt_token_ids]
        text = output.prompt if output.prompt is not None else tokenizer.decode(ids)
        return text, None if log is None else log.of_prompt(output, [tokenizer.decode([token]) for token in ids])


def without_answer(output: RequestOutput) -> RequestOutput:
    """Return an output as if nothing had been generated."""
    samples = [CompletionOutput(sample.index, "", (), finish_reason="length" if sample.finish_reason else None) for sample in output.outputs]
    return dataclasses.replace(output, outputs=samples)


class AnswerPart(CompletionPart):
    """An answer in one piece."""

    def __init__(self, exchange: Exchange, body: CompletionRequest, first: int, n: int) -> None:
        super().__init__(exchange, body, first, n)
        self._text: list[list[str]] = [[] for _ in range(n)]
        self._told: list[dict[str, list[Any]]] = [_no_logprobs() for _ in range(n)]
        self._token_ids: list[list[int]] = [[] for _ in range(n)]
        self._last: list[CompletionOutput | None] = [None] * n
        self._output: RequestOutput | None = None

    def tell(self, output: RequestOutput) -> None:
        for sample in output.outputs:
            index = sample.index
            if self._last[index] is None and self.body.echo:
                text, logprobs = self.echo(output, index)
                self._text[index].append(text)
                self._add(index, logprobs)
            self._last[index] = sample
            self._text[index].append(sample.text)
            self._token_ids[index] += sample.token_ids
            if (log := self.logprobs[index]) is not None:
                self._add(index, log.of_sample(sample))
        self._output = output

    def choices(self) -> list[dict[str, Any]]:
        """Return the choices of its prompt."""
        return [self._choice(index) for index in range(len(self._last))]

    def _add(self, index: int, logprobs: dict[str, list[Any]] | None) -> None:
        for name, values in (logprobs or {}).items():
            self._told[index][name] += values

    def _choice(self, index: int) -> dict[str, Any]:
        last, output = self._last[index], self._output
        choice = {
            "index": self.first + index,
            "text": "".join(self._text[index]),
            "logprobs": None if self.body.logprobs is None else self._told[index],
            "finish_reason": last.finish_reason if last is not None else None,
            "stop_reason": last.stop_reason if last is not None else None,
        }
        if output is not None and self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)
        if output is not None and self.body.return_token_ids:
            choice["prompt_token_ids"] = [int(token) for token in output.prompt_token_ids]
            choice["token_ids"] = self._token_ids[index]
        return choice


class CompletionStream:
    """The chunks of all prompts of a request."""

    def __init__(self, exchange: Exchange, body: CompletionRequest, head: dict[str, Any]) -> None:
        self._head, self.options = head, check_stream(body)
        self.events = exchange.begin_stream()

    def chunk(self, choices: list[dict[str, Any]], used: dict[str, Any] | None) -> bytes:
        chunk = {**self._head, "choices": choices}
        if used is not None or self.options.include_usage:
            chunk["usage"] = used
        return event(chunk)

    def finish(self, parts: Sequence[Part]) -> None:
        """Write what follows the last choice."""
        self.events.write((self.chunk([], _usage(parts)) if self.options.include_usage else b"") + DONE)


class StreamedPart(CompletionPart):
    """The chunks of one prompt. Plain text goes out between two ready pieces of JSON; all else is made with dicts."""

    def __init__(self, exchange: Exchange, body: CompletionRequest, first: int, n: int, stream: CompletionStream) -> None:
        super().__init__(exchange, body, first, n)
        self._stream = stream
        self._begun = [False] * n
        self._counts = stream.options.continuous_usage_stats
        self._plain = body.logprobs is None and not body.return_token_ids and not self._counts
        self._prefixes, self._suffix = [], b""
        for index in range(n):
            prefix, _, self._suffix = stream.chunk([_choice(first + index, "@")], None).partition(b'"@"')
            self._prefixes.append(prefix)

    def tell(self, output: RequestOutput) -> None:
        for sample in output.outputs:
            index = sample.index
            if self._plain and sample.finish_reason is None and self._begun[index]:
                if sample.text:
                    self._stream.events.write(b"%b%b%b" % (self._prefixes[index], orjson.dumps(sample.text), self._suffix))
            else:
                self._write_sample(sample, output)

    def _write_sample(self, sample: CompletionOutput, output: RequestOutput) -> None:
        index, choices = sample.index, []
        if not self._begun[index]:
            self._begun[index] = True
            if self._plain and len(self._begun) == 1:
                self.tell_plainly(self._prefixes[0], self._suffix)
            if self.body.echo:
                text, logprobs = self.echo(output, index)
                choices.append({**_choice(self.first + index, text), "logprobs": logprobs})
            if self.body.return_token_ids:
                choices = choices or [_choice(self.first + index, "")]
                choices[0]["prompt_token_ids"] = [int(token) for token in output.prompt_token_ids]
        if sample.text or sample.finish_reason is not None or not self._plain:
            choice = {**_choice(self.first + index, sample.text), "finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason}
            if (log := self.logprobs[index]) is not None:
                choice["logprobs"] = log.of_sample(sample)
            if self.body.return_token_ids:
                choice["token_ids"] = list(sample.token_ids)
            choices.append(choice)
        if choices:
            used = _usage([self]) if self._counts else None
            self._stream.events.write(b"".join(self._stream.chunk([choice], used) for choice in choices))


def _choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}


def _usage(parts: Sequence[Part]) -> dict[str, Any]:
    return usage(sum(part.prompt_tokens for part in parts), sum(part.completion_tokens for part in parts), sum(part.cached_tokens for part in parts))


ROUTES = [Route("/v1/completions", Endpoint(completions), methods=["POST"])]
