"""`Supervisor`: starts, watches and stops the engines' processes and the front ends. It imports
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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from dovetail.api.process_watch import STOPPED_S, TRACED, ProcessWatch, how_ended, process_state
from dovetail.errors import DovetailError, EngineDeadError
from dovetail_server.channel import BEAT_S, Channel, Message
from dovetail_server.engine_sources import EngineSource
from dovetail_server.settings import ServerSettings
from dovetail_server.sockets import bind

ENGINE = "engine"  # the name of an engine's process
TICK_S = 0.25
LAST_LINES = 5  # of the engine's stderr, reported when it dies
ENGINE_STOPS_S = 10.0  # timeout for the engine to stop
# timeout for front ends to end after a drain, or after reporting the engine's death
FRONT_ENDS_END_S = 6.0
# a process that works for less than this is restarted after a pause, which doubles each time
QUICK_DEATH_S = 30.0
# the first and the longest such pause
PAUSE_S = 1.0
MOST_PAUSE_S = 30.0
# consecutive front ends that end by themselves before they are ready end the server
FAILED_STARTS = 3
# without a heartbeat, or a turn of its event loop, for this long a front end counts as hung
FRONT_END_HANGS_S = 30.0


class State(Enum):
    """State of the server. Engines that die while others work don't change it."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"  # front ends finish their requests
    STOPPING = "stopping"  # the engines stop
    FAILING = "failing"  # all engines are dead; front ends notify their clients


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
    ready_since: float | None = None
    refused: str | None = None  # why it failed to start
    dead: str | None = None  # why it died or was killed
    heard: float = 0.0  # time of the last message, on the watch's clock
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    @property
    def is_engine(self) -> bool:
        return self.name == ENGINE

    @property
    def lived_s(self) -> float:
        """For how many seconds it has been ready."""
        return 0.0 if self.ready_since is None else time.monotonic() - self.ready_since

    def how_it_ended(self) -> str:
        """Return how it ended ("was killed by SIGKILL", "ended with exit code 1"), and its reason
        or last output."""
        how = how_ended(self.process.returncode)
        told = (
            self.dead
            or self.refused
            or " | ".join(line for line in self.last_lines if line.strip())
        )
        return f"{how}: {told}" if told else how


class Pauses:
    """How long to wait before a process is restarted: longer each time if it dies quickly."""

    def __init__(self) -> None:
        self._quick_deaths = 0  # consecutive

    def next_s(self, lived_s: float) -> float:
        """Return the seconds after the death of a process that has worked for `lived_s`."""
        self._quick_deaths = self._quick_deaths + 1 if lived_s < QUICK_DEATH_S else 0
        if self._quick_deaths < 2:
            return 0.0
        return min(PAUSE_S * 2.0 ** (self._quick_deaths - 2), MOST_PAUSE_S)


@dataclass(eq=False)
class EnginePlace:
    """An engine on the command line, whose processes come and go."""

    source: EngineSource
    place: int
    child: Child | None = None  # its process
    starts: int = 0  # processes so far
    down: str | None = None  # why its last process has died, until the next one is ready
    due: float = 0.0  # when the next one starts, on the supervisor's clock
    pauses: Pauses = field(default_factory=Pauses)

    @property
    def is_starting(self) -> bool:
        return self.child is not None and not self.child.ready

    @property
    def works(self) -> bool:
        return self.child is not None and self.child.ready


class ServeFailed(EngineDeadError):
    """The server ended unexpectedly."""


class Supervisor:
    """`run` is called once, in the main thread."""

    def __init__(self, sources: Sequence[EngineSource], settings: ServerSettings) -> None:
        self._settings = settings
        self._state = State.STARTING
        self._selector = selectors.DefaultSelector()
        self._clock = ProcessWatch()
        self._next_beat = 0.0  # on that clock
        self._engines = [EnginePlace(source, place) for place, source in enumerate(sources)]
        self._front_ends: dict[int, Child] = {}  # by place
        self._generation = 0
        self._pauses = Pauses()  # of front ends
        self._failed_starts = 0  # consecutive
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
            self._start_due_engine()
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

    def _address(self, engine: EnginePlace) -> str:
        """Return the address of an engine's process, or of the next one if there is none."""
        number = engine.starts if engine.child is None else engine.starts - 1
        return f"ipc://{self._directory}/engine-{engine.place}.{number}"

    def _start_due_engine(self) -> None:
        """Start an engine if one is due and no other is starting: each measures what others have
        left of the memory."""
        if any(engine.is_starting for engine in self._engines):
            return
        for engine in self._engines:
            if engine.child is None and engine.due <= self._clock.now:
                others = [one.source for one in self._engines if one.works]
                start = {
                    "source": engine.source.source,
                    "set": engine.source.overrides_beside(others),
                    "address": self._address(engine),
                }
                engine.child = self._start(ENGINE, "dovetail_server.engine_process", start)
                engine.starts += 1
                return

    def _end_of(self, engine: EnginePlace) -> Message:
        """Return what a front end must know to use an engine."""
        return {
            "address": self._address(engine),
            "names": engine.source.names,
            "adapters": engine.source.adapters,
            "down": engine.down,
        }

    def _start(
        self, name: str, module: str, start: Message, sock: socket.socket | None = None
    ) -> Child:
        ours, theirs = socket.socketpair()
        fds = [theirs.fileno()] + ([] if sock is None else [sock.fileno()])
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE if name == ENGINE else None,
            pass_fds=fds,
            start_new_session=True,  # only the supervisor gets the terminal's signals
        )
        theirs.close()
        child = Child(name, module, process, Channel(ours), sock)
        child.channel.send(**start, directory=self._directory)
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
            "engines": [self._end_of(engine) for engine in self._engines],
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
            for engine in self._engines:
                self._check_engine(engine)
            self._check_front_ends()
            self._start_due()
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
            child.ready_since = time.monotonic()
            self._failed_starts = self._failed_starts if child.is_engine else 0
        elif "refused" in message:
            child.refused = message["refused"]
        elif "dead" in message:
            child.dead = message["dead"]
        elif child.is_engine:
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

    def _check_engine(self, engine: EnginePlace) -> None:
        """Raise `DovetailError` if an engine can't start when the server does."""
        child = engine.child
        if child is None:
            return
        if self._lives(child, self._settings.step_timeout_s, " (--step-timeout)"):
            engine.down = None if child.ready else engine.down
            return
        self._drain_pipes(child)
        if self._state is State.STARTING and child.refused is not None:
            raise DovetailError(child.refused)
        if self._state not in (State.STOPPING, State.FAILING):
            self._lose(engine, child)

    def _lose(self, engine: EnginePlace, child: Child) -> None:
        """Schedule the successor of an engine's process that has died. Raises as `_fail` does if no
        other engine works, or the server is starting."""
        engine.child = None
        self._release(child)
        reason = engine.down = f"the engine's process {child.how_it_ended()}"
        if self._state is State.STARTING or not any(one.works for one in self._engines):
            self._fail(reason)
            return
        pause_s = engine.pauses.next_s(child.lived_s)
        engine.due = self._clock.now + pause_s
        _tell_restart(f"{engine.source.names[0]}: {reason}", pause_s)
        self._tell_front_ends(lost=engine.place, engine=self._end_of(engine))

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
        """Begin failing because all engines are dead. Raises `ServeFailed` if there are no clients
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
            self._tell_engines(gone=child.name)
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
        pause_s = self._pauses.next_s(child.lived_s)
        _tell_restart(f"a front end {child.how_it_ended()}", pause_s)
        self._restarts[place] = self._clock.now + pause_s

    def _start_due(self) -> None:
        """Start processes that are due, unless the server ends."""
        if self._state not in (State.STARTING, State.SERVING):
            return
        self._start_due_engine()
        for place, due in list(self._restarts.items()):
            if due <= self._clock.now:
                del self._restarts[place]
                self._start_front_end(place)

    def _go_on(self) -> int | None:
        """Advance the state if its condition is met; return the exit code at the end. Raises
        `ServeFailed`."""
        late = self._deadline is not None and self._clock.now > self._deadline
        if (
            self._state is State.STARTING
            and all(engine.works for engine in self._engines)
            and all(child.ready for child in self._front_ends.values())
        ):
            self._state = State.SERVING
            self._tell_start()
        elif self._state is State.DRAINING and (late or not self._front_ends):
            self._state = State.STOPPING
            self._deadline = self._clock.now + ENGINE_STOPS_S
            self._tell_engines(stop=True)
        elif self._state is State.STOPPING and (late or self._have_ended()):
            return 0
        elif self._state is State.FAILING and (late or not self._front_ends):
            raise ServeFailed(str(self._failure))
        return None

    def _have_ended(self) -> bool:
        """Return True if no engine has a process that runs."""
        children = [engine.child for engine in self._engines if engine.child is not None]
        return all(child.process.poll() is not None for child in children)

    def _tell_start(self) -> None:
        """Print what is served, and where."""
        groups = ""
        names = []
        for engine in self._engines:
            if engine.child is not None:
                groups += engine.child.groups
                names.append(f"{engine.source.source}{engine.child.ranks}")
        print(f"{groups}dovetail serves {', '.join(names)} at {self._url}", flush=True)

    def _tell_engines(self, **message: Any) -> None:
        for engine in self._engines:
            if engine.child is not None:
                engine.child.channel.send(**message)

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
        engines = [engine.child for engine in self._engines if engine.child is not None]
        children = [*self._front_ends.values(), *engines]
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


def _tell_restart(what: str, pause_s: float) -> None:
    when = f" in {pause_s:g} s" if pause_s else ""
    print(f"dovetail serve: {what}; restarting it{when}", file=sys.stderr, flush=True)


def _give_up(child: Child, why: str) -> None:
    """Kill a process that hangs."""
    child.dead = why
    _kill(child)
    child.process.wait()


def _kill(child: Child) -> None:
    """Kill a process and its children, which are its process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, signal.SIGKILL)
