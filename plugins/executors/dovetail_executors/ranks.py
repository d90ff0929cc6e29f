"""The processes of the ranks beside the engine's own, and the thread that watches them: it starts them, hears what they say, notices who dies or
takes too long, and then ends all of them.

What must hold: no rank outlives the engine's process or the executor, whatever becomes of either; and whoever waits for a rank hears why it won't
come.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dovetail.errors import DovetailError
from dovetail.process_watch import STOPPED, STOPPED_S, TRACED, ProcessWatch, process_state
from dovetail_executors.messages import LENGTH, send, split

log = logging.getLogger("dovetail")

TICK_S = 0.2  # a dead process is noticed within this time, even if something keeps its pipes open
GRACE_S = 0.5  # when a rank failed because another one didn't answer, so long is waited for that one's own end
STOP_S = 2.0  # that ranks get to end when told to; then they are killed
KILLED_S = 10.0  # that the system gets to end one that was killed
LAST_LINES = 8  # of what a rank wrote, told when it dies
LONGEST_LINE = 500  # characters of each

PROCESS = "dovetail_executors.rank_process"


@dataclass(frozen=True, slots=True)
class RankJob:
    """The work of one rank's process."""

    rank: int
    command: bytes  # a pickled `rank_process.Job`
    fds: tuple[int, ...]  # descriptors that it inherits
    name: str  # for people: "rank 1 (cuda:1)"
    environment: Mapping[str, str]  # besides this process's own


@dataclass(eq=False)
class _Child:
    """A process, and what is known of it."""

    job: RankJob
    process: subprocess.Popen[bytes]
    control: socket.socket
    started: float = field(default_factory=time.monotonic)
    heard: dict[str, Any] = field(default_factory=dict)  # what it said, by kind
    rest: bytes = b""  # of a message that isn't complete
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    line: str = ""  # that isn't complete

    @property
    def named(self) -> str:
        return f"{self.job.name}, process {self.process.pid}"

    def how_it_ended(self) -> str:
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        why = self.heard["failed"][0] if "failed" in self.heard else " | ".join(filter(str.strip, [*self.lines, self.line[:LONGEST_LINE]]))
        return f"{self.named}, {how}" + (f": {why}" if why else "")


class Ranks:
    """The processes of all ranks but the first. Made by one thread, which also waits; `failure` may be read by any."""

    def __init__(self, jobs: list[RankJob], executor: str) -> None:
        self._jobs, self._executor = jobs, executor
        self._owner = os.getpid()
        self._children: list[_Child] = []
        self._changed = threading.Condition()
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name=f"dovetail-{executor}-ranks", daemon=True)
        self._stopping = False
        self._unspawned: BaseException | None = None
        self._over = False  # the thread is through with its work
        self._clock = ProcessWatch()
        self._limit: tuple[float, Callable[[], str]] | None = None
        self._broken_off: DovetailError | None = None
        self.failure: DovetailError | None = None
        self.on_failure: Callable[[], None] = lambda: None  # called once, by the watching thread, when all ranks have been killed

    def start(self) -> None:
        """Start the processes, and watch them. Raises what starting a process raises."""
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: len(self._children) == len(self._jobs) or self._unspawned or self._over)
        if self._unspawned is not None:
            raise self._unspawned

    def limit(self, seconds: float | None, late: Callable[[], str] = lambda: "") -> None:
        """From now on, until the next call, all must be well within so many seconds; else the ranks are killed, for the reason that `late`
        returns."""
        self._limit = None if seconds is None else (self._clock.now + seconds, late)

    def tell(self, **message: Any) -> None:
        """Send a message to every rank. One that is dead is reported by `check`."""
        for child in self._children:
            with suppress(OSError):
                send(child.control, message)

    def heard(self, what: str) -> list[Any]:
        """Wait until every rank has said `what`, and return it in the order of ranks. Raises `DovetailError` if one fails, or the limit has
        passed."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or self._over or all(what in child.heard for child in self._children))
        self.check()
        return [child.heard[what] for child in self._children]

    def silent(self, what: str) -> str:
        """Name the ranks that haven't said `what`."""
        return ", ".join(child.named for child in self._children if what not in child.heard) or "none"

    def named(self, index: int) -> str:
        """Return the name of a rank for people, with what its process does if that is a sign: `index` 0 is rank 1."""
        child = self._children[index]
        return child.named + (", which is stopped" if process_state(child.process.pid) in (STOPPED, TRACED) else "")

    def check(self) -> None:
        """Raise `DovetailError` if a rank is dead or was too slow."""
        if self.failure is not None:
            raise DovetailError(str(self.failure)) from self.failure

    def await_failure(self, seconds: float) -> None:
        """Wait until a failure is known, as something shows that there is one, but no longer than this."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or self._over, seconds)

    def break_off(self, failure: DovetailError) -> None:
        """End all processes because of what happened elsewhere, which is their failure, too."""
        self._broken_off = failure
        self._rouse()

    def is_forked(self) -> bool:
        """True in a fork of the process that started the ranks: they aren't its own."""
        return os.getpid() != self._owner

    def stop(self) -> None:
        """End all processes, and the watch. Twice is as good as once."""
        self._stopping = True
        self._rouse()
        if self._thread.is_alive():
            self._thread.join()
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def _rouse(self) -> None:
        with suppress(OSError):
            self._wake.send(b"x")

    # The watching thread: it also starts the processes, as they are to die with it (see `rank_process`)

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
                self.failure = DovetailError(f"executor {self._executor}: the watch over the ranks failed: {type(error).__name__}: {error}")
            self._end(0)
        finally:
            self._selector.close()
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _spawn(self, job: RankJob) -> _Child:
        ours, theirs = socket.socketpair()
        theirs.setblocking(True)  # also where the program has given all sockets a time limit
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", PROCESS, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(), *job.fds),
                start_new_session=True,  # signals of the terminal are for the engine
                env={**os.environ, **job.environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        assert process.stdout is not None
        child = _Child(job, process, ours)
        ours.setblocking(True)
        with suppress(OSError):  # it is dead already: the watch will tell
            ours.sendall(LENGTH.pack(len(job.command)) + job.command)
        ours.setblocking(False)
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(ours, selectors.EVENT_READ, child)
        self._selector.register(process.stdout, selectors.EVENT_READ, child)
        return child

    def _watch(self) -> None:
        """Wait for something to happen, but no longer than a tick, and deal with it."""
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
            self._fail(self._error(self._culprit(dead).how_it_ended()))
        elif stopped := [child for child in self._children if self._clock.is_stopped(child.process.pid)]:
            self._fail(self._error(f"{stopped[0].named}, had been stopped (SIGSTOP) for {STOPPED_S:g} s"))
        elif self._limit is not None and self._clock.now > self._limit[0]:
            self._fail(self._error(self._limit[1]()))

    def _read(self, key: selectors.SelectorKey) -> None:
        child: _Child = key.data
        try:
            data = child.control.recv(1 << 16) if key.fileobj is child.control else os.read(key.fd, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(key.fileobj)
        elif key.fileobj is child.control:
            messages, child.rest = split(child.rest + data)
            with self._changed:
                for message in messages:
                    child.heard |= message
                    told = ", ".join(value if key == "stage" else key for key, value in message.items())
                    log.debug("%s: %s, %.2f s after it was started", child.job.name, told, time.monotonic() - child.started)
                self._changed.notify_all()
        else:
            self._pass_on(child, data.decode(errors="replace"))

    def _pass_on(self, child: _Child, text: str) -> None:
        """Write what a rank wrote on stderr, line by line, and keep the last."""
        *lines, child.line = (child.line + text).split("\n")
        child.lines.extend(line[:LONGEST_LINE] for line in lines)
        if lines:
            print(*(f"{child.job.name}: {line}" for line in lines), sep="\n", file=sys.stderr, flush=True)

    def _culprit(self, dead: list[_Child]) -> _Child:
        """Return the rank that died first, as far as can be told: not one that only missed another."""
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

    def _error(self, reason: str) -> DovetailError:
        return DovetailError(f"executor {self._executor}: {reason}")

    def _fail(self, failure: DovetailError) -> None:
        self._end(0)
        self.failure = failure
        with self._changed:
            self._changed.notify_all()
        self.on_failure()

    def _end(self, seconds: float) -> None:
        """Let the processes end within so many seconds, as their pipes are closed; kill who hasn't."""
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
                except subprocess.TimeoutExpired:  # the system holds it, in a driver
                    log.error("%s is still there %g s after SIGKILL", child.named, KILLED_S)
            assert child.process.stdout is not None
            child.process.stdout.close()
