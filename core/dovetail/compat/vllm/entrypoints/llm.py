"""vLLM's engine for offline use."""

from __future__ import annotations

from dovetail import LLM
from dovetail.compat.vllm.gaps import missing

__all__ = ["LLM"]
__getattr__ = missing(__name__)
