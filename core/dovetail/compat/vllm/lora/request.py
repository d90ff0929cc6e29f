"""vLLM's requests for adapters."""

from __future__ import annotations

from dovetail.compat.vllm.gaps import missing
from dovetail.request.lora import LoRARequest

__all__ = ["LoRARequest"]
__getattr__ = missing(__name__)
