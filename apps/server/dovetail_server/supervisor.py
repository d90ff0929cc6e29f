"""`Supervisor`: starts, watches and stops the engine's process and the front ends. It imports
neither torch nor the engine.

Each process has a `Channel` to the supervisor, and ends when the supervisor is gone.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from dovetail.api.process_watch import STOPPED_S, TRACED, ProcessWatch, how_ended, process_state
from dovetail.errors import DovetailError, EngineDeadError
from dovetail_server.channel import BEAT_S, Channel, Message
from dovetail_server.settings import ServerSettings
from dovetail_server.sockets import bind

TICK_S = 0.25
LAST_LINES = 5  # of the engine's stderr, reported when it dies
ENGINE_STOPS_S = 10.0  # timeout for the engine to stop
# timeout for front ends to end after a drain, or after reporting the engine's death
FRONT_ENDS_END_S = 6.0
# a front end that lives shorter than this is restarted after a pause, which doubles each time
QUICK_DEATH_S = 30.0
# the first and the longest such pause
PAUSE_S = 1.0
MOST_PAUSE_S = 30.0
# consecutive front ends that end by themselves before they are ready end the server
FAILED_STARTS = 3
# without a heartbeat, or a turn of its event loop, for this long a front end counts as hung
FRONT_END_HANGS_S = 30.0


class State(Enum):
    """State of the server."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"  # front ends finish their requests
    STOPPING = "stopping"  # the engine stops
    FAILING = "failing"  # the engine is dead; front ends notify their clients


@dataclass(eq=False)
class Child:
    """A child process and its state."""

    name: str
    module: str
    process: subprocess.Popen[bytes]
    channel: Channel
    socket: socket.socket | None = None  # a front end's listening socket
    ready: bool = False
    ranks: str = ""  # description of an engine's ranks, if it has several
    groups: str = ""  # line that describes its cache groups, if it has several
    started: float = field(default_factory=time.monotonic)
    refused: str | None = None  # why it failed to start
    dead: str | None = None  # why it died or was killed
    heard: float = 0.0  # time of the last message, on the watch's clock
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    def how_it_ended(self) -> str:
        """Return how it ended ("was killed by SIGKILL", "ended with exit code 1"), and its reason
        or last output."""
        how = how_ended(self.process.returncode)
        told = self.dead or " | ".join(line for line in self.last_lines if line.strip())
        return f"{how}: {told}" if told else how


class ServeFailed(EngineDeadError):
    """The server ended unexpectedly."""


class Supervisor:
    """`run` is called once, in the main thread."""

    def __init__(self, source: str, overrides: list[str], settings: ServerSettings) -> None:
        """`source`, `overrides`: the engine's config, as on the command line."""
        self._source = source
        self._overrides = overrides
        self._settings = settings
        self._state = State.STARTING
        self._selector = selectors.DefaultSelector()
        self._clock = ProcessWatch()
        self._next_beat = 0.0  # on that clock
        self._engine: Child | None = None
        self._front_ends: dict[int, Child] = {}  # by place
        self._generation = 0
        self._quick_deaths = self._failed_starts = 0  # consecutive
        self._restarts: dict[int, float] = {}  # by place: when, on that clock
        self._signals: list[int] = []
        self._failure: str | None = None
        self._deadline: float | None = None  # of the state
        self._directory = ""
        self._sockets: list[socket.socket] = []
        self._url = ""

    def run(self) -> int:
        """Serve until a signal arrives; return the exit code. Raises `ConfigError` or
        `DovetailError` if it can't start, `ServeFailed` if the engine dies."""
        self._sockets, self._url = bind(self._settings)
        self._directory = tempfile.mkdtemp(prefix="dovetail-")
        wake_read, wake_write = socket.socketpair()
        wake_read.setblocking(False)
        wake_write.setblocking(False)
        before = signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        handlers = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
        }
        self._selector.register(wake_read, selectors.EVENT_READ, None)
        try:
            self._engine = self._start(
                "engine",
                "dovetail_server.engine_process",
                {"source": self._source, "set": self._overrides},
            )
            for place in range(self._settings.front_ends):
                self._start_front_end(place)
            return self._watch()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)
            self._clean_up()
            wake_read.close()
            wake_write.close()

    # Starting

    @property
    def _address(self) -> str:
        return f"ipc://{self._directory}/engine"

    def _start(
        self, name: str, module: str, start: Message, sock: socket.socket | None = None
    ) -> Child:
        ours, theirs = socket.socketpair()
        fds = [theirs.fileno()] + ([] if sock is None else [sock.fileno()])
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE if name == "engine" else None,
            pass_fds=fds,
            start_new_session=True,  # only the supervisor gets the terminal's signals
        )
        theirs.close()
        child = Child(name, module, process, Channel(ours), sock)
        child.channel.send(**start, directory=self._directory, address=self._address)
        ours.setblocking(False)
        self._selector.register(ours, selectors.EVENT_READ, child)
        if process.stderr is not None:
            os.set_blocking(process.stderr.fileno(), False)
            self._selector.register(process.stderr, selectors.EVENT_READ, child)
        return child

    def _start_front_end(self, place: int) -> None:
        name = f"front-end-{place}.{self._generation}"
        self._generation += 1
        sock = self._sockets[place]
        start = {
            "name": name,
            "place": place,
            "settings": self._settings.model_dump(mode="json"),
            "socket": sock.fileno(),
        }
        self._front_ends[place] = self._start(name, "dovetail_server.front_end", start, sock)

    # Watching

    def _watch(self) -> int:
        while True:
            readable = self._selector.select(TICK_S)
            if (now := self._clock.turn()) >= self._next_beat:
                self._next_beat = now + BEAT_S
                self._tell_front_ends(beat=True)
            for key, _ in readable:
                self._read(key)
            if (code := self._heed_signals()) is not None:
                return code
            self._check_engine()
            self._check_front_ends()
            self._start_due_front_ends()
            if (code := self._go_on()) is not None:
                return code

    def _on_signal(self, number: int, frame: Any) -> None:
        if number != signal.SIGCHLD:
            self._signals.append(number)

    def _read(self, key: selectors.SelectorKey) -> None:
        child = key.data
        if child is None:
            with suppress(BlockingIOError):
                key.fileobj.recv(4096)  # type: ignore[union-attr]
        elif key.fileobj is child.channel.socket:
            messages = child.channel.receive()
            if messages is None:
                self._selector.unregister(key.fileobj)
            for message in messages or ():
                self._note(child, message)
        else:
            self._pass_on(child, key)

    def _pass_on(self, child: Child, key: selectors.SelectorKey) -> None:
        """Forward the engine's stderr, and keep its last lines."""
        try:
            data = os.read(key.fd, 65536)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(key.fileobj)
            return
        with suppress(OSError):
            os.write(2, data)
        child.last_lines.extend(data.decode(errors="replace").splitlines())

    def _note(self, child: Child, message: Message) -> None:
        child.heard = self._clock.now
        if "ready" in message:
            child.ready, child.ranks, child.groups = (
                True,
                message.get("ranks", ""),
                message.get("groups", ""),
            )
            self._failed_starts = self._failed_starts if child is self._engine else 0
        elif "refused" in message:
            child.refused = message["refused"]
        elif "dead" in message:
            child.dead = message["dead"]
        elif child is self._engine:
            if message.get("busy_s", 0) > (limit := self._settings.step_timeout_s):
                _give_up(child, f"a step took longer than {limit:g} s (--step-timeout)")
        elif message.get("busy_s", 0) > FRONT_END_HANGS_S:
            _give_up(child, f"its event loop had been blocked for {FRONT_END_HANGS_S:g} s")

    def _heed_signals(self) -> int | None:
        """Process signals; return the exit code if one ends the server immediately."""
        while self._signals:
            number = self._signals.pop(0)
            if self._state is not State.SERVING:
                return 128 + number
            self._state = State.DRAINING
            seconds = self._settings.drain_timeout_s
            self._deadline = self._clock.now + seconds + FRONT_ENDS_END_S
            self._tell_front_ends(drain_s=seconds)
        return None

    def _check_engine(self) -> None:
        """Raise `DovetailError` if the engine failed to start."""
        engine = self._the_engine()
        if self._lives(engine, self._settings.step_timeout_s, " (--step-timeout)"):
            return
        self._drain_pipes(engine)
        if engine.refused is not None:
            raise DovetailError(engine.refused)
        if self._state in (State.STOPPING, State.FAILING):
            return
        self._fail(f"the engine's process {engine.how_it_ended()}")

    def _the_engine(self) -> Child:
        if self._engine is None:
            raise DovetailError("the engine's process wasn't started")
        return self._engine

    def _lives(self, child: Child, silence_s: float, option: str = "") -> bool:
        """Return False if a process has ended. Kill it if it is stopped, or if it is ready and has
        sent nothing for `silence_s`."""
        if child.process.poll() is not None:
            return False
        if process_state(child.process.pid) == TRACED:
            child.heard = self._clock.now  # stopped by a debugger
        elif self._clock.is_stopped(child.process.pid):
            _give_up(child, f"it had been stopped (SIGSTOP) for {STOPPED_S:g} s")
        elif child.ready and self._clock.now - child.heard > silence_s:
            _give_up(child, f"it had sent no heartbeat for {silence_s:g} s{option}")
        return child.process.returncode is None

    def _drain_pipes(self, child: Child) -> None:
        """Read the remaining output of a process that has ended."""
        for key in list(self._selector.get_map().values()):
            if key.data is child:
                self._read(key)

    def _fail(self, reason: str) -> None:
        """Begin failing because the engine is dead. Raises `ServeFailed` if there are no clients
        yet."""
        self._failure = reason
        if self._state is State.STARTING:
            raise ServeFailed(reason)
        self._state = State.FAILING
        self._deadline = self._clock.now + FRONT_ENDS_END_S
        self._tell_front_ends(failed=reason)

    def _check_front_ends(self) -> None:
        for place, child in list(self._front_ends.items()):
            if self._lives(child, FRONT_END_HANGS_S):
                continue
            self._drain_pipes(child)
            del self._front_ends[place]
            self._the_engine().channel.send(gone=child.name)
            self._release(child)
            if self._state is State.STARTING or child.refused is not None:
                raise DovetailError(child.refused or f"a front end {child.how_it_ended()}")
            if self._state is State.SERVING:
                self._restart(place, child)

    def _restart(self, place: int, child: Child) -> None:
        """Schedule a successor. Only front ends that can't start end the server: whatever kills one
        that serves must not end the others' requests."""
        if not child.ready and child.dead is None:
            self._failed_starts += 1
        if self._failed_starts >= FAILED_STARTS:
            self._fail(f"front ends can't start; the last {child.how_it_ended()}")
            return
        quick = time.monotonic() - child.started < QUICK_DEATH_S
        self._quick_deaths = self._quick_deaths + 1 if quick else 0
        pause_s = (
            0.0
            if self._quick_deaths < 2
            else min(PAUSE_S * 2 ** (self._quick_deaths - 2), MOST_PAUSE_S)
        )
        when = f" in {pause_s:g} s" if pause_s else ""
        print(
            f"dovetail serve: a front end {child.how_it_ended()}; restarting it{when}",
            file=sys.stderr,
            flush=True,
        )
        self._restarts[place] = self._clock.now + pause_s

    def _start_due_front_ends(self) -> None:
        for place, due in list(self._restarts.items()):
            if self._state is State.SERVING and due <= self._clock.now:
                del self._restarts[place]
                self._start_front_end(place)

    def _go_on(self) -> int | None:
        """Advance the state if its condition is met; return the exit code at the end. Raises
        `ServeFailed`."""
        late = self._deadline is not None and self._clock.now > self._deadline
        engine = self._the_engine()
        if (
            self._state is State.STARTING
            and engine.ready
            and all(child.ready for child in self._front_ends.values())
        ):
            self._state = State.SERVING
            print(
                f"{engine.groups}dovetail serves {self._source}{engine.ranks} at {self._url}",
                flush=True,
            )
        elif self._state is State.DRAINING and (late or not self._front_ends):
            self._state = State.STOPPING
            self._deadline = self._clock.now + ENGINE_STOPS_S
            engine.channel.send(stop=True)
        elif self._state is State.STOPPING and (late or engine.process.poll() is not None):
            return 0
        elif self._state is State.FAILING and (late or not self._front_ends):
            raise ServeFailed(str(self._failure))
        return None

    def _tell_front_ends(self, **message: Any) -> None:
        for child in self._front_ends.values():
            child.channel.send(**message)

    # The end

    def _release(self, child: Child) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data is child:
                self._selector.unregister(key.fileobj)
        child.channel.close()
        if child.process.stderr is not None:
            child.process.stderr.close()
        _kill(child)  # remaining children of it
        child.process.wait()

    def _clean_up(self) -> None:
        """Kill all processes, and remove all files."""
        children = [*self._front_ends.values(), *([] if self._engine is None else [self._engine])]
        for child in children:
            _kill(child)
        for child in children:
            self._release(child)
        for sock in self._sockets:
            sock.close()
        if self._settings.uds is not None:
            with suppress(OSError):
                os.unlink(self._settings.uds)
        shutil.rmtree(self._directory, ignore_errors=True)
        self._selector.close()


def _give_up(child: Child, why: str) -> None:
    """Kill a process that hangs."""
    child.dead = why
    _kill(child)
    child.process.wait()


def _kill(child: Child) -> None:
    """Kill a process and its children, which are its process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, signal.SIGKILL)
