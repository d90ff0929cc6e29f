"""`WorkerProcesses`: pool of processes that do untrusted work, a line of JSON each, with bounds on
its time and memory.

For `chat_rendering`, `adapters` and `grammar_trials`. A worker reads requests from its standard
input and answers on its standard output. It bounds its own memory, and is killed when its time is
up.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dovetail.errors import DovetailError

OUT_OF_MEMORY = b'"memory"\n'  # a worker's last answer
PING = b"null"  # a request whose answer, an empty list, shows that the worker runs
# what Python and the time of day need; no secrets
_ENVIRONMENT = (
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "PATH",
    "SYSTEMROOT",
    "TZ",
)
_STARTS_S = 60.0  # how long a process may take to start


class WorkerEndedError(Exception):
    """The worker has ended. `reason`: "memory" or "time" if it exceeded that limit, otherwise
    "ended"."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def why_ended(answer: bytes, exit_code: int, *, late: bool) -> str:
    """Return the reason of `WorkerEndedError`. `answer`: its last one, perhaps a part of it;
    `late`: its time was up; `exit_code`: as of `subprocess`."""
    ended_by = -exit_code
    if answer or ended_by == signal.SIGABRT:  # of native code, where Python raises `MemoryError`
        return "memory"
    return "time" if late or ended_by == getattr(signal, "SIGXCPU", -1) else "ended"


class WorkerProcess:
    """A running worker. `end()` kills it, if it is still there."""

    def __init__(self, does: str, script: Path, *arguments: str, plugins: bool = False) -> None:
        """Start `script` as a file of its own. Its first argument is the path of this process, by
        which it imports. `does`: what it does, for errors. `plugins`: it imports plugins, which may
        be installed by hooks of `site`. Raises `DovetailError` if it doesn't start."""
        paths = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
        options = ["-I"] if plugins else ["-I", "-S"]
        command = [sys.executable, *options, str(script), json.dumps(paths), *arguments]
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.DEVNULL,
        }
        try:  # in a session of its own: Ctrl-C in a terminal is for the engine
            self._process = subprocess.Popen(
                command, **pipes, env=environment, start_new_session=True
            )
        except OSError as error:
            raise DovetailError(
                f"the process that {does} doesn't start: {command[0]}: {error.strerror}"
            ) from error
        self.end = weakref.finalize(self, _end, self._process, os.getpid())
        try:
            self.ask(PING, _STARTS_S)
        except WorkerEndedError:
            raise DovetailError(
                f"the process that {does} doesn't start: {' '.join(command[:4])}"
            ) from None

    @property
    def alive(self) -> bool:
        """False once it has ended, of itself or by `end`."""
        return self.end.alive and self._process.poll() is None

    def ask(self, request: bytes, seconds: float, overtime_s: float = 0.0) -> Any:
        """Return the answer to a line. Raises `WorkerEndedError`: a worker that hasn't ended itself
        `overtime_s` after its time is killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        begun = time.monotonic()
        overdue = threading.Timer(seconds + overtime_s, self._process.kill)
        overdue.daemon = True
        overdue.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(request + b"\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        except ValueError:  # another thread has closed the pipes: `WorkerProcesses.close`
            line = b""
        finally:
            overdue.cancel()
        if line.endswith(b"\n") and line != OUT_OF_MEMORY:
            return json.loads(line)
        self.end()
        late = time.monotonic() - begun >= seconds
        raise WorkerEndedError(why_ended(line, self._process.returncode or 0, late=late))


class WorkerProcesses:
    """A pool of at most `most` processes. Each serves one caller at a time."""

    def __init__(self, most: int, start: Callable[[], WorkerProcess]) -> None:
        self._most = most
        self._start = start
        self._begin()

    def _begin(self) -> None:
        self._owner = os.getpid()
        self._free = threading.Semaphore(self._most)
        self._idle: list[WorkerProcess] = []
        self._busy: set[WorkerProcess] = set()

    @contextlib.contextmanager
    def one(self) -> Iterator[WorkerProcess]:
        """Acquire a process. One that was interrupted, or has ended, isn't used again."""
        if os.getpid() != self._owner:  # forked: those are the parent's
            self._begin()
        with self._free:
            process = self._taken()
            self._busy.add(process)
            try:
                yield process
            except BaseException:
                process.end()
                raise
            finally:
                self._busy.discard(process)
            if process.alive:
                self._idle.append(process)

    def _taken(self) -> WorkerProcess:
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread was quicker
                if (process := self._idle.pop()).alive:
                    return process
                process.end()
        return self._start()

    def close(self) -> None:
        """End the processes, those in use too; another call of `one` starts new ones."""
        for process in [*self._busy]:
            process.end()
        while self._idle:
            with contextlib.suppress(IndexError):
                self._idle.pop().end()


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:  # a fork has no right to
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # of what was to be written
            pipe.close()  # type: ignore[union-attr]


def bound_process(memory_bytes: int, cpu_s: float | None = None) -> None:
    """Limit this process from now on: allocations beyond so much address space raise `MemoryError`,
    and exceeding the processor time kills it. Where the system has no such limits (Windows, and
    macOS, which doesn't enforce that of memory), only the parent's timeout applies."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, resource.RLIM_INFINITY))
        if cpu_s is not None:
            usage = resource.getrusage(resource.RUSAGE_SELF)
            most_s = int(usage.ru_utime + usage.ru_stime + cpu_s) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (most_s, resource.RLIM_INFINITY))
    except (ImportError, OSError, ValueError):
        pass


class OwnMemory(NamedTuple):
    """Memory of this process, in bytes: of its address space, and what is resident of it."""

    address_bytes: int
    resident_bytes: int


def own_memory() -> OwnMemory:
    """Return the memory of this process; zeros where the system doesn't tell."""
    try:
        with open("/proc/self/statm") as file:
            address, resident = file.read().split()[:2]
    except OSError:
        return OwnMemory(0, 0)
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return OwnMemory(int(address) * page_bytes, int(resident) * page_bytes)
