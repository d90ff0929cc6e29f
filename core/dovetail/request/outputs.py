"""Results of a request, as its user gets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.end_reason import EndReason, FinishReason


@dataclass(
    slots=True, unsafe_hash=True
)  # not frozen: a step makes thousands, and frozen ones take four times as long
class Logprob:
    """The log-probability of a token under the raw distribution (before temperature, filters and
    penalties). `rank` 1 is the likeliest token.

    `decoded_token` is what the token adds to the text before it: nothing if it ends within a
    character. A special token that the text leaves out has its name instead.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobMap = dict[int, Logprob]  # token id -> its logprob, for one position


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request's events, in seconds on the engine's clock; None: not yet."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    preemptions: int = 0
    # of its first sample: from each preemption to the next admission, the first 100
    pauses: Sequence[tuple[float, float | None]] = ()
    # of `RequestOutput.num_cached_tokens`, those that were restored for it from host memory or a
    # KV tier
    restored_tokens: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request.

    `text` and `token_ids` hold all of the output or only its new part, as
    `SamplingParams.output_kind` says.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    # one map for each of `token_ids`, made when it is read
    logprobs: Sequence[TokenLogprobMap] | None = None
    finish_reason: FinishReason | None = None
    # the stop token or string that matched (None: EOS), "kv_capacity", or the text of a rejection
    # or
    # failure
    stop_reason: int | str | None = None
    end_reason: EndReason | None = None  # `finish_reason` in detail

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def __getitem__(self, key: str) -> Any:
        """Return `output["text"]`, or `output["token_ids"]` as a list, as nano-vllm's results do.

        Raises `KeyError` for any other key.
        """
        if key == "text":
            return self.text
        if key == "token_ids":
            return list(self.token_ids)
        raise KeyError(
            f"an output answers to 'text' and 'token_ids', not to {key!r}; its other fields are "
            "attributes"
        )


@dataclass(slots=True)
class RequestOutput:
    """The output of one request, given to its user after each step that brought something, or once
    at its end (`SamplingParams.output_kind`)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool
    # None for the first token, and for each placeholder of an image
    prompt_logprobs: list[TokenLogprobMap | None] | None = None
    # prompt tokens found in the prefix cache (for n > 1 by the first sample)
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    prompt_index: int = 0  # index of its prompt in the list that `LLM` was given

    def __getitem__(self, key: str) -> Any:
        """Return the item of its first sample."""
        return self.outputs[0][key]
