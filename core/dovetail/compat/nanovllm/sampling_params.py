"""nano-vllm's parameters of requests."""

from __future__ import annotations

from typing import Any

import dovetail
from dovetail.compat.settable import Settable
from dovetail.request.sampling_params import check_names

NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
WHOLE_TEXT = {"skip_special_tokens": False, "include_stop_str_in_output": True}


class SamplingParams(Settable, dovetail.SamplingParams):
    """`dovetail.SamplingParams` with nano-vllm's defaults and order of arguments.

    The defaults of the model's `generation_config.json` don't apply, and texts contain special
    tokens, EOS included. `others`: fields of `dovetail.SamplingParams`.
    """

    __slots__ = ()

    def __init__(
        self,
        temperature: float = 1.0,
        max_tokens: int | None = 64,
        ignore_eos: bool = False,
        **others: Any,
    ) -> None:
        """Raises `RequestError` for a wrong value. A `temperature` of 0 is greedy, which nano-vllm
        refuses."""
        check_names(others, self.__match_args__)
        fields = {**NEUTRAL, **WHOLE_TEXT, **others}
        super().__init__(
            temperature=temperature,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            **fields,
        )


__all__ = ["SamplingParams"]
