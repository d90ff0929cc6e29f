"""Processes that run code for many checks, one for each string hash seed: they import once what each
check's own process would."""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress

from dovetail.testing.checks import require
from dovetail.testing.processes import python_path

ANSWER_S = 300.0  # for an answer, of a busy machine too
END_S = 10.0  # for a process to end

_LOOP = """
import io, os, pickle, sys, traceback
from types import SimpleNamespace
given, told = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # what a component prints is no answer
while given.peek(1):
    code, stdin, in_a_fork = pickle.load(given)
    error = ""
    if in_a_fork and (threads := len(os.listdir("/proc/self/task"))) != 1:
        error = f"a process with {threads} threads can't be forked"  # locks of others stay locked
        in_a_fork = False
    elif in_a_fork and (child := os.fork()):
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
os._exit(0)  # without waiting for threads of components
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
        traceback, on failure, or if there is no answer after `ANSWER_S`."""
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
        if not select.select([process.stdout], [], [], ANSWER_S)[0]:
            _end(self._processes.pop(seed), 0.0)
            require(False, f"{what}: no answer after {ANSWER_S:g} s")
        error = pickle.load(process.stdout)
        require(not error, f"{what}: {error}")

    def close(self) -> None:
        for process in self._processes.values():
            _end(process, END_S)


def _started(hash_seed: str) -> subprocess.Popen[bytes]:
    own = {"PYTHONPATH": python_path(), "PYTHONHASHSEED": hash_seed}
    # otherwise the import of numpy starts threads, beside which nothing can be forked
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", _LOOP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | own | one_thread,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes], within_s: float) -> None:
    """Let a process end, and kill what is left of it and of its forks after `within_s`."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(within_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
