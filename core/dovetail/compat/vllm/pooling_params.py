"""vLLM's parameters of requests that pool."""

from __future__ import annotations

from dovetail import PoolingParams
from dovetail.compat.vllm.gaps import missing

__all__ = ["PoolingParams"]
__getattr__ = missing(__name__)
