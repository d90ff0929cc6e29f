"""The body of `/v1/completions`."""

from __future__ import annotations

from typing import Any

from dovetail.front.prompts import Prompt
from dovetail.sampling_params import SamplingParams
from dovetail_server.errors import HttpError
from dovetail_server.protocol.decoding import Only, refuse_unsupported
from dovetail_server.protocol.openai_common import OPENAI_ONLY, OpenAIFields, check_stream, sampling_params
from dovetail_server.protocol.structured import Demand, ResponseFormat, demand_of

MAX_PROMPTS = 2048  # in one request
_DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionRequest(OpenAIFields, kw_only=True, forbid_unknown_fields=True):
    """One prompt or several to go on with."""

    prompt: str | list[str | int | list[int]]
    echo: bool = False
    logprobs: int | None = None
    response_format: ResponseFormat | None = None

    # Not every value is supported
    best_of: int | None = None
    suffix: Any = None


ONLY = (*OPENAI_ONLY, Only("suffix", ("",), "models here only go on with a text, they don't fill gaps"))


def completion_params(body: CompletionRequest) -> SamplingParams:
    """Return the parameters of each answer. Raises `HttpError` for what isn't supported, `RequestError` for what is wrong."""
    refuse_unsupported(body, ONLY)
    check_stream(body)
    if body.best_of not in (None, body.n or 1):
        raise HttpError(400, f"best_of: it must equal n ({body.n or 1}): all samples are told, got {body.best_of}", param="best_of")
    if body.echo and body.prompt_logprobs is not None:
        raise HttpError(400, "prompt_logprobs: echo with logprobs tells them", param="prompt_logprobs")
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if scores_only(body):
        if body.min_tokens:
            raise HttpError(400, f"min_tokens: it must be at most max_tokens (0), got {body.min_tokens}", param="min_tokens")
        max_tokens = 1  # which is computed along with the prompt, and told to nobody
    prompt_logprobs = body.logprobs if body.echo else body.prompt_logprobs
    return sampling_params(body, max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs)


def completion_demand(body: CompletionRequest) -> Demand:
    """Return what is demanded of each answer's form. Raises `HttpError`, `RequestError`."""
    return demand_of(body, ("response_format", body.response_format), None, has_tools=False)


def scores_only(body: CompletionRequest) -> bool:
    """Return True if nothing is to be generated: the prompt is echoed, with its log-probabilities if they are asked for. Raises `HttpError` if
    nothing would be told at all."""
    if body.max_tokens == 0 and not body.echo:
        raise HttpError(400, "max_tokens: 0 is for echo alone, which tells the prompt; else it must be >= 1", param="max_tokens")
    return body.max_tokens == 0


def prompts_of(body: CompletionRequest) -> list[Prompt]:
    """Return the prompts: texts, or lists of token ids. Raises `HttpError`."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [{"prompt_token_ids": prompt}]
    if len(kinds) != 1:
        raise HttpError(400, "prompt: it must be a text, token ids, or a list of one kind of these, with at least one in it", param="prompt")
    if len(prompt) > MAX_PROMPTS:
        raise HttpError(400, f"prompt: at most {MAX_PROMPTS} prompts a request, got {len(prompt)}", param="prompt")
    return [one if isinstance(one, str) else {"prompt_token_ids": one} for one in prompt]
