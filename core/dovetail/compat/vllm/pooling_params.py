"""vLLM's parameters of requests that pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dovetail
from dovetail.compat.settable import Settable
from dovetail.compat.vllm.gaps import missing
from dovetail.front.vllm_only import VllmOnly, leave_out
from dovetail.request.sampling_params import check_names

_ACTIVATION = "use the name use_activation"
_EACH_TOKEN = "encode(…, pooling_task='token_classify') returns the scores of each token"
_CHUNKS = (
    "encode(…, pooling_task='token_embed') returns a vector per token: average those of each chunk"
)
VLLM_NAMES: Mapping[str, VllmOnly] = {  # fields of vLLM's `PoolingParams`
    "activation": VllmOnly(_ACTIVATION),
    "extra_kwargs": VllmOnly("pooling has no further options", ({},)),
    "late_chunking_params": VllmOnly(_CHUNKS),
    "late_interaction_params": VllmOnly(
        "score(…, pooling_params=PoolingParams(task='token_embed')) compares vectors of tokens"
    ),
    "normalize": VllmOnly(_ACTIVATION),
    "output_kind": VllmOnly("pooling has a single output: leave it out", advisory=True),
    "requires_token_ids": VllmOnly("vLLM sets it itself: leave it out", (False,)),
    "returned_token_ids": VllmOnly(_EACH_TOKEN),
    "skip_reading_prefix_cache": VllmOnly("the prefix cache changes no result", advisory=True),
    "softmax": VllmOnly(_ACTIVATION),
    "step_tag_id": VllmOnly(_EACH_TOKEN),
}


class PoolingParams(Settable, dovetail.PoolingParams):
    """`dovetail.PoolingParams` as vLLM's programs make them."""

    __slots__ = ()

    def __init__(self, *args: Any, **named: Any) -> None:
        leave_out(VLLM_NAMES, named)
        check_names(named, self.__match_args__, "pooling")
        super().__init__(*args, **named)


__all__ = ["PoolingParams"]
__getattr__ = missing(__name__)
