"""Engines behind either kind of line, and listeners that collect what they hear."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from dovetail.errors import DovetailError, EngineDeadError
from dovetail.front.assembly import Assembly, assemble
from dovetail.request.outputs import CompletionOutput, RequestOutput
from dovetail_server.host import EngineHost
from dovetail_server.links import ZmqLine, ZmqPost
from dovetail_server.one_process import HostThread
from dovetail_server.remote import RemoteEngine
from tests.small_model import small_demo

Link = Literal["thread", "zmq"]
PATIENCE_S = 60
DEMO: dict[str, Any] = {"model": small_demo(), "max_num_seqs": 16}


class Collector:
    """A listener that keeps everything."""

    def __init__(self, *, is_plain: bool = False) -> None:
        self.is_plain = is_plain
        self.outputs: list[RequestOutput] = []
        self.texts: list[str] = []  # told by `on_text`
        self.error: DovetailError | None = None
        self.begun, self.over = asyncio.Event(), asyncio.Event()

    def on_output(self, output: RequestOutput) -> None:
        self.outputs.append(output)
        self.begun.set()
        if output.finished:
            self.over.set()

    def on_text(self, text: str, tokens: int) -> None:
        self.texts.append(text)
        self.outputs.append(
            RequestOutput("", None, (), [CompletionOutput(0, text, [])], finished=False)
        )

    def on_error(self, error: DovetailError) -> None:
        self.error = error
        self.over.set()

    def samples(self) -> list[CompletionOutput]:
        """The deltas, put together."""
        whole: dict[int, CompletionOutput] = {}
        for output in self.outputs:
            for new in output.outputs:
                old = whole.setdefault(new.index, CompletionOutput(new.index, "", [], None, None))
                old.text += new.text
                old.token_ids = [*old.token_ids, *new.token_ids]
                old.cumulative_logprob, old.finish_reason, old.stop_reason = (
                    new.cumulative_logprob,
                    new.finish_reason,
                    new.stop_reason,
                )
                if new.logprobs is not None:
                    old.logprobs = [*(old.logprobs or []), *new.logprobs]
        return [whole[index] for index in sorted(whole)]


class Served:
    """An engine and its host, in a thread of the test's own process."""

    def __init__(
        self, engine: RemoteEngine, host: EngineHost, assembly: Assembly, post: ZmqPost | None
    ) -> None:
        self.engine, self.host, self.core, self.post = engine, host, assembly.core, post

    async def until(self, what: Any) -> None:
        """Wait until `what()` is true."""
        async with asyncio.timeout(PATIENCE_S):
            while not what():
                await asyncio.sleep(0.01)

    async def until_all_is_free(self) -> None:
        await self.until(lambda: not self.core.has_unfinished() and self.core.kv.counts.held == 0)


@asynccontextmanager
async def served(link: Link, directory: Path, **settings: Any) -> AsyncIterator[Served]:
    assembly = assemble({**DEMO, **settings}, {})
    engine: RemoteEngine | None = None
    loop = asyncio.get_running_loop()

    def fail(reason: str) -> None:
        loop.call_soon_threadsafe(lambda: engine.fail(reason) if engine else None)

    if link == "thread":
        thread = HostThread(assembly, fail)
        host, line, close, post = thread.host, thread.line, thread.close, None
    else:
        address = f"ipc://{directory}/engine"
        post = ZmqPost(address)
        host, line = EngineHost(assembly, post), ZmqLine(address, b"front end")

        def run() -> None:
            try:
                host.run()
            except EngineDeadError as error:
                fail(str(error))

        runner = threading.Thread(target=run, daemon=True)
        runner.start()

        def close() -> None:
            host.stop()
            post.wake()
            runner.join()
            post.close()

    engine = await RemoteEngine.connect(line, "test")
    try:
        yield Served(engine, host, assembly, post)
    finally:
        engine.close()
        await asyncio.to_thread(close)
