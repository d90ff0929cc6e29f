"""`Gate`: holds an arrived request back from the policy, while a sibling computes its prompt or its grammar is compiled.

Once all gates are open the policy sees the request, at its own arrival time.
"""

from __future__ import annotations

from typing import Protocol


class Gate(Protocol):
    """One reason to hold requests back; requests may share it."""

    def closed(self) -> bool:
        """Return True if its requests must still be held back. Changes nothing."""
        ...


class Preparation(Gate, Protocol):
    """A gate that is opened outside of the engine, such as by a compiling thread: the core polls it. `on_arrival` comes after it."""

    def failed(self) -> str | None:
        """Return why the preparation failed, once it is open; None if it didn't. Only its own requests end with that reason."""
        ...
