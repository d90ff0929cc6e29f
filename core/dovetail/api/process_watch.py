"""`ProcessWatch`: clock of a loop that watches other processes, and detector of stopped processes;
and what else watching needs. Used by the server's supervisor, the executor `tensor`, batch jobs and
the cluster. `Pulse`: a process's own sign that it isn't stuck.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from pathlib import Path

LONGEST_TURN_S = 1.0  # a loop that takes longer for a turn was itself held up
STOPPED_S = 5.0  # a process that is stopped for longer counts as hung

_PR_SET_PDEATHSIG = 1

# states of a process: by SIGSTOP or its like, by a debugger
STOPPED = "T"
TRACED = "t"


class ProcessWatch:
    """One thread calls `turn` and `is_stopped`; any may read `now`."""

    def __init__(self) -> None:
        self._last_turn = time.monotonic()
        self._lost = 0.0
        self._stopped_since: dict[int, float] = {}

    @property
    def now(self) -> float:
        """Seconds on a clock that stands still while the loop itself is held up. What suspends all
        processes at once (a paused container or virtual machine, a stopped process group) thus
        makes none of them look hung afterwards."""
        return time.monotonic() - self._lost

    def turn(self) -> float:
        """Note a turn of the loop, which must take one several times per `LONGEST_TURN_S`, and
        return `now`."""
        now = time.monotonic()
        self._lost += max(0.0, now - self._last_turn - LONGEST_TURN_S)
        self._last_turn = now
        return self.now

    def is_stopped(self, pid: int) -> bool:
        """Return True if all calls of the last `STOPPED_S` found the process stopped by a signal.
        Always False where there is no /proc."""
        if process_state(pid) != STOPPED:
            self._stopped_since.pop(pid, None)
            return False
        return self.now - self._stopped_since.setdefault(pid, self.now) > STOPPED_S


class Pulse:
    """Time of the latest progress of a long computation, such as a layer of a step on a CPU. One
    thread beats; any may read."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last = -math.inf  # `time.monotonic`

    def beat(self, *_: object) -> None:
        """Note progress. Takes any arguments, so that it can be a hook."""
        self.last = time.monotonic()


PULSE = Pulse()  # of this process, which runs one engine where anybody watches it


def process_state(pid: int) -> str:
    """Return the letter of a process's state in /proc: R, S, D, T, t, Z; "?" if it is gone or there
    is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "?"


def how_ended(code: int) -> str:
    """Describe the end of a process by its return code, as of `subprocess`."""
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


def signal_name(number: int) -> str:
    """Return the name of a signal; real-time ones have none: "signal 35"."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread of its parent that started it ends. Linux
    only; a no-op elsewhere."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before
            os._exit(0)
