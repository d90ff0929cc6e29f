"""Bodies of /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's form."""

from __future__ import annotations

import msgspec


class LoadBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str  # below the folder of adapters, or relative to it
    load_inplace: bool = False  # replace one that is served under this name


class UnloadBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None  # without effect: the name decides
