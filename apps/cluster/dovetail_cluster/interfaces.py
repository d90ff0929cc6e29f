"""Places at which replicas run, as the controller sees them: a `Place` starts servers, each of which is a `Replica`. `here_places` and `ray_places`
are the two.

Nothing here waits: the controller calls a few times a second and asks how things are. No method raises for a replica that has died.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Seen:
    """The news of a replica."""

    url: str | None = None  # at which it serves; None: it still starts
    ended: str | None = None  # how it ended, in words; None: it runs


class Replica(Protocol):
    """One server with its engine."""

    def look(self) -> Seen:
        """Return what is known of it now."""

    def drain(self) -> None:
        """Have it refuse new requests, answer those under way and end. `look` tells when that is done. Calling it again changes nothing."""

    def kill(self) -> None:
        """End it at once, with all its processes."""


class Place(Protocol):
    """Machines on which replicas run."""

    def start(self, name: str) -> Replica:
        """Start a replica, whose log lines begin with its name. Raises `DovetailError` if that can't be done now; it may be tried again."""

    def has_room(self) -> bool:
        """Return True if there are GPUs for one more replica."""

    def close(self) -> None:
        """Kill all that were started here and still run, and give back what was taken for them."""
