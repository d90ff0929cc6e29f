"""`Gate`: a reason to hide a request from the policy though its time has come: a sibling computes its prompt, its grammar is being compiled.

The request is shown, at its own arrival time, once none of its gates is closed.
"""

from __future__ import annotations

from typing import Protocol


class Gate(Protocol):
    """One reason to hold requests back; requests may share it."""

    def closed(self) -> bool:
        """Return True if its requests must still be held back. Changes nothing."""
        ...


class Preparation(Gate, Protocol):
    """A gate that something outside of the engine opens, such as a thread that compiles: the core asks it again and again. Policies hear nothing of a
    request before its preparations are done."""

    def failed(self) -> str | None:
        """Return why its requests can't be served, once it is open; None if they can. Such a request ends with that reason, and nobody else's."""
        ...
