"""`AsyncLLMEngine`: the same engine for asyncio, running in a thread of its own. For servers."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.engine.llm_engine import LLMEngine, Prompt
from dovetail.errors import DovetailError, EngineDeadError
from dovetail.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from dovetail.config import EngineConfig

Item = RequestOutput | BaseException


class AsyncLLMEngine:
    """Everything that touches the engine happens in its thread; callers get outputs through queues of their own event loop.

    async for output in engine.generate("a", "ROMEO:", SamplingParams(output_kind="delta")):
        print(output.outputs[0].text, end="")
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._streams: dict[str, Callable[[Item], None]] = {}
        self._stopping = False
        self._failure: BaseException | None = None
        engine.core.expects_arrivals = True
        engine.core.wait_until = self._wait_until
        self._thread = threading.Thread(target=self._run, name="dovetail-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_config(cls, config: str | Path | Mapping[str, Any] | EngineConfig, **overrides: Any) -> AsyncLLMEngine:
        """As `LLMEngine.from_config`."""
        return cls(LLMEngine.from_config(config, **overrides))

    async def generate(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, **fields: Any) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they come; `fields` as for `LLMEngine.add_request`. Closing the iterator, or cancelling the task, aborts
        the request. Raises `RequestError`, or `EngineDeadError` when the engine fails."""
        loop, outputs = asyncio.get_running_loop(), asyncio.Queue[Item]()

        def send(item: Item) -> None:
            loop.call_soon_threadsafe(outputs.put_nowait, item)

        self._call(lambda: self._add(request_id, send, prompt, params, fields))
        done = False
        try:
            while not done:
                item = await outputs.get()
                if isinstance(item, BaseException):
                    done = True
                    raise item
                done = item.finished
                yield item
        finally:
            if not done:
                self._call(lambda: self._drop(request_id, send))

    async def abort(self, request_id: str) -> None:
        """End a request: its iterator stops after what has been sent."""
        self._call(lambda: self._abort(request_id))

    def close(self) -> None:
        """Stop the thread and release the model. Requests under way fail with `EngineDeadError`."""
        self._stopping = True
        self._wake.set()
        self._thread.join()
        self.engine.close()

    # In the caller's thread

    def _call(self, function: Callable[[], None]) -> None:
        if self._stopping or self._failure is not None:
            raise EngineDeadError("the engine was closed" if self._failure is None else f"the engine is dead: {self._failure}")
        self._calls.put(function)
        self._wake.set()

    # In the engine's thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_calls()
                if self.engine.has_unfinished_requests():
                    for output in self.engine.step():
                        self._send(output)
                else:
                    self._wake.wait()
                    self._wake.clear()
            failure: BaseException = EngineDeadError("the engine was closed")
        except BaseException as error:
            failure = error
        self._failure = failure
        for send in self._streams.values():
            send(failure)
        self._streams.clear()

    def _take_calls(self) -> None:
        self._wake.clear()
        while not self._calls.empty():
            self._calls.get()()

    def _wait_until(self, instant: float) -> None:
        """The engine's idle wait: until `instant`, or somebody calls."""
        remaining = instant - self.engine.now()
        if remaining > 0 and self._calls.empty():
            self._wake.wait(remaining)

    def _add(self, request_id: str, send: Callable[[Item], None], prompt: Prompt, params: SamplingParams | None, fields: Mapping[str, Any]) -> None:
        try:
            self.engine.add_request(request_id, prompt, params, **fields)
        except (DovetailError, TypeError) as error:
            send(error)
        else:
            self._streams[request_id] = send

    def _send(self, output: RequestOutput) -> None:
        send = self._streams.get(output.request_id)
        if send is None:
            return
        if output.finished:
            del self._streams[output.request_id]
        send(output)

    def _drop(self, request_id: str, send: Callable[[Item], None]) -> None:
        """Its reader has gone; unless the id is another's by now."""
        if self._streams.get(request_id) is send:
            del self._streams[request_id]
            self.engine.abort_request(request_id)

    def _abort(self, request_id: str) -> None:
        send = self._streams.pop(request_id, None)
        self.engine.abort_request(request_id)
        if send is not None:
            send(asyncio.CancelledError(f"request {request_id} was aborted"))
