"""`Adapter`: a LoRA adapter as the engine knows it.

The front end reads it (`dovetail.front.adapters`).
"""

from __future__ import annotations

from typing import Protocol

from dovetail.engine.finish import Finish


class Adapter(Protocol):
    """An adapter that requests share: a `Preparation`, open once its weights are on the host."""

    name: str  # for metrics and errors

    @property
    def path(self) -> str:
        """Its normalized file, which stays as long as this object: see
        `dovetail.api.executor.AdapterLoad`. Read only once it is open."""
        ...

    @property
    def digest(self) -> str:
        """A hash of its content; adapters of equal digests share a slot. Read only once it is
        open."""
        ...

    def closed(self) -> bool:
        """Return True until it is loaded to the host, or has failed."""
        ...

    def failed(self) -> Finish | None:
        """Return how its requests end if it couldn't be loaded, once it is open; else None."""
        ...
