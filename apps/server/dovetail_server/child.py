"""`Child`: a process of the supervisor. `Pauses`: delays before successors of those that die."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from dovetail.api.process_watch import how_ended
from dovetail_server.channel import Channel

ENGINE = "engine"  # the name of an engine's process
LAST_LINES = 5  # of the engine's stderr, reported when it dies
# a process that works for less than this is restarted after a pause, which doubles each time
QUICK_DEATH_S = 30.0
# the first and the longest such pause
PAUSE_S = 1.0
MOST_PAUSE_S = 30.0


@dataclass(eq=False)
class Child:
    """A child process and its state."""

    name: str
    process: subprocess.Popen[bytes]
    channel: Channel
    ready_since: float | None = None  # on the monotonic clock; None: it is starting
    ranks: str = ""  # description of an engine's ranks, if it has several
    groups: str = ""  # line that describes its cache groups, if it has several
    refused: str | None = None  # why it failed to start
    dead: str | None = None  # why it died or was killed
    heard: float = 0.0  # time of the last message, on the watch's clock
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    @property
    def is_engine(self) -> bool:
        return self.name == ENGINE

    @property
    def ready(self) -> bool:
        return self.ready_since is not None

    @property
    def lived_s(self) -> float:
        """For how many seconds it has been ready."""
        return 0.0 if self.ready_since is None else time.monotonic() - self.ready_since

    def how_it_ended(self) -> str:
        """Return how it ended ("was killed by SIGKILL", "ended with exit code 1"), and its reason
        or last output."""
        how = how_ended(self.process.returncode)
        told = (
            self.dead
            or self.refused
            or " | ".join(line for line in self.last_lines if line.strip())
        )
        return f"{how}: {told}" if told else how

    def give_up(self, why: str) -> None:
        """Kill a process that hangs."""
        self.dead = why
        self.kill()
        self.process.wait()

    def kill(self) -> None:
        """Kill the process and its children, which are its process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Pauses:
    """Delays before a process is restarted, which grow if it dies quickly each time."""

    def __init__(self) -> None:
        self._quick_deaths = 0  # consecutive

    def next_s(self, lived_s: float) -> float:
        """Return the seconds after the death of a process that has worked for `lived_s`."""
        self._quick_deaths = self._quick_deaths + 1 if lived_s < QUICK_DEATH_S else 0
        if self._quick_deaths < 2:
            return 0.0
        return min(PAUSE_S * 2.0 ** (self._quick_deaths - 2), MOST_PAUSE_S)
