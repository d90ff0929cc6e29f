"""vLLM's names of what an engine is used for. Dovetail reports no usage, and ignores them."""

from __future__ import annotations

from enum import StrEnum

from dovetail.compat.vllm.gaps import missing


class UsageContext(StrEnum):
    """Use of an engine, which vLLM reports."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


__all__ = ["UsageContext"]
__getattr__ = missing(__name__)
