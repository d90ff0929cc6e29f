"""`Gate`: a reason to hide an arrived request from the policy, such as a sibling that computes its prompt. The books ask the gates when a request
arrives and after each planning, and show the request, at its own arrival time, once none is closed."""

from __future__ import annotations

from typing import Protocol


class Gate(Protocol):
    """One reason to hold requests back; requests may share it. A request's gates are asked until all are open at once, and then forgotten."""

    def closed(self) -> bool:
        """Return True if its requests must still be held back. Changes nothing."""
        ...
