"""`FrontEnd`: uvicorn with the app, in its own process
(`python -m dovetail_server.front_end DESCRIPTOR`, started by the supervisor) or beside the engine's
thread (`one_process`)."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn

from dovetail.api.process_watch import ProcessWatch
from dovetail.errors import ConfigError, DovetailError
from dovetail_server.app import app_of
from dovetail_server.channel import BEAT_S, Channel, Message, channel_of_process, end_orphaned
from dovetail_server.links import Line, ZmqLine
from dovetail_server.models import Model, Models
from dovetail_server.remote import RemoteEngine
from dovetail_server.settings import ServerSettings
from dovetail_server.sockets import allow_open_files, is_on_loopback, listen
from dovetail_server.wire import DirectProtocol

logger = logging.getLogger("dovetail")

LAST_ANSWERS_S = 3  # timeout for connections to close once there are no more requests
FAILED_S = 1.0  # how long a server answers with an error after its engine has died
SUPERVISOR_SILENT_S = 5.0  # without a heartbeat, /health reports that the supervisor hangs


class _Server(uvicorn.Server):
    """uvicorn server that ignores signals and reports when it listens."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class LoopWatch:
    """Measures for how long an event loop has been blocked, excluding time during which the process
    was suspended."""

    def __init__(self) -> None:
        self._clock = ProcessWatch()
        self._turned = self._clock.now

    def turned(self) -> None:
        """Note a turn of the loop, which takes one each `BEAT_S` while it isn't blocked."""
        self._turned = self._clock.now

    def blocked_s(self) -> float:
        """Return the seconds. Call it several times a second, from one thread."""
        return max(0.0, self._clock.turn() - self._turned - BEAT_S)


@dataclass(frozen=True)
class EngineEnd:
    """The line to an engine. `names`: of its model; empty for that in `engine.yaml`. `adapters`:
    "NAME=PATH" of those to load. `down`: why it is being restarted, and isn't waited for."""

    line: Line
    names: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    down: str | None = None


class FrontEnd:
    """One front end. All methods are called in its event loop."""

    def __init__(
        self,
        ends: Sequence[EngineEnd],
        name: str,
        settings: ServerSettings,
        sock: socket.socket,
        ready: Callable[[], None],
        *,
        place: int = 0,
    ) -> None:
        """`name`: unique among all front ends, past ones included. `place`: its index among running
        front ends. `ready`: called once it listens."""
        self._ends = ends
        self._name = name
        self._settings = settings
        self._socket = sock
        self._ready = ready
        self._place = place
        self._engines: dict[int, RemoteEngine] = {}  # by place
        self._models = Models([end.names for end in ends])
        self._connecting: dict[int, asyncio.Task[None]] = {}  # by place
        self._app: Any = None
        self._server: _Server | None = None
        self._ending: asyncio.Task[None] | None = None
        self.failure: str | None = None  # the reason, if it has failed

    async def run(self) -> None:
        """Serve until `drain` or `fail` ends it. Raises `DovetailError` if it can't start."""
        try:
            await self._connect_all()
            self._app = app_of(
                self._models, self._settings, on_loopback=is_on_loopback(self._socket)
            )
            self._app.state.draining, self._app.state.failure = False, None
            config = self._config()
            try:
                config.load()
            except OSError as error:  # of TLS files
                raise ConfigError(
                    f"tls_cert, tls_key: {self._settings.tls_cert}, {self._settings.tls_key}: "
                    f"{error}"
                ) from None
            self._server = _Server(config, self._ready)
            if self.failure is not None:
                raise DovetailError(self.failure)
            listen(self._socket)
            await self._server.serve([self._socket])
            if not self._server.started:
                raise DovetailError("the HTTP app failed to start: see the log")
        finally:
            for task in self._connecting.values():
                task.cancel()
            for engine in self._engines.values():
                engine.close()

    async def _connect_all(self) -> None:
        """Wait for the engines that aren't down."""
        waited = []
        for place, end in enumerate(self._ends):
            if end.down is not None:
                self.lose(place, end.down, end)
            else:
                task = self._connecting[place] = asyncio.create_task(self._connect(place, end))
                waited.append(task)
        await asyncio.wait(waited)
        for task in waited:
            if not task.cancelled():  # an engine that has died meanwhile
                task.result()

    async def _connect(self, place: int, end: EngineEnd) -> None:
        """Wait for an engine, load its adapters, and serve its model."""
        try:
            engine = await RemoteEngine.connect(end.line, self._name, self.fail)
        except BaseException:
            end.line.close()
            raise
        if (before := self._engines.pop(place, None)) is not None:
            before.close()
        self._engines[place] = engine
        for one in end.adapters:
            await engine.load_adapter(*one.split("=", 1))
        self._models.put(place, Model.of(engine, self._settings, end.names, self._place))

    def lose(self, place: int, reason: str, end: EngineEnd) -> None:
        """Fail the requests of an engine that has died, while others work, and serve its successor,
        to which `end` leads, once it has started."""
        self._models.lose(place, reason)
        if (engine := self._engines.get(place)) is not None:
            engine.fail(reason)
        if (before := self._connecting.get(place)) is not None:
            before.cancel()
        self._connecting[place] = asyncio.create_task(self._reconnect(place, end))

    async def _reconnect(self, place: int, end: EngineEnd) -> None:
        try:
            await self._connect(place, end)
        except DovetailError as error:
            logger.error("a restarted engine can't be used: %s", error)

    def drain(self, seconds: float) -> None:
        """Reject new requests; end once running ones are answered, or after a timeout."""
        self._end_by(self._drain(seconds))

    def fail(self, reason: str) -> None:
        """Fail all requests because the engine is dead or unreadable, and end."""
        self.failure = reason
        if self._app is not None:
            self._app.state.failure = reason
            for engine in self._engines.values():
                engine.fail(reason)
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        self._end_by(asyncio.sleep(FAILED_S))

    def note_supervisor(self, *, hangs: bool) -> None:
        """Make /health report whether the supervisor hangs."""
        if self._app is not None:
            self._app.state.is_unsupervised = hangs

    def _end_by(self, way: Any) -> None:
        async def end() -> None:
            await way
            if self._server is not None:
                self._server.should_exit = True

        if self._ending is None:
            self._ending = asyncio.create_task(end())
        else:
            way.close()

    async def _drain(self, seconds: float) -> None:
        app = self._app
        if app is None:
            return
        app.state.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for model in self._models:
                    await model.admission.wait_until_empty()
                for engine in self._engines.values():
                    await engine.wait_until_idle()
        for engine in self._engines.values():
            engine.end_all("the server is shutting down")

    def _config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self._app,
            http=DirectProtocol,  # used by streams
            ws="none",
            loop="none",
            access_log=False,
            log_level="warning",
            lifespan="on",
            root_path=self._settings.root_path,
            ssl_certfile=self._settings.tls_cert,
            ssl_keyfile=self._settings.tls_key,
            timeout_graceful_shutdown=LAST_ANSWERS_S,
        )


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new uvloop event loop, where available."""
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def log_to_stderr() -> None:
    """Log requests to stderr as JSON lines. The library's own handler writes other records."""
    requests = logging.getLogger("dovetail.server")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    requests.addHandler(handler)
    requests.setLevel(logging.INFO)
    requests.propagate = False  # to "dovetail", whose handler would repeat them


def main() -> int:
    """Return the exit code: 2 if the front end can't start."""
    log_to_stderr()
    allow_open_files()
    channel = channel_of_process(sys.argv[1])
    start, early = channel.first()
    settings = ServerSettings.model_validate(start["settings"])
    gone = partial(end_orphaned, start["directory"], settings.uds)

    async def serve() -> None:
        name = start["name"]
        ends = [_end_of(engine, name) for engine in start["engines"]]
        sock = socket.socket(fileno=start["socket"])

        def ready() -> None:
            gc.collect()
            # keep permanent objects out of garbage collection, which would stall streams
            gc.freeze()
            channel.send(ready=True)

        front_end = FrontEnd(ends, name, settings, sock, ready, place=start["place"])
        channel.socket.setblocking(False)
        loop, clock, turns = asyncio.get_running_loop(), ProcessWatch(), LoopWatch()
        heard = clock.now

        def obey() -> None:
            nonlocal heard
            messages = channel.receive()
            if messages is None:
                gone()
            heard = clock.now
            for message in messages or ():
                _obey(front_end, message, name)

        def turn() -> None:
            """Note that this loop runs."""
            turns.turned()
            front_end.note_supervisor(hangs=clock.turn() - heard > SUPERVISOR_SILENT_S)
            loop.call_later(BEAT_S, turn)

        for message in early:
            _obey(front_end, message, name)
        loop.add_reader(channel.socket, obey)
        turn()
        threading.Thread(
            target=_beat, args=(channel, turns), name="dovetail-heartbeat", daemon=True
        ).start()
        await front_end.run()

    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(serve())
    except DovetailError as error:
        channel.send(refused=str(error))
        return 2
    return 0


def _beat(channel: Channel, turns: LoopWatch) -> None:
    """Send heartbeats from a thread: an event loop that is busy isn't dead."""
    while True:
        channel.send(busy_s=turns.blocked_s())
        time.sleep(BEAT_S)


def _end_of(engine: Message, name: str) -> EngineEnd:
    """Return the line to an engine that the supervisor describes."""
    line = ZmqLine(engine["address"], name.encode())
    return EngineEnd(line, tuple(engine["names"]), tuple(engine["adapters"]), engine["down"])


def _obey(front_end: FrontEnd, message: Message, name: str) -> None:
    if "failed" in message:
        front_end.fail(message["failed"])
    elif "lost" in message:
        engine = message["engine"]
        front_end.lose(message["lost"], engine["down"], _end_of(engine, name))
    elif "drain_s" in message:
        front_end.drain(message["drain_s"])


if __name__ == "__main__":
    sys.exit(main())
