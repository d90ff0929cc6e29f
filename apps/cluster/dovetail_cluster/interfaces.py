"""The interfaces through which the controller sees the world: `Launcher` starts each `Replica`,
`Router` sends requests, `Prober` asks for health.

The controller calls them several times a second: no method blocks for long, and none raises for a
dead replica. Tests have fakes of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """Status of a replica: the URL at which it serves, and the reason why its process ended."""

    url: str | None = None  # None: still starting
    ended: str | None = None  # in words; None: running


class Replica(Protocol):
    """One server with its engine."""

    def poll(self) -> ReplicaStatus:
        """Return its current status."""

    def drain(self) -> None:
        """Have it reject new requests, finish those under way and end, which `poll` then reports.
        Idempotent."""

    def kill(self) -> None:
        """Kill all its processes."""


class Launcher(Protocol):
    """Starts replicas on machines."""

    def start(self, name: str) -> Replica:
        """Start a replica, whose log lines begin with its name. Raises `DovetailError` if that
        fails; it may be retried."""

    def has_room(self) -> bool:
        """Return True if there are resources for one more replica."""

    def close(self) -> None:
        """Kill all running replicas and release their resources."""


class Listed(Enum):
    """State of a replica in the router."""

    JOINING = "joining"  # added, gets no requests yet
    READY = "ready"
    LEAVING = "leaving"  # gets no new requests


class Router(Protocol):
    """A router whose replicas may change at any time. A dead router is restarted without any
    replicas."""

    def poll(self) -> Mapping[str, Listed] | None:
        """Return its replicas by URL; None: it doesn't answer now. Raises `DovetailError` if it
        never will."""

    def add(self, url: str) -> None:
        """Add a replica, soon."""

    def remove(self, url: str) -> None:
        """Stop sending new requests to a replica, soon, and drop it when those under way are
        answered."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """The last answers of a replica."""

    ready: bool = False  # accepts requests
    healthy_at: float = 0.0  # time of the last good health check, on the controller's clock
    waiting: int = 0  # requests that hold no blocks yet
    running: int = 0


class Prober(Protocol):
    """Checks replicas in the background."""

    def vitals(self, url: str) -> Vitals | None:
        """Return the last vitals; None: not known yet. The first call starts the checks."""

    def forget(self, url: str) -> None:
        """Stop checking a replica."""
