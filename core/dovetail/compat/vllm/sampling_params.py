"""vLLM's parameters of requests."""

from __future__ import annotations

from dovetail.compat.vllm.gaps import missing
from dovetail.request.sampling_params import (
    BeamSearchParams,
    GuidedDecodingParams,
    OutputKind,
    SamplingParams,
    StructuredOutputsParams,
)


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
