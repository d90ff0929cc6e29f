"""Parts that several APIs share: parameters and their conversion for the engine, token counts,
log-probabilities. `Conversation` is a chat request in the one form that the server answers: the
bodies of all chat APIs convert themselves (`to_conversation`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from dovetail.request.lora import LoRARequest
from dovetail.request.outputs import CompletionOutput, Logprob, TokenLogprobMap
from dovetail.request.sampling_params import BEAM_SEARCH, OutputKind, SamplingParams
from dovetail.serving import ChatOptions, Tokenizer, speller
from dovetail_server.engine import ServedEngine
from dovetail_server.errors import HttpError
from dovetail_server.json_parts import Items
from dovetail_server.protocol import advisory
from dovetail_server.protocol.advisory import Advisory
from dovetail_server.protocol.decoding import Only, given
from dovetail_server.protocol.reasoning import AskedReasoning
from dovetail_server.protocol.structured import Demand, RuleFields

RENAMED = {
    "id": "request_id",
    "deadline": "deadline_s",
    "ttft_deadline": "ttft_deadline_s",
}  # engine name -> API name
OPENAI_ONLY = (
    Only("use_beam_search", (False,), f"{BEAM_SEARCH} in a program, the server has none"),
)
ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]


class GenerationFields(RuleFields, kw_only=True, forbid_unknown_fields=True):
    """Parameters of every API that generates: those that all have, and Dovetail's own."""

    ADVISORY: ClassVar[Sequence[Advisory]] = ()

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
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
    max_drafts: int | None = None
    deterministic: bool | None = None
    priority: int | None = None
    client: str | None = None
    deadline_s: float | None = None
    ttft_deadline_s: float | None = None
    tbt_s: float | None = None
    cache_salt: str | None = None
    predicted_tokens: int | None = None
    extra: dict[str, Any] | None = None
    extra_args: dict[str, Any] | None = None
    logits_processors: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None  # vLLM's name of `extra_args`

    def renamed(self) -> Mapping[str, str]:
        """Return the API's names of parameters that engine errors call otherwise."""
        return RENAMED


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's `stream_options`: selects what a stream contains in addition to the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None  # no-op: padding is never added


class OpenAIFields(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """Parameters of completions and of chat."""

    ADVISORY: ClassVar[Sequence[Advisory]] = advisory.COMPLETIONS

    n: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None

    # SGLang's structured-output parameters
    regex: str | None = None
    ebnf: str | None = None
    json_schema: dict[str, Any] | str | None = None

    # Without effect: see `advisory`
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: ServiceTier | None = None
    store: bool | None = None
    guided_decoding_backend: str | None = None

    # Only some values are supported
    use_beam_search: bool | None = None

    def check_stream(self) -> None:
        """Raise `HttpError` for parameters that contradict `stream`."""
        check_stream_options(self)
        if self.stream and self.prompt_logprobs is not None:
            raise HttpError(
                400,
                "prompt_logprobs: not available in a stream: set stream to false",
                param="prompt_logprobs",
            )


def check_stream_options(body: Any) -> None:
    """Raise `HttpError` for stream options without a stream."""
    if body.stream_options is not None and not body.stream:
        raise HttpError(
            400, "stream_options: only for streams: set stream to true", param="stream_options"
        )


# Fields of `SamplingParams` that the APIs name alike
_SAMPLING = tuple(
    name
    for name in (*GenerationFields.__struct_fields__, "n", "stop", "prompt_logprobs")
    if name in SamplingParams.__match_args__ and name not in RuleFields.__struct_fields__
)


def sampling_params(body: GenerationFields, **own: Any) -> SamplingParams:
    """Return the parameters of a request. `own`: fields of `SamplingParams` that the API names or
    encodes differently; None keeps a field's default, except for `max_tokens`. Raises
    `RequestError`."""
    fields = {name: getattr(body, name, None) for name in _SAMPLING} | own
    if body.vllm_xargs is not None:
        if body.extra_args is not None:
            raise HttpError(
                400,
                "vllm_xargs: another name of extra_args, which is also given: leave one of them "
                "out",
                param="vllm_xargs",
            )
        fields["extra_args"] = body.vllm_xargs
    max_tokens = fields.pop("max_tokens")
    return SamplingParams(**given(**fields), max_tokens=max_tokens, output_kind=OutputKind.DELTA)


def engine_fields(body: GenerationFields, engine: ServedEngine) -> Mapping[str, Any]:
    """Return the keyword arguments of `ServedEngine.submit`."""
    last, first = (
        None if seconds is None else engine.now() + seconds
        for seconds in (body.deadline_s, body.ttft_deadline_s)
    )
    return given(
        priority=body.priority,
        client=body.client,
        cache_salt=body.cache_salt,
        deadline=last,
        ttft_deadline=first,
        tbt_s=body.tbt_s,
        predicted_tokens=body.predicted_tokens,
        extra=body.extra,
        lora_request=adapter_of(body.model, engine),
    )


def adapter_of(model: str | None, engine: ServedEngine) -> LoRARequest | None:
    """Return the adapter that a request's `model` names, if it is one."""
    path = None if model is None else engine.adapters.get(model)
    return None if model is None or path is None else LoRARequest(model, 1, path)


class TokenCounts(NamedTuple):
    """Token counts of a request, or the sum of several."""

    prompt: int
    completion: int
    cached: int  # prompt tokens found in the prefix cache
    reasoning: int | None = None  # None: unknown
    restored: int = 0  # of the cached ones, those from host memory or a KV tier

    def openai_usage(self) -> dict[str, Any]:
        """Return OpenAI's `usage`."""
        details = (
            {}
            if self.reasoning is None
            else {"completion_tokens_details": {"reasoning_tokens": self.reasoning}}
        )
        restored = {"restored_tokens": self.restored} if self.restored else {}
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached, **restored},
            **details,
        }


def at_least(logprob: float) -> float:
    """Clamp a log-probability to OpenAI's minimum, -9999, which JSON can represent."""
    return max(logprob, -9999.0)


def likeliest(position: TokenLogprobMap, top: int) -> list[tuple[int, Logprob]]:
    """Return the `top` likeliest tokens of a position; the sampled token is included only if it is
    one of them."""
    return sorted(position.items(), key=lambda item: item[1].rank or 0)[:top]


def logprobs_json(sample: CompletionOutput, top: int, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return a sample's log-probabilities, one item per token, each with the `top` likeliest
    alternatives."""
    items = []
    for token, position in zip(sample.token_ids, sample.logprobs or (), strict=False):
        item = _logprob_json(token, position[token], tokenizer)
        item["top_logprobs"] = [
            _logprob_json(other, one, tokenizer) for other, one in likeliest(position, top)
        ]
        items.append(item)
    return items


def _logprob_json(token: int, one: Logprob, tokenizer: Tokenizer) -> dict[str, Any]:
    """`bytes` are the token's own. Those of a part of a character, which has no text, are its
    `token` as well, as OpenAI writes them."""
    text, spelled = token_bytes(token, one.decoded_token or "", tokenizer)
    return {
        "token": escaped(spelled) if text is None else text,
        "logprob": at_least(one.logprob),
        "bytes": list(spelled),
    }


def token_bytes(token: int, text: str, tokenizer: Tokenizer) -> tuple[str | None, bytes]:
    """Return a token's own text, None for a part of a character, and its bytes. `text`: what it
    adds to the text before it."""
    spell = speller(tokenizer)
    spelled = text.encode(errors="replace") if spell is None else spell(token)
    try:
        own = spelled.decode()
    except UnicodeDecodeError:
        return None, spelled
    if text.endswith(own):  # perhaps after U+FFFD for bytes before it
        return own, spelled
    return text, text.encode(errors="replace")  # without the space that begins a text


def escaped(spelled: bytes) -> str:
    return "".join([f"\\x{byte:02x}" for byte in spelled])


def prompt_logprobs_json(prompt_logprobs: list[TokenLogprobMap | None] | None) -> Items | None:
    """Return the log-probabilities of a prompt's tokens, by token id; null for the first. They are
    made one by one."""
    if prompt_logprobs is None:
        return None
    return Items(
        None
        if position is None
        else {
            str(token): {
                "logprob": at_least(one.logprob),
                "rank": one.rank,
                "decoded_token": one.decoded_token,
            }
            for token, one in position.items()
        }
        for position in prompt_logprobs
    )


class Conversation(NamedTuple):
    """A chat request, independent of its API."""

    messages: Sequence[Mapping[str, Any]]  # in OpenAI's chat format
    options: ChatOptions
    params: SamplingParams
    demand: Demand
    reasoning: AskedReasoning
