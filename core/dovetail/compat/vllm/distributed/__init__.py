"""What vLLM's programs call after an engine."""

from __future__ import annotations

import gc
import sys

from dovetail.compat.vllm.gaps import missing
from dovetail.errors import UnsupportedError


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect garbage, and return the device's memory that nobody uses: that of engines that were closed or have no references left."""
    if shutdown_ray:
        raise UnsupportedError("shutdown_ray=True: no engine starts Ray: call ray.shutdown() if your program did")
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


__all__ = ["cleanup_dist_env_and_memory"]
__getattr__ = missing(__name__)
