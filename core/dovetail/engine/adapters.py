"""Slots for LoRA adapters: which adapter each slot of the device's bank holds, and who may use it now."""

from __future__ import annotations

from typing import Protocol


class Adapter(Protocol):
    """An adapter that requests share: a `Preparation`, open once its weights are on the host."""

    name: str  # for metrics and errors
    path: str  # of its normalized file: see `dovetail.api.executor.AdapterLoad`
    digest: str  # of its content; adapters of equal digests share a slot

    def closed(self) -> bool:
        """Return True until it is loaded to the host, or has failed."""
        ...

    def failed(self) -> str | None:
        """Return why it couldn't be loaded, once it is open; None if it is."""
        ...
