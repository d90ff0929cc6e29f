"""vLLM's parameters of requests: Dovetail's, with vLLM's names, and fields that may be set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dovetail
from dovetail.compat.settable import Settable
from dovetail.compat.vllm.gaps import missing
from dovetail.errors import RequestError
from dovetail.front.vllm_only import VllmOnly, leave_out
from dovetail.front.vllm_structured import (
    GuidedDecodingParams,
    StructuredOutputsParams,
    structured_of_vllm,
)
from dovetail.request.sampling_params import BEAM_SEARCH, OutputKind, check_names

_MARKS = "watermarks aren't supported: leave it out"
_ROUTES = "outputs contain tokens and log-probabilities, but no expert routing"
VLLM_NAMES: Mapping[str, VllmOnly] = {  # fields of vLLM's `SamplingParams`
    "best_of": VllmOnly("set n, and select the samples with the largest cumulative_logprob", (1,)),
    "flat_logprobs": VllmOnly("log-probabilities are a list of mappings", (False,)),
    "logprob_token_ids": VllmOnly(
        "set logprobs, or allowed_token_ids to choose among a few tokens"
    ),
    "output_text_buffer_length": VllmOnly("vLLM sets it itself: leave it out", (0,)),
    "prompt_logprob_start": VllmOnly("prompt_logprobs cover the whole prompt", (0,)),
    "prompt_logprob_token_ids": VllmOnly("set prompt_logprobs"),
    "repetition_detection": VllmOnly("set a repetition_penalty, or max_tokens"),
    "return_last_hidden_states": VllmOnly(
        "LLM.encode(…, pooling_task='token_embed') returns the hidden states of a text", (False,)
    ),
    "routed_experts_prompt_start": VllmOnly(_ROUTES, (0,)),
    "skip_clone": VllmOnly("requests share their parameters: leave it out", advisory=True),
    "skip_reading_prefix_cache": VllmOnly("give the request a unique cache_salt", (False,)),
    "spaces_between_special_tokens": VllmOnly(
        "text is decoded by the tokenizer's defaults: leave it out", (True,)
    ),
    "stream_interval": VllmOnly(
        "outputs are coalesced while their consumer is slow: leave it out", (1,)
    ),
    "thinking_token_budget": VllmOnly(
        "limit the reasoning: structured={'after': '</think>', 'after_tokens': …}"
    ),
    "trace_decode_token_ids": VllmOnly("append the tokens to the prompt, and set prompt_logprobs"),
    "use_beam_search": VllmOnly(BEAM_SEARCH, (False,)),
    "watermarking": VllmOnly(_MARKS, (False,)),
}
VLLM_BEAM_NAMES: Mapping[str, VllmOnly] = {  # fields of vLLM's `BeamSearchParams`
    "allowed_token_ids": VllmOnly("beam search considers all tokens", ([],)),
    "structured_outputs": VllmOnly(
        "beam search supports no structured output: set structured in SamplingParams"
    ),
    "watermarking": VllmOnly(_MARKS, (False,)),
}


class SamplingParams(Settable, dovetail.SamplingParams):
    """`dovetail.SamplingParams` as vLLM's programs make them."""

    __slots__ = ()

    def __init__(self, *args: Any, **named: Any) -> None:
        for name in ("structured_outputs", "guided_decoding"):
            if (rule := named.pop(name, None)) is not None:
                if named.get("structured") is not None:
                    raise RequestError(f"{name} and structured say the same: give one of them")
                named["structured"] = structured_of_vllm(rule)
        leave_out(VLLM_NAMES, named)
        check_names(named, self.__match_args__)
        super().__init__(*args, **named)

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Make parameters with the default for each field that is None, but for `max_tokens`."""
        given = {name: value for name, value in values.items() if value is not None}
        if "max_tokens" in values:
            given["max_tokens"] = values["max_tokens"]
        return cls(**given)


class BeamSearchParams(Settable, dovetail.BeamSearchParams):
    """`dovetail.BeamSearchParams` as vLLM's programs make them."""

    __slots__ = ()

    def __init__(self, *args: Any, **named: Any) -> None:
        leave_out(VLLM_BEAM_NAMES, named)
        check_names(named, self.__match_args__, "beam search")
        super().__init__(*args, **named)


class RequestOutputKind:
    """vLLM's names of `OutputKind`."""

    CUMULATIVE = OutputKind.CUMULATIVE
    DELTA = OutputKind.DELTA
    FINAL_ONLY = OutputKind.FINAL


__all__ = [
    "BeamSearchParams",
    "GuidedDecodingParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]
__getattr__ = missing(__name__)
