"""`OwnTime`: how long a process has had, on a machine where others work too. By it the doctor and the conformance suites tell a plugin that hangs
from one that is kept waiting for a CPU."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

TIME_LIMIT_S = 60.0  # own seconds that a plugin has for one thing that is asked of it, unless the user says otherwise
SAMPLED_S = 0.5  # how often one should ask: what a thread waited for before it ended, between two questions, isn't seen


class OwnTime:
    """The seconds that a process and its descendants have had since `restart`: those that passed, less those that the most hindered of their threads
    was ready to run and others had the CPUs. A process that sleeps or waits for another has all of them; one that computes has at least those that
    it computed. Where the system doesn't tell (it is Linux that does, in /proc/*/task/*/schedstat), all that passed count."""

    def __init__(self, process: int) -> None:
        """Begin to count for the process of this id."""
        self._process = process
        self.restart()

    def restart(self) -> None:
        self._elapsed_s, self._asked, self._waited = 0.0, time.monotonic(), dict(waits(self._process))

    def elapsed_s(self) -> float:
        now, waited = time.monotonic(), dict(waits(self._process))
        hindered = max((ns - self._waited.get(thread, 0) for thread, ns in waited.items()), default=0) / 1e9
        self._elapsed_s += max(0.0, now - self._asked - hindered)
        self._asked, self._waited = now, waited
        return self._elapsed_s


def wait(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait until a process has ended. Returns False if it hasn't after `limit_s` own seconds."""
    own = OwnTime(process.pid)
    while (left := limit_s - own.elapsed_s()) > 0:
        with suppress(subprocess.TimeoutExpired):
            process.wait(min(left, SAMPLED_S))
            return True
    return process.poll() is not None


def waits(process: int) -> Iterator[tuple[str, int]]:
    """Yield each thread of a process and of its descendants, with the nanoseconds that it has waited for a CPU."""
    try:
        threads = os.listdir(f"/proc/{process}/task")
    except OSError:  # it has ended, or this isn't Linux
        return
    for thread in threads:
        folder = Path("/proc", str(process), "task", thread)
        with suppress(OSError, ValueError, IndexError):  # it has ended since, or the system doesn't keep this
            yield thread, int((folder / "schedstat").read_text().split()[1])
        with suppress(OSError):
            for child in (folder / "children").read_text().split():
                yield from waits(int(child))
