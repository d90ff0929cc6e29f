"""vLLM's requests for adapters, which no engine here can honour yet."""

from __future__ import annotations

from typing import Any

from dovetail.compat.vllm.gaps import missing
from dovetail.errors import UnsupportedError
from dovetail.roadmap import planned


class LoRARequest:
    """An adapter for a request. Programs can import it and name it in annotations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raise `UnsupportedError`."""
        raise UnsupportedError(f"LoRARequest: {planned('LoRA adapters')}")


__all__ = ["LoRARequest"]
__getattr__ = missing(__name__)
