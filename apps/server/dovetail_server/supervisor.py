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
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from typing import Any

from dovetail.api.process_watch import STOPPED_S, TRACED, ProcessWatch, process_state
from dovetail.errors import DovetailError, EngineDeadError
from dovetail_server.channel import BEAT_S, Channel, Message
from dovetail_server.child import ENGINE, Child, Pauses
from dovetail_server.engine_place import EnginePlace, due_engine
from dovetail_server.engine_sources import EngineSource
from dovetail_server.settings import ServerSettings
from dovetail_server.sockets import bind

TICK_S = 0.25
ENGINE_STOPS_S = 10.0  # timeout for the engine to stop
# timeout for front ends to end after a drain, or after reporting the engine's death
FRONT_ENDS_END_S = 6.0
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

    def _start_due_engine(self) -> None:
        """Start an engine if one is due."""
        if (engine := due_engine(self._engines, self._clock.now)) is not None:
            others = [one for one in self._engines if one.works]
            start = engine.start(self._directory, others)
            engine.child = self._start(ENGINE, "dovetail_server.engine_process", start)

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
        child = Child(name, process, Channel(ours))
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
            "engines": [engine.end(self._directory) for engine in self._engines],
            "settings": self._settings.model_dump(mode="json"),
            "socket": sock.fileno(),
        }
        self._front_ends[place] = self._start(name, "dovetail_server.front_end", start, sock)

    @property
    def _engine_children(self) -> list[Child]:
        return [engine.child for engine in self._engines if engine.child is not None]

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
            child.ready_since = time.monotonic()
            child.ranks = message.get("ranks", "")
            child.groups = message.get("groups", "")
            self._failed_starts = self._failed_starts if child.is_engine else 0
        elif "refused" in message:
            child.refused = message["refused"]
        elif "dead" in message:
            child.dead = message["dead"]
        elif child.is_engine:
            if message.get("busy_s", 0) > (limit := self._settings.step_timeout_s):
                child.give_up(f"a step took longer than {limit:g} s (--step-timeout)")
        elif message.get("busy_s", 0) > FRONT_END_HANGS_S:
            child.give_up(f"its event loop had been blocked for {FRONT_END_HANGS_S:g} s")

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
            if child.ready:
                engine.down = None
            return
        self._drain_pipes(child)
        if self._state is State.STARTING and child.refused is not None:
            raise DovetailError(child.refused)
        if self._state not in (State.STOPPING, State.FAILING):
            self._lose(engine, child)

    def _lose(self, engine: EnginePlace, child: Child) -> None:
        """Schedule the successor of an engine's process that has died. Raises as `_fail` does if no
        other engine works, or the server is starting."""
        reason = f"the engine's process {child.how_it_ended()}"
        engine.lose(reason)
        self._release(child)
        if self._state is State.STARTING or not any(one.works for one in self._engines):
            self._fail(reason)
            return
        pause_s = engine.pauses.next_s(child.lived_s)
        engine.due = self._clock.now + pause_s
        _tell_restart(f"{engine.source.names[0]}: {reason}", pause_s)
        self._tell_front_ends(lost=engine.place, engine=engine.end(self._directory))

    def _lives(self, child: Child, silence_s: float, option: str = "") -> bool:
        """Return False if a process has ended. Kill it if it is stopped, or if it is ready and has
        sent nothing for `silence_s`."""
        if child.process.poll() is not None:
            return False
        if process_state(child.process.pid) == TRACED:
            child.heard = self._clock.now  # stopped by a debugger
        elif self._clock.is_stopped(child.process.pid):
            child.give_up(f"it had been stopped (SIGSTOP) for {STOPPED_S:g} s")
        elif child.ready and self._clock.now - child.heard > silence_s:
            child.give_up(f"it had sent no heartbeat for {silence_s:g} s{option}")
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
        return all(child.process.poll() is not None for child in self._engine_children)

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
        for child in self._engine_children:
            child.channel.send(**message)

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
        child.kill()  # remaining children of it
        child.process.wait()

    def _clean_up(self) -> None:
        """Kill all processes, and remove all files."""
        children = [*self._front_ends.values(), *self._engine_children]
        for child in children:
            child.kill()
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
