"""`run_python`: Python code in a new process, for checks that need one."""

from __future__ import annotations

import os
import subprocess
import sys

from dovetail.testing.checks import fail, require

LIMIT_S = 60
SHOWN = 2_000  # characters of its output


def run_python(code: str, stdin: bytes, what: str, *args: str, **environ: str) -> None:
    """Run code with the present `sys.path` and wait. Raises `CheckFailed`, with `what` and the end of its output, unless it succeeds in time."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    command, env = [sys.executable, "-c", code, *args], os.environ | {"PYTHONPATH": path} | environ
    try:
        done = subprocess.run(command, input=stdin, env=env, capture_output=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        fail(f"{what}: not done after {LIMIT_S} s")
    require(done.returncode == 0, f"{what}: {done.stderr.decode(errors='replace').strip()[-SHOWN:] or f'exit code {done.returncode}'}")
