"""Servers for tests: a real uvicorn on a free port of loopback, in a thread or in the test's own event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

import dovetail_models
from dovetail.front.tokenizer import Tokenizer
from dovetail_server.app import create_app
from dovetail_server.engine import ServedEngine
from dovetail_server.settings import ServerSettings
from dovetail_server.wire import DirectProtocol

DEMO = Path(dovetail_models.__file__).parent / "demo"
PATIENCE_S = 30.0  # a hang fails the test; nothing here takes nearly as long

_tokenizer: list[Tokenizer] = []


def demo_tokenizer() -> Tokenizer:
    if not _tokenizer:
        _tokenizer.append(Tokenizer.load(DEMO))
    return _tokenizer[0]


def _server(app: Starlette, **config: Any) -> tuple[uvicorn.Server, socket.socket, str]:
    listening = socket.create_server(("127.0.0.1", 0), backlog=256)
    options = {"http": DirectProtocol, "log_config": None, "access_log": False, "lifespan": "off", **config}
    return uvicorn.Server(uvicorn.Config(app, **options)), listening, f"http://127.0.0.1:{listening.getsockname()[1]}"


@asynccontextmanager
async def serving(engine: ServedEngine, settings: ServerSettings | None = None, **config: Any) -> AsyncIterator[str]:
    """Serve an engine in this event loop; the URL."""
    server, listening, url = _server(create_app(engine, settings or ServerSettings()), **config)
    task = asyncio.create_task(server._serve([listening]))
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield url
    finally:
        server.should_exit = server.force_exit = True
        await task
        engine.chat.close()


@contextmanager
def serving_in_thread(make_engine: Callable[[], ServedEngine], settings: ServerSettings | None = None) -> Iterator[str]:
    """Serve an engine in a thread with an event loop of its own; the URL."""
    started = threading.Event()
    found: dict[str, Any] = {}

    async def main() -> None:
        engine = make_engine()
        server, listening, url = _server(create_app(engine, settings or ServerSettings()))
        found.update(url=url, server=server)
        started.set()
        await server._serve([listening])
        engine.chat.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert started.wait(PATIENCE_S)
    yield found["url"]
    found["server"].should_exit = found["server"].force_exit = True
    thread.join(PATIENCE_S)
