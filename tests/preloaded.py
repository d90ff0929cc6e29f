"""A Python process that has torch and Dovetail imported, and forks a child for each program that a
test starts.

An import of torch takes longer than most tests. A child has it from the start; otherwise it is a
program of its own, with its own `__main__`, arguments, environment, folder, files and exit code.
The process is started by `exec`, not forked from pytest: torch hangs in a child of a process that
has run an operation with two threads, and CUDA fails in one of a process that has used it.

Claims about imports, the environment or how a process starts need a real `exec`:
`subprocess.run([sys.executable, ...])`. The fixture is `preloaded` of `tests/conftest.py`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from tests.frozen import count_once

ROOT = Path(__file__).parents[1]
TIME_LIMIT_S = 120.0
MAX_MESSAGE = 2**20
# What programs of tests import. An import that runs a torch operation, as that of
# `dovetail_attention`, is left to them.
MODULES = (
    "torch",
    "dovetail",
    "dovetail.cli.app",
    "dovetail.cli.main",
    "dovetail.front.llm",
    "dovetail_executors.local",
    "dovetail_grammars.llguidance_backend",
    "dovetail.api.prefix_cache",
    "dovetail_models.qwen3",
    "dovetail_samplers.default",
    "dovetail_schedulers.fcfs",
    "openai",
    "tests.docs.running",
    "tokenizers",
    "transformers.models.auto.modeling_auto",
    "transformers.tokenization_utils_tokenizers",
    "triton",
)
# What slow tests import besides: pages of the lab, suites and batch jobs.
SLOW_MODULES = (
    "_pytest.assertion",
    "_pytest.python",
    "dovetail.testing.child",
    "dovetail.testing.pytest_plugin",
    "dovetail_batch.engine_process",
    "dovetail_batch.runner",
    "dovetail_lab.compare_command",
    "dovetail_lab.metrics",
    "dovetail_lab.report.curves",
    "dovetail_lab.report.page",
    "dovetail_lab.report_command",
    "dovetail_lab.simulate",
    "dovetail_lab.simulated",
    "dovetail_lab.sweep_command",
    "dovetail_lab.workloads",
    "hypothesis",
    "tests.conformance.fewer",
    "tests.executors.rank_threads",
    "tests.forking",
)
FIXED = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}  # read as libraries are imported

File = IO[Any] | int | None  # None: no input, or output to nowhere


class PreloadError(Exception):
    """The process can't be started, or can't fork this program."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A program that has ended. `exit_code` is negative if a signal ended it, as that of
    `subprocess`."""

    pid: int
    exit_code: int
    cpu_s: float  # its own, and of its children that it has waited for
    max_rss_bytes: int
    output: str = ""
    errors: str = ""


class Preloaded:
    """The process and its programs. For one thread; `close` ends them all."""

    def __init__(self, modules: Sequence[str] = MODULES) -> None:
        self._ended: dict[int, Ended] = {}
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.preloaded", str(theirs.fileno()), *modules],
                cwd=ROOT,
                env=os.environ | FIXED,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            theirs.close()
            self._link.settimeout(TIME_LIMIT_S)
            if not self._link.recv(MAX_MESSAGE):
                self.close()
                errors.seek(0)
                raise PreloadError(errors.read().decode(errors="replace"))

    def close(self) -> None:
        """End the process and its programs, also where a fork of this process has a copy of the
        link."""
        with suppress(OSError):  # it has ended
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()
        try:
            self._process.wait(TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise

    def run(
        self,
        args: Sequence[str | Path],
        *,
        cwd: str | Path | None = None,
        environ: Mapping[str, str] | None = None,
        stdin: File = None,
        timeout_s: float = TIME_LIMIT_S,
    ) -> Ended:
        """Run `python ARGS` to its end, and return what it has written."""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            pid = self.start(args, files=(stdin, output, errors), cwd=cwd, environ=environ)
            ended = self.wait(pid, timeout_s)
            output.seek(0)
            errors.seek(0)
            written = [file.read().decode(errors="replace") for file in (output, errors)]
        return Ended(pid, ended.exit_code, ended.cpu_s, ended.max_rss_bytes, *written)

    def start(
        self,
        args: Sequence[str | Path],
        *,
        files: tuple[File, File, File],
        cwd: str | Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> int:
        """Start `python ARGS` with these standard files. Returns its pid, which is also that of its
        process group."""
        environ = dict(os.environ if environ is None else environ)
        for name in sorted({*environ, *os.environ}):
            fixed = name in FIXED or name.startswith(("LD_", "PYTHON"))
            if fixed and name != "PYTHONPATH" and environ.get(name) != os.environ.get(name):
                raise PreloadError(
                    f"{name} is read as a process starts: start this program with subprocess"
                )
        message = json.dumps([list(map(str, args)), str(cwd or Path.cwd()), environ]).encode()
        with open(os.devnull, "r+b") as nothing:
            given = [nothing if file is None else file for file in files]
            fds = [file if isinstance(file, int) else file.fileno() for file in given]
            socket.send_fds(self._link, [message], fds)
        while "ended" in (answer := self._answer()):
            self._note(answer)
        if "refused" in answer:
            raise PreloadError(answer["refused"])
        return int(answer["pid"])

    def wait(self, pid: int, timeout_s: float = TIME_LIMIT_S) -> Ended:
        """Return how a program has ended. One that takes longer is killed with its group, and
        `TimeoutError` raised."""
        ended = self.ended(pid, timeout_s)
        if ended is None:
            kill(pid)
            raise TimeoutError(f"the program took more than {timeout_s:g} s")
        return ended

    def ended(self, pid: int, within_s: float) -> Ended | None:
        """Return, once, how a program has ended; None if it still runs after that time."""
        until = time.monotonic() + within_s
        while pid not in self._ended:
            self._link.settimeout(max(0.001, until - time.monotonic()))
            try:
                self._note(self._answer())
            except TimeoutError:
                return None
            finally:
                self._link.settimeout(TIME_LIMIT_S)
        return self._ended.pop(pid)

    def _answer(self) -> dict[str, Any]:
        message = self._link.recv(MAX_MESSAGE)
        if not message:
            raise PreloadError(
                f"the preloaded process has ended, with exit code {self._process.wait()}"
            )
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _note(self, answer: dict[str, Any]) -> None:
        ended = Ended(**answer["ended"])
        self._ended[ended.pid] = ended


def kill(pid: int) -> None:
    """Kill a program with its group, which it may not have made yet."""
    for kill_it in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            kill_it(pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Program:
    """Program for a child to run, received from `Preloaded.start`."""

    args: list[str]
    cwd: str
    environ: dict[str, str]
    fds: list[int]

    def enter(self) -> None:
        """Make this process that program's."""
        os.setsid()
        for number, fd in enumerate(self.fds):
            os.dup2(fd, number)
            os.close(fd)
        for number, name in enumerate(
            ("stdin", "stdout", "stderr")
        ):  # they note what kind of file they are for
            old = getattr(sys, name)
            by_line = 1 if name == "stderr" else -1
            new = open(  # noqa: SIM115
                number, old.mode, by_line, encoding=old.encoding, errors=old.errors, closefd=False
            )
            setattr(sys, name, new)
            setattr(sys, f"__{name}__", new)
        os.chdir(self.cwd)
        os.environ.clear()
        os.environ.update(self.environ | FIXED)
        added = filter(None, self.environ.get("PYTHONPATH", "").split(os.pathsep))
        own = [
            entry
            for entry in sys.path[1:]
            if entry not in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        ]
        sys.path[1:] = [*added, *own]
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed()  # otherwise each child has the same random numbers

    def run(self) -> None:
        first, *rest = self.args
        if first == "-m":
            sys.path[0] = self.cwd
            sys.argv[:] = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            sys.path[0] = ""
            sys.argv[:] = ["-c", *rest[1:]]
            main = ModuleType("__main__")
            sys.modules["__main__"] = main
            exec(compile(rest[0], "<string>", "exec"), vars(main))
        else:
            sys.path[0] = str(Path(first).parent)
            sys.argv[:] = self.args
            runpy.run_path(first, run_name="__main__")


class Operations:
    """Torch operations that this thread has run, from the import of torch on, until `end`."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.end: Callable[[], object] = lambda: None

    def watch(self) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode

        names = self.names

        class Noting(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                names.append(str(func))
                return func(*args, **(kwargs or {}))

        mode = Noting()
        mode.__enter__()
        self.end = lambda: mode.__exit__(None, None, None)


def preload(modules: Sequence[str]) -> Operations:
    operations = Operations()
    for name in modules:
        import_module(name)
        if name == "torch":
            operations.watch()
    gc.collect()
    gc.freeze()  # collections of a child don't write to the pages that it shares
    return operations


def why_not_fork(operations: Operations) -> str | None:
    """Return what would break a child of this process, if anything can be seen."""
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        return f"the preloaded process has {threads} threads"
    if operations.names:
        return f"the preloaded process has run torch operations: {', '.join(operations.names[:5])}"
    open_files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    torch = sys.modules.get("torch")
    if any(path.startswith("/dev/nvidia") for path in open_files) or (
        torch and torch.cuda.is_initialized()
    ):
        return "the preloaded process has used CUDA"
    return None


def serve(link: socket.socket, operations: Operations) -> Program:
    """Fork a child for each request, and report the end of each. Returns in a child, with its
    program."""
    children: dict[int, int] = {}  # pidfd: pid
    selector = selectors.DefaultSelector()
    selector.register(link, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fd in children:
                selector.unregister(key.fd)
                os.close(key.fd)
                link.send(json.dumps({"ended": _ending_of(children.pop(key.fd))}).encode())
                continue
            message, fds, *_ = socket.recv_fds(link, MAX_MESSAGE, 3)
            if not message:
                for pid in children.values():
                    kill(pid)
                os._exit(0)
            if (reason := why_not_fork(operations)) is not None:
                link.send(json.dumps({"refused": reason}).encode())
            elif pid := os.fork():
                pidfd = os.pidfd_open(pid)
                children[pidfd] = pid
                selector.register(pidfd, selectors.EVENT_READ)
                link.send(json.dumps({"pid": pid}).encode())
            else:
                selector.close()
                for pidfd in children:
                    os.close(pidfd)
                link.close()
                operations.end()
                return Program(*json.loads(message), fds)
            for fd in fds:
                os.close(fd)


def _ending_of(pid: int) -> dict[str, Any]:
    _, status, usage = os.wait4(pid, 0)
    return {
        "pid": pid,
        "exit_code": os.waitstatus_to_exitcode(status),
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "max_rss_bytes": usage.ru_maxrss * 1024,
    }


class End:
    """Ends a child after its exit handlers, in place of the interpreter, which would take all
    modules apart for 0.2 s."""

    def __init__(self) -> None:
        self.code: int | None = None  # unknown: the interpreter ends it
        atexit.register(self)  # as the first, so it is called last

    def __call__(self) -> None:
        with suppress(OSError, ValueError):  # a reader that has gone: the interpreter reports it
            sys.stdout.flush()
            sys.stderr.flush()
            if self.code is not None:
                os._exit(self.code)

    def run(self, program: Program) -> None:
        try:
            program.run()
            self.code = 0
        except SystemExit as end:
            self.code = (end.code or 0) & 0xFF if isinstance(end.code, int | None) else 1
            raise
        except Exception:
            self.code = 1
            raise


if __name__ == "__main__":
    end_of_child = End()
    server_link = socket.socket(fileno=int(sys.argv[1]))
    with count_once():
        watched = preload(sys.argv[2:])
        server_link.send(json.dumps({"ready": True}).encode())
        program = serve(server_link, watched)
        program.enter()
        end_of_child.run(program)
