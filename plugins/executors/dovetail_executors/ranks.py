"""`Ranks`: the processes of one host's ranks, their ring, and the thread that starts and watches
them. If one dies or is too slow, it ends all.

Guarantees: no rank outlives the engine's process or the executor, however these end; and a wait for
a rank that fails raises the reason.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from dovetail.api.process_watch import (
    PULSE,
    STOPPED,
    STOPPED_S,
    TRACED,
    ProcessWatch,
    how_ended,
    process_state,
)
from dovetail.errors import DovetailError
from dovetail_executors.rank_process import RankJob
from dovetail_executors.ring import Ring, RingWriter

log = logging.getLogger("dovetail")

TICK_S = 0.2  # a dead process is noticed within this time, even if something keeps its pipes open
# when a rank failed because another one didn't answer, wait so long for that one to end
GRACE_S = 0.5
STOP_S = 2.0  # until ranks that are told to end are killed
KILLED_S = 10.0  # that the system gets to end a killed rank
LAST_LINES = 8  # of a rank's output, reported when it dies
LONGEST_LINE = 500  # characters of each

PROCESS = "dovetail_executors.rank_process"


@dataclass(eq=False)
class _Child:
    """A rank's process and its messages."""

    name: str  # for people: "rank 1 (cuda:1)"
    process: subprocess.Popen[bytes]
    control: Connection[Any, Any]
    started: float = field(default_factory=time.monotonic)
    heard: dict[str, Any] = field(default_factory=dict)  # its messages, by kind
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    line: str = ""  # incomplete

    @property
    def named(self) -> str:
        return f"{self.name}, process {self.process.pid}"

    def how_it_ended(self) -> str:
        why = (
            self.heard["failed"][0]
            if "failed" in self.heard
            else " | ".join(filter(str.strip, [*self.lines, self.line[:LONGEST_LINE]]))
        )
        return f"{self.named}, {how_ended(self.process.returncode)}" + (f": {why}" if why else "")


@dataclass(slots=True)
class _Limit:
    """A timeout: `end` on the watch's clock, set when the first rank's pulse was at `pulse`. Only
    the watch changes it."""

    seconds: float
    late: Callable[[], str]
    end: float
    pulse: float


class Ranks:
    """Processes of ranks on this host. Made by one thread, which also waits; `failure` may be read
    by any. `writer` sends to loaded ranks; it is None if there are no ranks."""

    def __init__(self, jobs: Sequence[RankJob], more_fds: Sequence[int] = ()) -> None:
        """Start nothing yet. `more_fds`: descriptors that the processes inherit; the caller closes
        them."""
        self._more_fds = more_fds
        self._ring = Ring.make(max(1, len(jobs)))
        self._fds = [self._ring.fd]
        self._jobs = []
        wakers = []
        for reader, job in enumerate(jobs):
            read, write = os.pipe()
            os.set_blocking(write, False)
            self._fds += [read, write]
            wakers.append(write)
            path = list(sys.path)
            words = len(self._ring.words)
            self._jobs.append(
                replace(
                    job,
                    path=path,
                    ring_fd=self._ring.fd,
                    ring_words=words,
                    readers=len(jobs),
                    reader=reader,
                    waker_fd=read,
                )
            )
        self.writer = RingWriter(self._ring, wakers, self.check) if jobs else None
        self._owner = os.getpid()
        self._children: list[_Child] = []
        self._changed = threading.Condition()
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="dovetail-tensor-ranks", daemon=True)
        self._stopping = False
        self._unspawned: BaseException | None = None
        self._over = False  # the thread has ended
        self._clock = ProcessWatch()
        self._limit: _Limit | None = None
        self._broken_off: DovetailError | None = None
        self.failure: DovetailError | None = None
        # called once, by the watching thread, after all ranks were killed
        self.on_failure: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Start and watch the processes. Raises what starting a process raises."""
        self._thread.start()
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._children) == len(self._jobs) or self._unspawned or self._over
            )
        if self._unspawned is not None:
            raise self._unspawned

    def limit(self, seconds: float | None, late: Callable[[], str] = lambda: "") -> None:
        """Set a timeout of `seconds`, replacing the previous one; None: no timeout. When it
        expires, the ranks are killed, with the reason that `late` returns. It restarts with
        progress of the first rank, on a CPU with each layer, in which the ranks wait for each
        other."""
        self._limit = (
            None
            if seconds is None
            else _Limit(seconds, late, self._clock.now + seconds, PULSE.last)
        )

    def tell(self, **message: Any) -> None:
        """Send a message to every rank; `check` reports dead ones."""
        for child in self._children:
            with suppress(OSError):
                child.control.send(message)

    def heard(self, what: str) -> list[Any]:
        """Wait until every rank has said `what`, and return it in the order of ranks. Raises
        `DovetailError` if one fails, or the limit has passed."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self.failure is not None
                    or self._over
                    or all(what in child.heard for child in self._children)
                )
            )
        self.check()
        if not all(what in child.heard for child in self._children):
            raise DovetailError("executor tensor was stopped")
        return [child.heard[what] for child in self._children]

    def silent(self, what: str) -> str:
        """Name the ranks that haven't sent `what`, or return "none"."""
        return (
            ", ".join(child.named for child in self._children if what not in child.heard) or "none"
        )

    def named(self, index: int) -> str:
        """Return the name of a rank, saying if it is stopped: `index` 0 is the first rank here."""
        child = self._children[index]
        return child.named + (
            ", which is stopped" if process_state(child.process.pid) in (STOPPED, TRACED) else ""
        )

    def check(self) -> None:
        """Raise `DovetailError` if a rank is dead or was too slow."""
        if self.failure is not None:
            raise DovetailError(str(self.failure)) from self.failure

    def break_off(self, failure: DovetailError) -> None:
        """End all processes because of a failure elsewhere, which becomes theirs."""
        self._broken_off = failure
        self._rouse()

    def is_forked(self) -> bool:
        """Return True in a fork of the process that made this: the ranks aren't its own."""
        return os.getpid() != self._owner

    def stop(self) -> None:
        """End all processes and the watch, and release the ring. Idempotent; a no-op in a fork."""
        if self.is_forked():
            return
        self._stopping = True
        self._rouse()
        if self._thread.is_alive():
            self._thread.join()
        self._selector.close()
        self._wake.close()
        self._woken.close()
        while self._fds:
            with suppress(OSError):
                os.close(self._fds.pop())
        self._ring.close()

    def _rouse(self) -> None:
        with suppress(OSError):
            self._wake.send(b"x")

    # The watching thread. It also starts the processes, which the kernel kills when it ends (see
    # `rank_process`)

    def _run(self) -> None:
        try:
            for job in self._jobs:
                if self._stopping:
                    break
                child = self._spawn(job)
                with self._changed:
                    self._children.append(child)
                    self._changed.notify_all()
            self._selector.register(self._woken, selectors.EVENT_READ)
            while not self._stopping:
                self._watch()
            self._end(STOP_S)
        except BaseException as error:
            self._unspawned = error
            if self.failure is None:
                self.failure = DovetailError(
                    f"executor tensor: the watch over the ranks failed: {type(error).__name__}: "
                    f"{error}"
                )
            self._end(0)
        finally:
            self._selector.close()
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _spawn(self, job: RankJob) -> _Child:
        ours, theirs = Pipe()
        threads = job.settings.threads
        environment = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", PROCESS, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(), job.ring_fd, job.waker_fd, *self._more_fds),
                start_new_session=True,  # the terminal's signals are for the engine
                env={
                    **os.environ,
                    **environment,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        assert process.stdout is not None
        child = _Child(job.name, process, ours)
        with suppress(OSError):  # dead already: the watch will notice
            ours.send_bytes(job.pickled())
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(ours, selectors.EVENT_READ, child)
        self._selector.register(process.stdout, selectors.EVENT_READ, child)
        return child

    def _watch(self) -> None:
        """Wait up to a tick for events, and handle them."""
        readable = self._selector.select(TICK_S)
        self._clock.turn()
        for key, _ in readable:
            if key.data is not None:
                self._read(key)
            else:
                self._woken.recv(64)
        if self.failure is not None or self._stopping:
            return
        if self._broken_off is not None:
            self._fail(self._broken_off)
            return
        dead = [child for child in self._children if child.process.poll() is not None]
        if dead:
            self._fail(DovetailError(f"executor tensor: {self._culprit(dead).how_it_ended()}"))
        elif stopped := [
            child for child in self._children if self._clock.is_stopped(child.process.pid)
        ]:
            self._fail(
                DovetailError(
                    f"executor tensor: {stopped[0].named}, had been stopped (SIGSTOP) for "
                    f"{STOPPED_S:g} s"
                )
            )
        elif (limit := self._limit) is not None and self._clock.now > limit.end:
            if PULSE.last != limit.pulse:
                limit.pulse = PULSE.last
                limit.end = self._clock.now + limit.seconds - (time.monotonic() - limit.pulse)
            else:
                self._fail(DovetailError(f"executor tensor: {limit.late()}"))

    def _read(self, key: selectors.SelectorKey) -> None:
        """Read without blocking: messages are so short that they arrive whole."""
        child: _Child = key.data
        try:
            if key.fileobj is child.control:
                while child.control.poll():
                    self._hear(child, child.control.recv())
            elif data := os.read(key.fd, 1 << 16):
                self._pass_on(child, data.decode(errors="replace"))
            else:
                self._selector.unregister(key.fd)
        except BlockingIOError:
            pass
        except (EOFError, OSError):
            self._selector.unregister(key.fd)

    def _hear(self, child: _Child, message: dict[str, Any]) -> None:
        with self._changed:
            child.heard |= message
            self._changed.notify_all()
        done = ", ".join(value if key == "stage" else key for key, value in message.items())
        log.debug(
            "%s: %s, %.2f s after it was started",
            child.name,
            done,
            time.monotonic() - child.started,
        )

    def _pass_on(self, child: _Child, text: str) -> None:
        """Copy a rank's output to stderr by line, and keep the last lines."""
        *lines, child.line = (child.line + text).split("\n")
        child.lines.extend(line[:LONGEST_LINE] for line in lines)
        if lines:
            print(
                *(f"{child.name}: {line}" for line in lines), sep="\n", file=sys.stderr, flush=True
            )

    def _culprit(self, dead: list[_Child]) -> _Child:
        """Return the rank that died first, as far as is known: not one that failed because another
        didn't answer."""
        until = time.monotonic() + GRACE_S
        while True:
            for key in list(self._selector.get_map().values()):
                if key.data is not None:
                    self._read(key)
            dead = [child for child in self._children if child.process.poll() is not None]
            own = [child for child in dead if not child.heard.get("failed", ("", False))[1]]
            if own or time.monotonic() > until:
                return (own or dead)[0]
            time.sleep(0.01)

    def _fail(self, failure: DovetailError) -> None:
        self._end(0)
        self.failure = failure
        with self._changed:
            self._changed.notify_all()
        self.on_failure()

    def _end(self, seconds: float) -> None:
        """Close the control pipes, wait up to `seconds`, then kill the remaining processes."""
        for child in self._children:
            child.control.close()
        until = time.monotonic() + seconds
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, until - time.monotonic()))
            if child.process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(child.process.pid, signal.SIGKILL)
                try:
                    child.process.wait(KILLED_S)
                except subprocess.TimeoutExpired:  # stuck in a driver
                    log.error("%s is still there %g s after SIGKILL", child.named, KILLED_S)
            assert child.process.stdout is not None
            child.process.stdout.close()
