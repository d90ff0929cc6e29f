"""`/v1/completions`: OpenAI's completions of texts and token ids, whole or streamed."""

from __future__ import annotations

import dataclasses
import time
from functools import partial
from typing import Any, ClassVar

from starlette.routing import Route

from dovetail.request.outputs import CompletionOutput, RequestOutput, TokenLogprobMap
from dovetail.serving import Tokenizer, cuts, texts_of_prompt, unwritten
from dovetail_server.exchange import Endpoint, Exchange, new_id
from dovetail_server.json_parts import Fields, Items
from dovetail_server.protocol.completions import CompletionRequest
from dovetail_server.protocol.openai_common import (
    at_least,
    engine_fields,
    escaped,
    likeliest,
    prompt_logprobs_json,
    token_bytes,
)
from dovetail_server.protocol.structured import read_demand
from dovetail_server.routes.choices import Choices, ChunkStream, token_ids_of_prompt, usage_of


async def completions(exchange: Exchange) -> None:
    """Continue one prompt or several."""
    body, model = await exchange.generation_body(CompletionRequest)
    params = await exchange.beside(body.params)
    prompts = body.prompts()
    demand = await exchange.beside(partial(read_demand, body, body.response_format))
    params = exchange.constrained(params, demand.param, demand.rule)
    exchange.check_samples(len(prompts), params.n)
    exchange.prompt_copies = params.n if body.echo or body.return_token_ids else 1
    prompts = await exchange.made(exchange.engine.source(prompts, cut=cuts(params)))
    name = new_id("cmpl")
    head = {"id": name, "object": "text_completion", "created": int(time.time()), "model": model}
    stream = ChunkStream(exchange, body, head) if body.stream else None
    listeners = [
        CompletionChoices(exchange, body, params.n, stream, index * params.n)
        for index in range(len(prompts))
    ]
    if stream is not None:
        exchange.on_finished = lambda: stream.finish(listeners)
    await exchange.run(
        name,
        params,
        engine_fields(body, exchange.engine),
        list(zip(prompts, listeners, strict=True)),
    )
    if stream is None:
        choices = [choice for listener in listeners for choice in listener.whole()]
        await exchange.reply_in_parts(
            Fields({**head, "choices": Items(map(Fields, choices)), "usage": usage_of(listeners)})
        )


class Logprobs:
    """Log-probabilities of one choice's tokens in this API's format. A part of a character is
    written as "bytes:\\xc3". Offsets count characters of the choice's text before a token: a token
    that the text leaves out, or that only begins a character, takes none."""

    def __init__(self, top: int, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._top = top
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._offset = 0

    def of_prompt(self, output: RequestOutput, text: str) -> dict[str, list[Any]]:
        """`text`: the prompt's, of which a cut prompt's tokens are the end."""
        made = _no_logprobs()
        ids = output.prompt_token_ids
        left_out = unwritten(self._tokenizer, output.prompt, ids)
        source = texts_of_prompt(self._tokenizer, output.prompt, ids)
        texts = source.append(ids).own
        texts[-1] += source.flush()
        written = [0 if place in left_out else len(one) for place, one in enumerate(texts)]
        self._offset = max(0, len(text) - sum(written))
        for token, own, length, position in zip(
            map(int, ids), texts, written, output.prompt_logprobs or (), strict=False
        ):
            self._add(made, token, own, length, position)
        return made

    def of_sample(self, sample: CompletionOutput) -> dict[str, list[Any]]:
        made = _no_logprobs()
        for token, position in zip(sample.token_ids, sample.logprobs or (), strict=False):
            text = position[token].decoded_token or ""
            length = len(text) - (
                len(self._tokenizer.decode([token])) if token in self._skipped else 0
            )
            self._add(made, token, text, length, position)
        return made

    def _add(
        self,
        made: dict[str, list[Any]],
        token: int,
        text: str,
        length: int,
        position: TokenLogprobMap | None,
    ) -> None:
        """`length`: the characters that the token adds to the choice's text."""
        made["tokens"].append(self._name(token, text))
        made["token_logprobs"].append(
            None if position is None else at_least(position[token].logprob)
        )
        made["top_logprobs"].append(None if position is None else self._likeliest(position))
        made["text_offset"].append(self._offset)
        self._offset += length

    def _likeliest(self, position: TokenLogprobMap) -> dict[str, float]:
        """Return the likeliest tokens by name. Of tokens with one name, only the likeliest has
        it."""
        named: dict[str, float] = {}
        for token, one in likeliest(position, self._top):
            name = self._name(token, one.decoded_token or "")
            named[f"token_id:{token}" if name in named else name] = at_least(one.logprob)
        return named

    def _name(self, token: int, text: str) -> str:
        own, spelled = token_bytes(token, text, self._tokenizer)
        return f"bytes:{escaped(spelled)}" if own is None else own


def _no_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


class CompletionChoices(Choices):
    """Choices of one prompt. Whole choices are those of a stream, merged."""

    text_field: ClassVar = {"text": "@"}

    def __init__(
        self,
        exchange: Exchange,
        body: CompletionRequest,
        n: int,
        stream: ChunkStream | None,
        first: int,
    ) -> None:
        super().__init__(exchange, body, n, stream, first=first, is_plain=body.logprobs is None)
        self._body = body
        self._logprobs = [self._new_logprobs() for _ in range(n)]
        self._whole = [
            self._choice(index, text="")
            | {"logprobs": None if body.logprobs is None else _no_logprobs()}
            for index in range(n)
        ]
        self._texts: list[list[str]] = [[] for _ in range(n)]

    def take(self, output: RequestOutput) -> None:
        if self._body.scores_only:
            self.completion_tokens = 0
            output = without_answer(output)
        super().take(output)

    def choices_of(
        self, sample: CompletionOutput, output: RequestOutput, *, is_first: bool
    ) -> list[dict[str, Any]]:
        index = sample.index
        log = self._logprobs[sample.index]
        choices = []
        if is_first and self._body.echo:
            text, logprobs = self._echo(output, log)
            choices.append({**self._choice(index, text=text), "logprobs": logprobs})
        if is_first and self._token_ids:
            choices = choices or [self._choice(index, text="")]
            choices[0]["prompt_token_ids"] = token_ids_of_prompt(output)
        if sample.text or sample.finish_reason is not None or not self._plain:
            choice = {
                **self._choice(index, text=sample.text),
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
            }
            if log is not None:
                choice["logprobs"] = log.of_sample(sample)
            if self._token_ids:
                choice["token_ids"] = list(sample.token_ids)
            choices.append(choice)
        return choices

    def collect(self, sample: CompletionOutput, output: RequestOutput, *, is_first: bool) -> None:
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
        return [
            choice | {"text": "".join(texts)}
            for choice, texts in zip(self._whole, self._texts, strict=True)
        ]

    def _echo(
        self, output: RequestOutput, log: Logprobs | None
    ) -> tuple[str, dict[str, list[Any]] | None]:
        """Return the prompt's text, and its log-probabilities."""
        tokenizer = self.exchange.engine.tokenizer
        ids = token_ids_of_prompt(output)
        text = output.prompt if output.prompt is not None else tokenizer.decode(ids)
        return text, None if log is None else log.of_prompt(output, text)

    def _new_logprobs(self) -> Logprobs | None:
        if self._body.logprobs is None:
            return None
        return Logprobs(
            self._body.logprobs,
            self.exchange.engine.tokenizer,
            self._body.skip_special_tokens is not False,
        )


def without_answer(output: RequestOutput) -> RequestOutput:
    """Return an output as if nothing had been generated."""
    samples = [
        CompletionOutput(
            sample.index, "", (), finish_reason="length" if sample.finish_reason else None
        )
        for sample in output.outputs
    ]
    return dataclasses.replace(output, outputs=samples)


ROUTES = [Route("/v1/completions", Endpoint(completions), methods=["POST"])]
