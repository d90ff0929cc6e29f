"""vLLM's engine."""

from __future__ import annotations

from dovetail.compat.vllm.engines import LLMEngine
from dovetail.compat.vllm.gaps import missing

__all__ = ["LLMEngine"]
__getattr__ = missing(__name__)
