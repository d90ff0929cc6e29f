"""`dovetail serve --in-process`: the engine in a thread of the server's process, for debugging and
tests."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import zmq

from dovetail import EngineConfig
from dovetail.errors import DovetailError, EngineDeadError, describe
from dovetail.serving import Assembly, assemble, groups_in_words, ranks_in_words
from dovetail_server.front_end import EngineEnd, FrontEnd, log_to_stderr, new_event_loop
from dovetail_server.host import EngineHost
from dovetail_server.links import ZmqLine, ZmqPost
from dovetail_server.settings import ServerSettings
from dovetail_server.sockets import allow_open_files, bind
from dovetail_server.step_watch import StepWatch

ADDRESS = "inproc://engine"


class HostThread:
    """`EngineHost` in a thread, reached through `line`."""

    def __init__(self, assembly: Assembly, failed: Callable[[str], None]) -> None:
        """`failed`: called in the thread if the engine dies, to fail the requests that wait for
        it."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._post = ZmqPost(ADDRESS, context)
        self._failed = failed
        self._closed = False
        self.line = ZmqLine(ADDRESS, b"front end", context)
        self.host = EngineHost(assembly, self._post)
        self._thread = threading.Thread(target=self._run, name="dovetail-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the engine after the current step. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.host.stop()
        self._post.wake()
        self._thread.join()
        self._post.close()

    def _run(self) -> None:
        try:
            self.host.run()
        except BaseException as error:  # all of them must be reported to waiting requests
            self._failed(str(error) if isinstance(error, EngineDeadError) else describe(error))


def serve_in_one_process(source: str, overrides: list[str], settings: ServerSettings) -> int:
    """Serve until a signal arrives; return the exit code.

    Raises `DovetailError` if it can't start or the engine dies.
    """
    if settings.front_ends != 1:
        raise DovetailError("--in-process runs one front end: --front-ends must be 1")
    log_to_stderr()
    allow_open_files()
    sockets, url = bind(settings)
    config = EngineConfig.load_with(
        source, EngineConfig.read_settings(overrides), origin="command line"
    )
    assembly = assemble(config, {})
    assembly.prepare_grammars()
    begun = (
        f"{groups_in_words(assembly.capacity)}dovetail serves {source}"
        f"{ranks_in_words(assembly.capacity)} at {url}"
    )

    async def serve() -> int:
        return await _Server(assembly, settings, sockets[0], begun).run()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(serve())


class _Server:
    """A front end with its engine, from its start in an event loop to its end."""

    def __init__(
        self, assembly: Assembly, settings: ServerSettings, socket: socket.socket, begun: str
    ) -> None:
        """`begun`: printed once requests are answered."""
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._failure: str | None = None  # the first
        self._signals: list[int] = []
        self._thread = HostThread(assembly, self._fail_soon)
        self._front_end = FrontEnd(
            [EngineEnd(self._thread.line, settings.served_model_name, settings.lora_modules)],
            "",
            settings,
            socket,
            lambda: print(begun, flush=True),
        )
        self._running = asyncio.create_task(self._front_end.run())

    async def run(self) -> int:
        """Serve until a signal arrives; return the exit code. Raises `DovetailError`."""
        watching = asyncio.create_task(self._watch())
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._take_signal, number)
        try:
            await self._running
        except asyncio.CancelledError:
            return 128 + self._signals[-1]
        finally:
            watching.cancel()
            if self._failure is None:
                self._thread.close()
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        if self._front_end.failure is not None:
            raise DovetailError(self._front_end.failure)
        return 0

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
            self._front_end.fail(reason)

    def _fail_soon(self, reason: str) -> None:
        """Called in the engine's thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._fail, reason)

    def _take_signal(self, number: int) -> None:
        self._signals.append(number)
        if len(self._signals) > 1:
            self._running.cancel()
        self._front_end.drain(self._settings.drain_timeout_s)

    async def _watch(self) -> None:
        most_s = self._settings.step_timeout_s
        steps = StepWatch(self._thread.host)
        while True:
            await asyncio.sleep(0.25)
            if steps.busy_s() > most_s:
                self._fail(f"a step took longer than {most_s:g} s (--step-timeout)")
