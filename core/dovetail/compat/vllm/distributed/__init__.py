"""vLLM's cleanup function."""

from __future__ import annotations

import gc
import sys

from dovetail.compat.vllm.gaps import missing
from dovetail.errors import UnsupportedError


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect garbage and release unused device memory, such as that of engines that were closed or
    are no longer referenced."""
    if shutdown_ray:
        raise UnsupportedError(
            "shutdown_ray=True: no engine starts Ray: call ray.shutdown() if your program did"
        )
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


__all__ = ["cleanup_dist_env_and_memory"]
__getattr__ = missing(__name__)
