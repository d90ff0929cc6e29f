"""Processes in which a plugin's code runs, for the doctor and for `dovetail.testing`: running one, limiting its files, reading its output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dovetail.process_watch import signal_name
from dovetail.registry.doctor.own_time import wait

LARGEST_FILE = 2**28  # bytes
LAST_BYTES = 4_000


def limit_files() -> None:
    """Limit the files of this process and its children to `LARGEST_FILE`, so that endless output raises OSError before the disk is full; disable
    core dumps."""
    with suppress(ImportError):  # not on a Unix
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def run_within(command: Sequence[str], limit_s: float, **popen: Any) -> int | None:
    """Run a command and return its exit code; None if it needed more than `limit_s`, as `OwnTime` counts. `popen`: arguments of `subprocess.Popen`.
    Nothing of it is left running: with `start_new_session` the processes that it has started are killed too."""
    process = subprocess.Popen(command, **{"stdin": subprocess.DEVNULL, **popen})
    try:
        return process.returncode if wait(process, limit_s) else None
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, and if it leads a session all others in it."""
    process.kill()
    with suppress(AttributeError, ProcessLookupError, PermissionError):  # not on a Unix, or it leads none
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def event(line: str) -> dict[str, Any]:
    """Parse one line of a report; {} if it isn't a JSON object, since a plugin can write to any open file."""
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
