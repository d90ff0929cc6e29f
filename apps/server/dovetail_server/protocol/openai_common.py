"""Parameters that OpenAI's APIs have in common, Dovetail's further ones, and how both become `SamplingParams`: for all APIs, in this one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from dovetail.errors import UnsupportedError
from dovetail.front.grammars import token_speller
from dovetail.front.tokenizer import Tokenizer
from dovetail.request import CompletionOutput, Logprob, TokenLogprobMap
from dovetail.sampling_params import OutputKind, SamplingParams
from dovetail_server.engine import ServedEngine
from dovetail_server.errors import HttpError
from dovetail_server.protocol.decoding import Only, given
from dovetail_server.protocol.structured import RuleFields

RENAMED = {
    "id": "request_id",
    "deadline": "deadline_s",
    "ttft_deadline": "ttft_deadline_s",
}  # the engine's names of parameters that have another one in the APIs


class FurtherFields(RuleFields, kw_only=True, forbid_unknown_fields=True):
    """Dovetail's own parameters, of every API that generates."""

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    client: str | None = None
    deadline_s: float | None = None
    ttft_deadline_s: float | None = None
    tbt_s: float | None = None
    cache_salt: str | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """The things that a stream tells besides its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None  # harmless: padding is never added


class OpenAIFields(FurtherFields, kw_only=True, forbid_unknown_fields=True):
    """Parameters of completions and of chat."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None

    # `NO_EFFECT` has them
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    # Not every value is supported
    service_tier: str | None = None
    store: bool | None = None


NO_EFFECT = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
OPENAI_ONLY = (
    Only("store", (False,), "answers aren't kept: leave it out, or give false"),
    Only("service_tier", ("auto", "default"), 'there is one tier, "auto"; `priority` is what schedulers look at'),
)


def sampling_params(body: FurtherFields, **own: Any) -> SamplingParams:
    """Return the parameters of a request. `own`: the fields of `SamplingParams` that the API has by other names or in other forms; what is None
    keeps its default, `max_tokens` excepted. Raises `RequestError`."""
    names = ("temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias", "n", "prompt_logprobs")
    fields = {name: getattr(body, name, None) for name in (*_FURTHER, *names)} | own
    max_tokens = fields.pop("max_tokens")
    return SamplingParams(**given(**fields), max_tokens=max_tokens, output_kind=OutputKind.DELTA)


_OTHERS = ("priority", "client", "deadline_s", "ttft_deadline_s", "tbt_s", "cache_salt", *RuleFields.__struct_fields__)
_FURTHER = tuple(name for name in FurtherFields.__struct_fields__ if name not in _OTHERS)


def engine_fields(body: FurtherFields, engine: ServedEngine) -> Mapping[str, Any]:
    """Return what `ServedEngine.submit` takes besides prompt and parameters."""
    last, first = (None if seconds is None else engine.now() + seconds for seconds in (body.deadline_s, body.ttft_deadline_s))
    return given(priority=body.priority, client=body.client, cache_salt=body.cache_salt, deadline=last, ttft_deadline=first, tbt_s=body.tbt_s)


def check_stream(body: OpenAIFields) -> StreamOptions:
    """Return the options of a stream. Raises `HttpError` for what contradicts `stream`."""
    if body.stream_options is not None and not body.stream:
        raise HttpError(400, "stream_options: only a stream has them: set stream to true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise HttpError(400, "prompt_logprobs: a stream doesn't tell them: set stream to false", param="prompt_logprobs")
    return body.stream_options or StreamOptions()


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int | None = None) -> dict[str, Any]:
    """Return the tokens of a request as OpenAI's clients read them. `reasoning_tokens` None: nobody counts them."""
    details = {} if reasoning_tokens is None else {"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        **details,
    }


def at_least(logprob: float) -> float:
    """Return a log-probability that JSON can hold: OpenAI's least is -9999."""
    return max(logprob, -9999.0)


def likeliest(position: TokenLogprobMap, top: int) -> list[tuple[int, Logprob]]:
    """Return the `top` likeliest tokens of a position, without the sampled one if that isn't among them."""
    return sorted(position.items(), key=lambda item: item[1].rank or 0)[:top]


def logprobs_json(sample: CompletionOutput, top: int, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return a sample's log-probabilities, one item a token, with the `top` likeliest beside each."""
    items = []
    for token, position in zip(sample.token_ids, sample.logprobs or (), strict=False):
        item = _logprob_json(token, position[token], tokenizer)
        item["top_logprobs"] = [_logprob_json(other, one, tokenizer) for other, one in likeliest(position, top)]
        items.append(item)
    return items


def _logprob_json(token: int, one: Logprob, tokenizer: Tokenizer) -> dict[str, Any]:
    """`bytes` are the token's own, which may be part of a character; null if they aren't known."""
    text, spell = one.decoded_token or "", _speller(tokenizer)
    spelled = spell(token) if spell is not None else None if "\ufffd" in text else text.encode()
    return {"token": text, "logprob": at_least(one.logprob), "bytes": None if spelled is None else list(spelled)}


@lru_cache(maxsize=8)
def _speller(tokenizer: Tokenizer) -> Callable[[int], bytes] | None:
    try:
        return token_speller(tokenizer)
    except UnsupportedError:
        return None


def prompt_logprobs_json(prompt_logprobs: list[TokenLogprobMap | None] | None) -> list[dict[str, Any] | None] | None:
    """Return the log-probabilities of a prompt's tokens, by token id; null for the first."""
    if prompt_logprobs is None:
        return None
    return [
        None
        if position is None
        else {str(token): {"logprob": at_least(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token} for token, one in position.items()}
        for position in prompt_logprobs
    ]
