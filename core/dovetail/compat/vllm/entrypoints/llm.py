"""vLLM's engine for offline use."""

from __future__ import annotations

from dovetail.compat.vllm.engines import LLM
from dovetail.compat.vllm.gaps import missing

__all__ = ["LLM"]
__getattr__ = missing(__name__)
