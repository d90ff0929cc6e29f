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
    code, stdin, in_a_fork = pickle.load(given)
    error = ""
    if in_a_fork and (child := os.fork()):
        if not (status := os.waitpid(child, 0)[1]):
            continue  # it has answered
        error = f"status {status}"
    else:
        sys.stdin = SimpleNamespace(buffer=io.BytesIO(stdin))
        try:
            exec(code, {})
        except BaseException:
            error = traceback.format_exc()
    pickle.dump(error, told)
    told.flush()
    if in_a_fork and not child:
        os._exit(0)
"""


class KeptProcesses:
    """Runs code as `dovetail.testing.processes.run_python` does, in processes that are kept, or in
    forks of them: these are as new as one that has imported the same."""

    def __init__(
        self, hash_seeds: Iterable[str], modules: Iterable[str], *, forks: bool = False
    ) -> None:
        """`hash_seeds`: values of PYTHONHASHSEED, whose processes are started now; those of others
        when they are asked for. `modules`: what is imported first."""
        self._imports = "\n".join(f"import {module}" for module in modules)
        self._forks = forks
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for seed in hash_seeds:
            self._start(seed)

    def run_python(self, code: str, stdin: bytes, what: str, **environ: str) -> None:
        """Run code in the process of a hash seed. Raises `CheckFailed`, with `what` and the
        traceback, on failure."""
        seed = environ["PYTHONHASHSEED"]
        if seed not in self._processes:
            self._start(seed)
        self._run(seed, code, stdin, what, in_a_fork=self._forks)

    def _start(self, seed: str) -> None:
        self._processes[seed] = _started(seed)
        self._run(seed, self._imports, b"", "a new process can't import", in_a_fork=False)

    def _run(self, seed: str, code: str, stdin: bytes, what: str, *, in_a_fork: bool) -> None:
        process = self._processes[seed]
        assert process.stdin is not None
        assert process.stdout is not None
        pickle.dump((code, stdin, in_a_fork), process.stdin)
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
