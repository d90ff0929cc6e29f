"""Dovetail: a pluggable LLM inference engine.

The names below are loaded when first used, so that `import dovetail` is quick and needs no torch.
Importing the package sets up its logging: see `dovetail.base.logs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.base import lazy_names, logs

if TYPE_CHECKING:
    from dovetail.config.engine import EngineConfig
    from dovetail.end_reason import EndReason
    from dovetail.errors import DovetailError
    from dovetail.front.async_engine import AsyncLLMEngine
    from dovetail.front.engine_args import EngineArgs
    from dovetail.front.llm import LLM
    from dovetail.front.llm_engine import LLMEngine
    from dovetail.request.lora import LoRARequest
    from dovetail.request.outputs import CompletionOutput, RequestOutput
    from dovetail.request.pooling import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingParams,
        PoolingRequestOutput,
        ScoringRequestOutput,
        SparseEmbeddingRequestOutput,
    )
    from dovetail.request.sampling_params import BeamSearchParams, OutputKind, SamplingParams
    from dovetail.request.structured import Structured

__version__ = "0.1.0"

_HOMES = {
    "LLM": "dovetail.front.llm",
    "LLMEngine": "dovetail.front.llm_engine",
    "AsyncLLMEngine": "dovetail.front.async_engine",
    "BeamSearchParams": "dovetail.request.sampling_params",
    "EngineArgs": "dovetail.front.engine_args",
    "EngineConfig": "dovetail.config.engine",
    "DovetailError": "dovetail.errors",
    "EndReason": "dovetail.end_reason",
    "LoRARequest": "dovetail.request.lora",
    "CompletionOutput": "dovetail.request.outputs",
    "ClassificationRequestOutput": "dovetail.request.pooling",
    "EmbeddingRequestOutput": "dovetail.request.pooling",
    "PoolingParams": "dovetail.request.pooling",
    "PoolingRequestOutput": "dovetail.request.pooling",
    "ScoringRequestOutput": "dovetail.request.pooling",
    "SparseEmbeddingRequestOutput": "dovetail.request.pooling",
    "OutputKind": "dovetail.request.sampling_params",
    "RequestOutput": "dovetail.request.outputs",
    "SamplingParams": "dovetail.request.sampling_params",
    "Structured": "dovetail.request.structured",
}

__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "DovetailError",
    "EmbeddingRequestOutput",
    "EndReason",
    "EngineArgs",
    "EngineConfig",
    "LLMEngine",
    "LoRARequest",
    "OutputKind",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "SparseEmbeddingRequestOutput",
    "Structured",
    "__version__",
]

logs.set_up()

__getattr__ = lazy_names("dovetail", _HOMES)


def __dir__() -> list[str]:
    return __all__
