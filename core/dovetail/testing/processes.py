"""`run_python`: run Python code in a new process, for checks."""

from __future__ import annotations

import os
import subprocess
import sys
from tempfile import TemporaryFile

from dovetail.registry.doctor.process import TIME_LIMIT_S, run_within
from dovetail.testing.checks import require

SHOWN = 2_000  # characters of its output


def run_python(code: str, stdin: bytes, what: str, *args: str, **environ: str) -> None:
    """Run code with the current `sys.path`. Raises `CheckFailed`, with `what` and the end of its
    output, on failure or timeout."""
    command = [sys.executable, "-c", code, *args]
    env = os.environ | {"PYTHONPATH": python_path()} | environ
    with TemporaryFile() as given, TemporaryFile() as told:
        given.write(stdin)
        given.seek(0)
        ended = run_within(
            command, TIME_LIMIT_S, stdin=given, stdout=subprocess.DEVNULL, stderr=told, env=env
        )
        told.seek(0)
        words = told.read().decode(errors="replace").strip()[-SHOWN:]
    require(ended is not None, f"{what}: not done after {TIME_LIMIT_S:g} s")
    require(ended == 0, f"{what}: {words or f'exit code {ended}'}")


def python_path() -> str:
    """Return the PYTHONPATH with which a new process has the current `sys.path`."""
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
