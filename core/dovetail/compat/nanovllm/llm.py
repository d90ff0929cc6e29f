"""nano-vllm's `LLM`: its engine by another name."""

from __future__ import annotations

from dovetail.compat.nanovllm.engine.llm_engine import LLMEngine


class LLM(LLMEngine):
    """The engine itself, as in nano-vllm."""


__all__ = ["LLM"]
