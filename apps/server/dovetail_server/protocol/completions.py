"""The body of `/v1/completions`."""

from __future__ import annotations

from typing import Any

from dovetail.request.sampling_params import SamplingParams
from dovetail.serving import Prompt
from dovetail_server.errors import HttpError
from dovetail_server.protocol.decoding import Only, refuse_unsupported
from dovetail_server.protocol.openai_common import OPENAI_ONLY, OpenAIFields, sampling_params
from dovetail_server.protocol.structured import ResponseFormat

MAX_PROMPTS = 2048  # in one request
_DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionRequest(OpenAIFields, kw_only=True, forbid_unknown_fields=True):
    """One or more prompts to continue."""

    prompt: str | list[str | int | list[int]]
    echo: bool = False
    logprobs: int | None = None
    response_format: ResponseFormat | None = None

    # Only some values are supported
    best_of: int | None = None
    suffix: Any = None

    @property
    def scores_only(self) -> bool:
        """True if nothing is generated: the prompt is echoed, with its log-probabilities if
        requested."""
        return self.max_tokens == 0

    def params(self) -> SamplingParams:
        """Return the parameters of each answer. Raises `HttpError` for unsupported parameters,
        `RequestError` for invalid ones."""
        refuse_unsupported(self, ONLY)
        self.check_stream()
        if self.best_of not in (None, self.n or 1):
            raise HttpError(
                400,
                f"best_of: it must equal n ({self.n or 1}): all samples are returned, got "
                f"{self.best_of}",
                param="best_of",
            )
        if self.echo and self.prompt_logprobs is not None:
            raise HttpError(
                400, "prompt_logprobs: use echo with logprobs instead", param="prompt_logprobs"
            )
        max_tokens = _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        if self.scores_only:
            if not self.echo:
                raise HttpError(
                    400,
                    "max_tokens: 0 is only for echo, which returns the prompt; otherwise it must "
                    "be >= 1",
                    param="max_tokens",
                )
            if self.min_tokens:
                raise HttpError(
                    400,
                    f"min_tokens: it must be at most max_tokens (0), got {self.min_tokens}",
                    param="min_tokens",
                )
            max_tokens = 1  # computed along with the prompt, and discarded
        prompt_logprobs = self.logprobs if self.echo else self.prompt_logprobs
        return sampling_params(
            self, max_tokens=max_tokens, logprobs=self.logprobs, prompt_logprobs=prompt_logprobs
        )

    def prompts(self) -> list[Prompt]:
        """Return the prompts: texts, or lists of token ids. Raises `HttpError`."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        kinds = set(map(type, prompt))
        if kinds == {int}:
            return [{"prompt_token_ids": prompt}]
        if len(kinds) != 1:
            raise HttpError(
                400,
                "prompt: it must be a text, token ids, or a non-empty list of one kind of these",
                param="prompt",
            )
        if len(prompt) > MAX_PROMPTS:
            raise HttpError(
                400,
                f"prompt: at most {MAX_PROMPTS} prompts a request, got {len(prompt)}",
                param="prompt",
            )
        return [one if isinstance(one, str) else {"prompt_token_ids": one} for one in prompt]


ONLY = (
    *OPENAI_ONLY,
    Only("suffix", ("",), "models here only continue a text: they don't fill gaps"),
)
