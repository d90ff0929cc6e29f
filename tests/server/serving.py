"""Servers for tests: a real uvicorn on a free port of loopback, in a thread or in the test's own
event loop."""

from __future__ import annotations

import asyncio
import inspect
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

import dovetail_models
from dovetail.front.assembly import assemble
from dovetail.front.tokenizer import Tokenizer
from dovetail_server.app import create_app
from dovetail_server.engine import ServedEngine
from dovetail_server.one_process import HostThread
from dovetail_server.remote import RemoteEngine
from dovetail_server.settings import ServerSettings
from dovetail_server.wire import DirectProtocol

DEMO = Path(dovetail_models.__file__).parent / "demo"
PATIENCE_S = 120.0  # a hang fails the test; nothing takes as long, on a loaded machine either

_tokenizer: list[Tokenizer] = []


def demo_tokenizer() -> Tokenizer:
    if not _tokenizer:
        _tokenizer.append(Tokenizer.load(DEMO))
    return _tokenizer[0]


class _Server(uvicorn.Server):
    """Ends as soon as it is told to. uvicorn looks ten times a second whether it shall, and then
    gives its connections another tenth, whether there are any or not. Signals are left alone."""

    def __init__(self, config: uvicorn.Config) -> None:
        """For the running event loop."""
        super().__init__(config)
        self._loop = asyncio.get_running_loop()
        self._told = asyncio.Event()

    def end(self, *, at_once: bool = True) -> None:
        """Make `serve` end, from any thread. `at_once`: without an end of the app's."""
        self.should_exit, self.force_exit = True, at_once
        self._loop.call_soon_threadsafe(self._told.set)

    async def main_loop(self) -> None:
        await self.on_tick(0)  # sets headers
        await self._told.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if not self.force_exit:
            await super().shutdown(sockets)
            return
        for server in self.servers:
            server.close()
        for one in sockets or ():
            one.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=0.1)
        for server in self.servers:
            await server.wait_closed()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _server(app: Starlette, **config: Any) -> tuple[_Server, socket.socket, str]:
    listening = socket.create_server(("127.0.0.1", 0), backlog=256)
    # as `dovetail serve` has it: answers would be 40 ms late
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    options = {
        "http": DirectProtocol,
        "log_config": None,
        "access_log": False,
        "lifespan": "off",
        **config,
    }
    return (
        _Server(uvicorn.Config(app, **options)),
        listening,
        f"http://127.0.0.1:{listening.getsockname()[1]}",
    )


@asynccontextmanager
async def serving(
    engine: ServedEngine | Starlette, settings: ServerSettings | None = None, **config: Any
) -> AsyncIterator[str]:
    """Serve an engine, or an app with one, in this event loop; the URL."""
    app = (
        engine
        if isinstance(engine, Starlette)
        else create_app(engine, settings or ServerSettings())
    )
    try:
        async with serving_app(app, **config) as url:
            yield url
    finally:
        app.state.server.models.first.engine.chat.close()


@asynccontextmanager
async def serving_app(app: Starlette, **config: Any) -> AsyncIterator[str]:
    """Serve an app in this event loop; the URL."""
    server, listening, url = _server(app, **config)
    task = asyncio.create_task(server.serve([listening]))
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield url
    finally:
        server.end(at_once=config.get("lifespan") != "on")
        await task


@contextmanager
def serving_in_thread(
    make_engine: Callable[[], ServedEngine | Awaitable[ServedEngine]],
    settings: ServerSettings | None = None,
) -> Iterator[str]:
    """Serve an engine in a thread with an event loop of its own; the URL."""
    started = threading.Event()
    found: dict[str, Any] = {}

    async def main() -> None:
        made = make_engine()
        engine = await made if inspect.isawaitable(made) else made
        server, listening, url = _server(create_app(engine, settings or ServerSettings()))
        found.update(url=url, server=server)
        started.set()
        await server.serve([listening])
        if isinstance(engine, RemoteEngine):
            engine.close()
        else:
            engine.chat.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert started.wait(PATIENCE_S)
    yield found["url"]
    found["server"].end()
    thread.join(PATIENCE_S)


@contextmanager
def serving_in_threads(
    config: dict[str, Any],
    settings: ServerSettings | None = None,
    *,
    chat_template: str | None = None,
) -> Iterator[str]:
    """Serve an engine of this config, which has a thread of its own too, as
    `dovetail serve --in-process` does; the URL. `chat_template` is used instead of the model's."""
    fail: list[Callable[[str], object]] = []

    def failed(reason: str) -> None:
        for one in fail:
            one(reason)

    thread = HostThread(assemble(config, {}), failed)

    async def connect() -> ServedEngine:
        engine = await RemoteEngine.connect(thread.line, "test")
        fail.append(partial(asyncio.get_running_loop().call_soon_threadsafe, engine.fail))
        if chat_template is not None:
            engine.tokenizer.own.chat_template = chat_template
        return engine

    try:
        with serving_in_thread(connect, settings) as url:
            yield url
    finally:
        thread.close()
