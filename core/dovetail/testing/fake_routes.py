"""`FakeRouteContext`: a `RouteContext` without an engine. It answers every prompt with the same
text, word by word, and with log-probabilities where they are asked for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
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
    the log-probability `LOGPROB` if it is asked for, and no other token has one. `refusal`: an error that every request gets instead.
    `prompts`: the prompts so far. `running`: number of requests that have neither ended nor been
    aborted."""

    text: str = "Hello, world."
    models: tuple[str, ...] = ("fake",)
    refusal: DovetailError | None = None
    prompts: list[str | Sequence[int] | RoutePrompt] = field(default_factory=list)
    running: int = 0

    @property
    def tokenizer(self) -> FakeTokenizer:
        return FakeTokenizer()

    async def generate(
        self,
        prompt: str | Sequence[int] | RoutePrompt,
        params: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        self._check(prompt, params, options)
        self.prompts.append(prompt)
        self.running += 1
        try:
            words = re.findall(r"\s*\S+", self.text)
            for number, word in enumerate(words):
                await asyncio.sleep(0)  # as other requests run between two tokens
                yield self._output(prompt, params, word, number + 1 == len(words))
        finally:
            self.running -= 1

    async def answer(
        self,
        prompt: str | Sequence[int] | RoutePrompt,
        params: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        async for _ in self.generate(prompt, params, **options):
            pass
        return self._output(prompt, params, self.text, True)

    async def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatPromptOptions]
    ) -> RoutePrompt:
        if not messages or not all(
            isinstance(one, Mapping) and {"role", "content"} <= set(one) for one in messages
        ):
            raise RequestError("messages: expected a list of mappings with role and content")
        unknown = set(options) - set(ChatPromptOptions.__annotations__)
        if unknown:
            raise TypeError(f"chat_prompt got unknown options: {', '.join(sorted(unknown))}")
        text = "\n".join(f"{one['role']}: {one['content']}" for one in messages)
        return FakePrompt(text, self.tokenizer.encode(text))

    def check_health(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    def _check(self, prompt: Any, params: Any, options: RequestOptions) -> None:
        unknown = set(options) - set(RequestOptions.__annotations__)
        if unknown:
            raise TypeError(f"generate got unknown options: {', '.join(sorted(unknown))}")
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, got {type(params).__name__}")
        ids = getattr(prompt, "token_ids", prompt)
        if not isinstance(ids, str) and not all(isinstance(token, int) for token in ids):
            raise RequestError("the prompt must be text or a list of token ids")
        if not len(ids):
            raise RequestError("the prompt is empty: it needs at least one token")
        if self.refusal is not None:
            raise self.refusal

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
