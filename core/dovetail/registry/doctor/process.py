"""Processes in which a plugin's code runs, for the doctor and for `dovetail.testing`: running one,
limiting its files, reading its output, and `OwnTime`, its elapsed time without the time it waited
for a CPU, so that timeouts hold on a busy machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dovetail.api.process_watch import signal_name

TIME_LIMIT_S = 60.0  # default timeout of a plugin's single operation, in own seconds
SAMPLED_S = 0.5  # polling interval: waits of threads that end between two polls aren't seen
LARGEST_FILE = 2**28  # bytes
LAST_BYTES = 4_000


class OwnTime:
    """Elapsed seconds of a process and its descendants since `restart`, less the longest time that
    one of their threads was runnable but not running. Sleeping and waiting count in full. Needs
    Linux (/proc/*/task/*/schedstat); elsewhere wall time counts."""

    def __init__(self, process: int) -> None:
        """Start counting for the process with this id."""
        self._process = process
        self.restart()

    def restart(self) -> None:
        self._elapsed_s, self._asked, self._waited = (
            0.0,
            time.monotonic(),
            dict(waits(self._process)),
        )

    def elapsed_s(self) -> float:
        now = time.monotonic()
        waited = dict(waits(self._process))
        hindered = (
            max((ns - self._waited.get(thread, 0) for thread, ns in waited.items()), default=0)
            / 1e9
        )
        self._elapsed_s += max(0.0, now - self._asked - hindered)
        self._asked = now
        self._waited = waited
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
    """Yield each thread of a process and its descendants, with the nanoseconds it has waited for a
    CPU."""
    try:
        threads = os.listdir(f"/proc/{process}/task")
    except OSError:  # it has ended, or this isn't Linux
        return
    for thread in threads:
        folder = f"/proc/{process}/task/{thread}"
        with suppress(
            OSError, ValueError, IndexError
        ):  # it has ended since, or the system doesn't keep this
            yield thread, int(_read(f"{folder}/schedstat").split()[1])
        with suppress(OSError):
            for child in _read(f"{folder}/children").split():
                yield from waits(int(child))


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def limit_files() -> None:
    """Limit the files of this process and its children to `LARGEST_FILE`, so that endless output
    raises OSError before the disk is full; disable core dumps."""
    with suppress(ImportError):  # not on a Unix
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def run_within(command: Sequence[str], limit_s: float, **popen: Any) -> int | None:
    """Run a command and return its exit code; None if it needed more than `limit_s`, as `OwnTime`
    counts. `popen`: arguments of `subprocess.Popen`. Nothing of it is left running: with
    `start_new_session` the processes that it has started are killed too."""
    process = subprocess.Popen(command, **{"stdin": subprocess.DEVNULL, **popen})
    try:
        return process.returncode if wait(process, limit_s) else None
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, and if it leads a session all others in it."""
    process.kill()
    with suppress(
        AttributeError, ProcessLookupError, PermissionError
    ):  # not on a Unix, or it leads none
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def event(line: str) -> dict[str, Any]:
    """Parse one line of a report; {} if it isn't a JSON object, since a plugin can write to any
    open file."""
    with suppress(ValueError):
        told = json.loads(line)
        if isinstance(told, dict):
            return told
    return {}


def ending(code: int) -> str:
    """Describe how a process ended, by its exit code: "with exit code 3", "by SIGKILL"."""
    return f"with exit code {code}" if code >= 0 else f"by {signal_name(-code)}"


def last_words(output: Path) -> list[str]:
    """Return the last lines of a process's output."""
    with output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - LAST_BYTES))
        return file.read().decode(errors="replace").strip().splitlines()
