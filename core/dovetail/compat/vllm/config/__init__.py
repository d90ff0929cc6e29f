"""vLLM's classes of settings, none of which is here: `LLM` has arguments instead."""

from __future__ import annotations

from dovetail.compat.vllm.gaps import missing

__all__: list[str] = []
__getattr__ = missing(__name__)
