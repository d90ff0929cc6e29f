"""vLLM's config classes. Dovetail has none of them: use arguments of `LLM` instead."""

from __future__ import annotations

from dovetail.compat.vllm.gaps import missing

__all__: list[str] = []
__getattr__ = missing(__name__)
