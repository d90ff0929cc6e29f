"""`Gate`: a reason for which the policy isn't shown a request that has arrived, such as a sibling that computes its prompt. The books ask gates when
a request arrives and after each planning, and show it, at its own arrival time, once none is closed."""

from __future__ import annotations

from typing import Protocol


class Gate(Protocol):
    """One reason; requests may share it. A request's gates are asked until all were open at once, and then forgotten."""

    def closed(self) -> bool:
        """Whether its requests must be held back still. Changes nothing."""
        ...
