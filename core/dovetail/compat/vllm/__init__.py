"""vLLM's names, in the modules where its programs look for them: `from vllm import LLM` becomes
`from dovetail.compat.vllm import LLM`.

Everything here is Dovetail's own. Importing a name or a module that isn't here raises `ImportError`
that says what to do instead; looking up a name, `AttributeError`.
"""

from __future__ import annotations

import sys

from dovetail import (
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingRequestOutput,
    EngineArgs,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from dovetail.compat.vllm.engines import LLM, AsyncLLMEngine, LLMEngine
from dovetail.compat.vllm.gaps import MissingModules, missing
from dovetail.compat.vllm.inputs import TextPrompt, TokensPrompt
from dovetail.compat.vllm.pooling_params import PoolingParams
from dovetail.compat.vllm.sampling_params import BeamSearchParams, SamplingParams
from dovetail.request.pooling import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    ScoringOutput,
)

AsyncEngineArgs = EngineArgs

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLMEngine",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "TextPrompt",
    "TokensPrompt",
]

__getattr__ = missing(__name__)

if not any(isinstance(finder, MissingModules) for finder in sys.meta_path):
    sys.meta_path.append(MissingModules())
