"""vLLM's outputs."""

from __future__ import annotations

from dovetail import CompletionOutput, RequestOutput
from dovetail.compat.vllm.gaps import missing

__all__ = ["CompletionOutput", "RequestOutput"]
__getattr__ = missing(__name__)
