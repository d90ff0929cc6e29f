"""vLLM's engine for asyncio."""

from __future__ import annotations

from dovetail.compat.vllm.engines import AsyncLLMEngine
from dovetail.compat.vllm.gaps import missing

AsyncLLM = AsyncLLMEngine

__all__ = ["AsyncLLM"]
__getattr__ = missing(__name__)
