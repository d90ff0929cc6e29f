"""`LoRARequest`: the LoRA adapter that a request uses (Hu et al., arXiv:2106.09685)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.base.checks import plain_integer
from dovetail.errors import RequestError, shown

MAX_PATH_CHARS = 4096  # Linux opens no longer path, and resolving one takes quadratic time


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by its name, a number of the caller's, and its directory in the format of PEFT
    (`adapter_config.json` and `adapter_model.safetensors`). The name decides: the directory is read
    again if it has changed since the name was last used. Raises `RequestError` for a wrong value.
    """

    lora_name: str
    lora_int_id: int  # above 0; the engine doesn't use it
    lora_path: str

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            value: Any = getattr(self, name)
            text = str(value) if isinstance(value, Path) else value
            if not isinstance(text, str) or not text:
                raise RequestError(f"{name} must be a non-empty string, got {shown(value)}")
            object.__setattr__(self, name, text)
        if (length := len(self.lora_path)) > MAX_PATH_CHARS:
            raise RequestError(
                f"lora_path must have at most {MAX_PATH_CHARS} characters, got {length}"
            )
        if (number := plain_integer(self.lora_int_id)) is None or number < 1:
            raise RequestError(
                f"lora_int_id must be an integer above 0, got {shown(self.lora_int_id)}"
            )
