"""vLLM's arguments of engines."""

from __future__ import annotations

from dovetail import EngineArgs
from dovetail.compat.vllm.gaps import missing

AsyncEngineArgs = EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
__getattr__ = missing(__name__)
