"""`/v1/completions`: OpenAI's completions of texts and token ids, whole or streamed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from starlette.routing import Route

from dovetail.front.request_checks import cuts
from dovetail.request import CompletionOutput, Logprob, RequestOutput, TokenLogprobMap
from dovetail_server.exchange import Endpoint, Exchange, new_id
from dovetail_server.protocol.completions import CompletionRequest
from dovetail_server.protocol.openai_common import at_least, engine_fields, likeliest, prompt_logprobs_json
from dovetail_server.protocol.structured import read_demand
from dovetail_server.routes.answering import constrained
from dovetail_server.routes.choices import Choices, ChunkStream, token_ids_of_prompt, usage_of


async def completions(exchange: Exchange) -> None:
    """Continue one prompt or several."""
    body, model = await exchange.generation_body(CompletionRequest)
    params, prompts = exchange.check(body.params()), body.prompts()
    demand = read_demand(body, body.response_format)
    params = constrained(exchange, params, demand.param, demand.rule)
    exchange.check_samples(len(prompts), params.n)
    prompts = await exchange.made(exchange.engine.source(prompts, cut=cuts(params)))
    name = new_id("cmpl")
    head = {"id": name, "object": "text_completion", "created": int(time.time()), "model": model}
    stream = ChunkStream(exchange, body, head) if body.stream else None
    listeners = [CompletionChoices(exchange, body, params.n, stream, index * params.n) for index in range(len(prompts))]
    if stream is not None:
        exchange.on_finished = lambda: stream.finish(listeners)
    await exchange.run(name, params, engine_fields(body, exchange.engine), list(zip(prompts, listeners, strict=True)))
    if stream is None:
        choices = [choice for listener in listeners for choice in listener.whole()]
        await exchange.reply({**head, "choices": choices, "usage": usage_of(listeners)})


class Logprobs:
    """Log-probabilities of one sample's tokens in this API's format. Offsets count characters of the sample's text."""

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


class CompletionChoices(Choices):
    """Choices of one prompt. Whole choices are those of a stream, merged."""

    text_field: ClassVar = {"text": "@"}

    def __init__(self, exchange: Exchange, body: CompletionRequest, n: int, stream: ChunkStream | None, first: int) -> None:
        super().__init__(exchange, body, n, stream, first=first, is_plain=body.logprobs is None)
        self._body = body
        self._logprobs = [None if body.logprobs is None else Logprobs(body.logprobs) for _ in range(n)]
        self._whole = [self._choice(index, text="") | {"logprobs": None if body.logprobs is None else _no_logprobs()} for index in range(n)]
        self._texts: list[list[str]] = [[] for _ in range(n)]

    def take(self, output: RequestOutput) -> None:
        if self._body.scores_only:
            self.completion_tokens = 0
            output = without_answer(output)
        super().take(output)

    def choices_of(self, sample: CompletionOutput, output: RequestOutput, *, is_first: bool) -> list[dict[str, Any]]:
        index, log, choices = sample.index, self._logprobs[sample.index], []
        if is_first and self._body.echo:
            text, logprobs = self._echo(output, log)
            choices.append({**self._choice(index, text=text), "logprobs": logprobs})
        if is_first and self._token_ids:
            choices = choices or [self._choice(index, text="")]
            choices[0]["prompt_token_ids"] = token_ids_of_prompt(output)
        if sample.text or sample.finish_reason is not None or not self._plain:
            choice = {**self._choice(index, text=sample.text), "finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason}
            if log is not None:
                choice["logprobs"] = log.of_sample(sample)
            if self._token_ids:
                choice["token_ids"] = list(sample.token_ids)
            choices.append(choice)
        return choices

    def keep(self, sample: CompletionOutput, output: RequestOutput, *, is_first: bool) -> None:
        whole = self._whole[sample.index]
        for choice in self.choices_of(sample, output, is_first=is_first):
            self._texts[sample.index].append(choice.pop("text"))
            for name, values in (choice.pop("logprobs") or {}).items():
                whole["logprobs"][name] += values
            if self._token_ids:
                whole.setdefault("token_ids", []).extend(choice.pop("token_ids", ()))
            whole |= choice
        if sample.finish_reason is not None and self._body.prompt_logprobs is not None:
            whole["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)

    def whole(self) -> list[dict[str, Any]]:
        """Return the finished choices."""
        return [choice | {"text": "".join(texts)} for choice, texts in zip(self._whole, self._texts, strict=True)]

    def _echo(self, output: RequestOutput, log: Logprobs | None) -> tuple[str, dict[str, list[Any]] | None]:
        """Return the prompt's text, and its log-probabilities."""
        tokenizer, ids = self.exchange.engine.tokenizer, token_ids_of_prompt(output)
        text = output.prompt if output.prompt is not None else tokenizer.decode(ids)
        return text, None if log is None else log.of_prompt(output, [tokenizer.decode([token]) for token in ids])


def without_answer(output: RequestOutput) -> RequestOutput:
    """Return an output as if nothing had been generated."""
    samples = [CompletionOutput(sample.index, "", (), finish_reason="length" if sample.finish_reason else None) for sample in output.outputs]
    return dataclasses.replace(output, outputs=samples)


ROUTES = [Route("/v1/completions", Endpoint(completions), methods=["POST"])]
