"""`FakeRouteContext`: a `RouteContext` without an engine. It answers every prompt with the same
text, word by word, and with log-probabilities where they are asked for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Unpack

from dovetail.api.routes import ChatPromptOptions, RequestOptions, RoutePrompt
from dovetail.errors import DovetailError, RequestError
from dovetail.request.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobMap
from dovetail.request.sampling_params import SamplingParams

LOGPROB = -1.0


class FakeTokenizer:
    """`RouteTokenizer` with a token for each byte of UTF-8."""

    vocab_size = 256

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        _check_text("text", text)
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        known = bytes(token for token in token_ids if 0 <= token < self.vocab_size)
        return known.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class FakePrompt:
    """`RoutePrompt` of a text."""

    text: str
    token_ids: Sequence[int]


@dataclass(slots=True)
class FakeRouteContext:
    """`RouteContext` that answers `text`, a token for each byte; each token of text and prompt has
    the log-probability `LOGPROB` if it is asked for, and no other token has one. `refusal`: an
    error that every request gets instead; after `words_before` words of its answer if that is set.
    `echoes`: answer the text of the prompt instead of `text`. `prompts` and `params`: those of the
    requests so far. `streamed`: number of
    those that `generate` got. `refused`: number of refusals. `running`: number of requests that
    have neither ended nor been aborted."""

    text: str = "Hello, world."
    models: tuple[str, ...] = ("fake",)
    refusal: DovetailError | None = None
    prompts: list[str | Sequence[int] | RoutePrompt] = field(default_factory=list)
    running: int = 0
    streamed: int = 0
    refused: int = 0
    echoes: bool = False
    words_before: int | None = None
    params: list[SamplingParams] = field(default_factory=list)

    @property
    def tokenizer(self) -> FakeTokenizer:
        return FakeTokenizer()

    async def generate(
        self,
        prompt: str | Sequence[int] | RoutePrompt,
        params: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        self.streamed += 1
        async with aclosing(self._outputs(prompt, params, options)) as outputs:
            async for output in outputs:
                yield output

    async def _outputs(
        self,
        prompt: str | Sequence[int] | RoutePrompt,
        params: SamplingParams,
        options: RequestOptions,
    ) -> AsyncGenerator[RequestOutput, None]:
        self._check(prompt, params, options)
        self.prompts.append(prompt)
        self.params.append(params)
        self.running += 1
        try:
            words = re.findall(r"\s*\S+", self._text(prompt))
            for number, word in enumerate(words):
                if number == self.words_before:
                    self._refuse()
                for _ in range(2):  # other tasks run, and also wait, between two tokens
                    await asyncio.sleep(0)
                yield self._output(prompt, params, word, number + 1 == len(words))
        finally:
            self.running -= 1

    async def answer(
        self,
        prompt: str | Sequence[int] | RoutePrompt,
        params: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        async for _ in self._outputs(prompt, params, options):
            pass
        return self._output(prompt, params, self._text(prompt), True)

    async def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatPromptOptions]
    ) -> RoutePrompt:
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise RequestError("messages: expected a list of mappings with role and content")
        if not all(
            isinstance(one, Mapping) and {"role", "content"} <= set(one) for one in messages
        ):
            raise RequestError("messages: expected a list of mappings with role and content")
        unknown = set(options) - set(ChatPromptOptions.__annotations__)
        if unknown:
            raise TypeError(f"chat_prompt got unknown options: {', '.join(sorted(unknown))}")
        for one in messages:
            content = one["content"]
            if not isinstance(content, list | None):
                _check_text("messages", content)
        text = "\n".join(f"{one['role']}: {one['content']}" for one in messages)
        return FakePrompt(text, self.tokenizer.encode(text))

    def check_health(self) -> None:
        self._refuse()

    def _refuse(self) -> None:
        if self.refusal is not None:
            self.refused += 1
            raise self.refusal

    def _check(self, prompt: Any, params: Any, options: RequestOptions) -> None:
        unknown = set(options) - set(RequestOptions.__annotations__)
        if unknown:
            raise TypeError(f"generate got unknown options: {', '.join(sorted(unknown))}")
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, got {type(params).__name__}")
        ids = getattr(prompt, "token_ids", prompt)
        if isinstance(ids, str):
            _check_text("the prompt", ids)
        elif not isinstance(ids, Sequence) or not all(type(token) is int for token in ids):
            raise RequestError("the prompt must be text or a list of token ids")
        if not len(ids):
            raise RequestError("the prompt is empty: it needs at least one token")
        if self.words_before is None:
            self._refuse()

    def _text(self, prompt: str | Sequence[int] | RoutePrompt) -> str:
        """Return the text of the answer to a prompt."""
        if not self.echoes:
            return self.text
        ids: Any = getattr(prompt, "token_ids", prompt)
        return ids if isinstance(ids, str) else self.tokenizer.decode(ids)

    def _output(
        self,
        prompt: str | Sequence[int] | RoutePrompt,
        params: SamplingParams,
        text: str,
        finished: bool,
    ) -> RequestOutput:
        given: Any = getattr(prompt, "token_ids", prompt)
        prompt_ids = self.tokenizer.encode(given) if isinstance(given, str) else list(given)
        ids = self.tokenizer.encode(text)
        sample = CompletionOutput(
            0,
            text,
            tuple(ids),
            logprobs=None if params.logprobs is None else _logprobs(ids),
            finish_reason="stop" if finished else None,
        )
        asked = params.prompt_logprobs is not None
        return RequestOutput(
            f"fake-{len(self.prompts)}",
            None,
            prompt_ids,
            [sample],
            finished,
            prompt_logprobs=[None, *_logprobs(prompt_ids[1:])] if asked else None,
        )


def _logprobs(ids: Sequence[int]) -> list[TokenLogprobMap]:
    return [{token: Logprob(LOGPROB, rank=1)} for token in ids]


def _check_text(what: str, text: str) -> None:
    if not isinstance(text, str):
        raise RequestError(f"{what} must be text, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{what} isn't valid Unicode: it has a lone surrogate") from None
