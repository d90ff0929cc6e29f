"""vLLM's engine for asyncio."""

from __future__ import annotations

from dovetail.compat.vllm.engines import AsyncLLMEngine
from dovetail.compat.vllm.gaps import missing

__all__ = ["AsyncLLMEngine"]
__getattr__ = missing(__name__)
