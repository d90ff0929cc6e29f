"""`EnginePlace`: an engine on the supervisor's command line. It outlives the processes of its
engine, which are restarted when they die."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dovetail_server.channel import Message
from dovetail_server.child import Child, Pauses
from dovetail_server.engine_sources import EngineSource


@dataclass(eq=False)
class EnginePlace:
    """An engine on the command line, whose processes come and go."""

    source: EngineSource
    place: int
    child: Child | None = None  # its process
    deaths: int = 0  # of its processes so far
    down: str | None = None  # why its last process has died, until the next one is ready
    due: float = 0.0  # when the next one starts, on the supervisor's clock
    pauses: Pauses = field(default_factory=Pauses)

    @property
    def is_starting(self) -> bool:
        return self.child is not None and not self.child.ready

    @property
    def works(self) -> bool:
        return self.child is not None and self.child.ready

    def address(self, directory: str) -> str:
        """Return the address of its process, or of the next one if there is none."""
        return f"ipc://{directory}/engine-{self.place}.{self.deaths}"

    def start(self, directory: str, others: Sequence[EnginePlace]) -> Message:
        """Return the parameters of its process, which starts beside the engines `others`."""
        return {
            "source": self.source.source,
            "set": self.source.overrides_beside([one.source for one in others]),
            "address": self.address(directory),
        }

    def end(self, directory: str) -> Message:
        """Return the parameters with which a front end uses the engine."""
        return {
            "address": self.address(directory),
            "names": self.source.names,
            "adapters": self.source.adapters,
            "down": self.down,
        }

    def lose(self, reason: str) -> None:
        """Note that its process has died."""
        self.child = None
        self.deaths += 1
        self.down = reason


def due_engine(engines: Sequence[EnginePlace], now: float) -> EnginePlace | None:
    """Return the first engine whose process is due, if no other is starting: each measures what
    others have left of the memory."""
    if any(engine.is_starting for engine in engines):
        return None
    return next((engine for engine in engines if engine.child is None and engine.due <= now), None)
