"""The router as the controller sees it: `Router`. `smg_router` is the one that there is; tests have another."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Protocol


class Listed(Enum):
    """The use that a router makes of a replica."""

    JOINING = "joining"  # it was added and gets no requests yet
    READY = "ready"
    LEAVING = "leaving"  # it gets no new requests; those under way are answered


class Router(Protocol):
    """A router whose replicas may change at any time. A router that is gone is started again, without any replicas."""

    def look(self) -> Mapping[str, Listed] | None:
        """Return the URLs of the replicas that it knows. None: it doesn't answer now. Raises `DovetailError` if it never will."""

    def add(self, url: str) -> None:
        """Have it send requests to a replica, soon."""

    def remove(self, url: str) -> None:
        """Have it send no more requests to a replica, soon, and forget it when those under way are answered."""
