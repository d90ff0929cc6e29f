"""nano-vllm's names, in the modules where its programs look for them: `from nanovllm import LLM`
becomes `from dovetail.compat.nanovllm import LLM`."""

from __future__ import annotations

from dovetail.compat.nanovllm.engine.llm_engine import LLMEngine
from dovetail.compat.nanovllm.llm import LLM
from dovetail.compat.nanovllm.sampling_params import SamplingParams

__all__ = ["LLM", "LLMEngine", "SamplingParams"]
