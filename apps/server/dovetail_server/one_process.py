"""`dovetail serve --in-process`: the engine in a thread of the server's process, for debugging and tests."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

import zmq

from dovetail.config.engine import EngineConfig
from dovetail.errors import DovetailError, EngineDeadError, describe
from dovetail.front.assembly import Assembly, assemble
from dovetail.front.engine_info import groups_in_words, ranks_in_words
from dovetail_server.front_end import FrontEnd, log_to_stderr, new_event_loop
from dovetail_server.host import EngineHost, StepWatch
from dovetail_server.links import ZmqLine, ZmqPost
from dovetail_server.settings import ServerSettings
from dovetail_server.sockets import allow_open_files, bind

ADDRESS = "inproc://engine"


class HostThread:
    """`EngineHost` in a thread, reached through `line`."""

    def __init__(self, assembly: Assembly, failed: Callable[[str], None]) -> None:
        """`failed`: called in the thread if the engine dies, to fail the requests that wait for it."""
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
    """Serve until a signal arrives; return the exit code. Raises `DovetailError` if it can't start or the engine dies."""
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

    async def serve() -> int:
        loop = asyncio.get_running_loop()
        failures: list[str] = []
        signals: list[int] = []

        def fail(reason: str) -> None:
            if not failures:
                failures.append(reason)
                front_end.fail(reason)

        def take_signal(number: int) -> None:
            signals.append(number)
            if len(signals) > 1:
                running.cancel()
            front_end.drain(settings.drain_timeout_s)

        async def watch() -> None:
            steps = StepWatch(thread.host)
            while True:
                await asyncio.sleep(0.25)
                if steps.busy_s() > settings.step_timeout_s:
                    fail(f"a step took longer than {settings.step_timeout_s:g} s (--step-timeout)")

        def fail_soon(reason: str) -> None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(fail, reason)

        thread = HostThread(assembly, fail_soon)
        begun = f"{groups_in_words(assembly.capacity)}dovetail serves {source}{ranks_in_words(assembly.capacity)} at {url}"
        front_end = FrontEnd(
            thread.line, "", settings, sockets[0], lambda: print(begun, flush=True)
        )
        watching = asyncio.create_task(watch())
        running = asyncio.create_task(front_end.run())
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, take_signal, number)
        try:
            await running
        except asyncio.CancelledError:
            return 128 + signals[-1]
        finally:
            watching.cancel()
            if not failures:
                thread.close()
        if failures:
            raise EngineDeadError(failures[0])
        if front_end.failure is not None:
            raise DovetailError(front_end.failure)
        return 0

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(serve())
