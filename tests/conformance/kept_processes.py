"""Processes that run code for many checks, one for each string hash seed: they import once what each
check's own process would."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterable

from dovetail.testing.checks import require
from dovetail.testing.processes import python_path

_LOOP = """
import io, os, pickle, sys, traceback
from types import SimpleNamespace
given, told = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # what a component prints is no answer
while given.peek(1):
    code, stdin = pickle.load(given)
    sys.stdin = SimpleNamespace(buffer=io.BytesIO(stdin))
    error = ""
    try:
        exec(code, {})
    except BaseException:
        error = traceback.format_exc()
    pickle.dump(error, told)
    told.flush()
"""


class KeptProcesses:
    """Runs code as `dovetail.testing.processes.run_python` does, in processes that are kept."""

    def __init__(self, hash_seeds: Iterable[str], modules: Iterable[str]) -> None:
        """`hash_seeds`: values of PYTHONHASHSEED. `modules`: what is imported first."""
        self._processes = {seed: _started(seed) for seed in hash_seeds}
        code = "\n".join(f"import {module}" for module in modules)
        for seed in self._processes:
            self.run_python(code, b"", "a new process can't import", PYTHONHASHSEED=seed)

    def run_python(self, code: str, stdin: bytes, what: str, **environ: str) -> None:
        """Run code in the process of a hash seed. Raises `CheckFailed`, with `what` and the
        traceback, on failure."""
        process = self._processes[environ["PYTHONHASHSEED"]]
        assert process.stdin is not None
        assert process.stdout is not None
        pickle.dump((code, stdin), process.stdin)
        process.stdin.flush()
        error = pickle.load(process.stdout)
        require(not error, f"{what}: {error}")

    def close(self) -> None:
        for process in self._processes.values():
            process.communicate()


def _started(hash_seed: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", _LOOP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": python_path(), "PYTHONHASHSEED": hash_seed},
    )
