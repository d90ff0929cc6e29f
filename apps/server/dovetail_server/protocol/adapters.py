"""Bodies of /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's form."""

from __future__ import annotations

from typing import Annotated

import msgspec

from dovetail.request.lora import MAX_PATH_CHARS


class LoadBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /v1/load_lora_adapter."""

    lora_name: str
    # below the folder of adapters, or relative to it
    lora_path: Annotated[str, msgspec.Meta(max_length=MAX_PATH_CHARS)]
    load_inplace: bool = False  # replace one that is served under this name
    model: str | None = None  # the model that it adapts; None: the first that takes adapters


class UnloadBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None  # without effect: the name decides
