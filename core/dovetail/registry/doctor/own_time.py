"""`OwnTime`: elapsed time of a process without the time it waited for a CPU, so that timeouts of the doctor and the suites hold on a busy machine."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

TIME_LIMIT_S = 60.0  # default timeout of a plugin's single operation, in own seconds
SAMPLED_S = 0.5  # polling interval: waits of threads that end between two polls aren't seen


class OwnTime:
    """Elapsed seconds of a process and its descendants since `restart`, less the longest time that one of their threads was runnable but not running.
    Sleeping and waiting count in full. Needs Linux (/proc/*/task/*/schedstat); elsewhere wall time counts."""

    def __init__(self, process: int) -> None:
        """Start counting for the process with this id."""
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
    """Wait for a process to end. Returns False after `limit_s` own seconds."""
    own = OwnTime(process.pid)
    while (left := limit_s - own.elapsed_s()) > 0:
        with suppress(subprocess.TimeoutExpired):
            process.wait(min(left, SAMPLED_S))
            return True
    return process.poll() is not None


def waits(process: int) -> Iterator[tuple[str, int]]:
    """Yield each thread of a process and its descendants, with the nanoseconds it has waited for a CPU."""
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
