"""Dovetail: a pluggable LLM inference engine.

The names below are loaded when first used, so that `import dovetail` is quick and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.config import EngineConfig
    from dovetail.engine.async_engine import AsyncLLMEngine
    from dovetail.engine.llm import LLM
    from dovetail.engine.llm_engine import LLMEngine
    from dovetail.errors import DovetailError
    from dovetail.request import CompletionOutput, OutputKind, RequestOutput, SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": "dovetail.engine.llm",
    "LLMEngine": "dovetail.engine.llm_engine",
    "AsyncLLMEngine": "dovetail.engine.async_engine",
    "EngineConfig": "dovetail.config",
    "DovetailError": "dovetail.errors",
    "CompletionOutput": "dovetail.request",
    "OutputKind": "dovetail.request",
    "RequestOutput": "dovetail.request",
    "SamplingParams": "dovetail.request",
}

__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "DovetailError",
    "EngineConfig",
    "LLMEngine",
    "OutputKind",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dovetail' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
