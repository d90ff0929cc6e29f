"""`AsyncLLMEngine`: the same engine for asyncio, running in a thread of its own. For servers."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from dovetail.api.clock import VirtualClock
from dovetail.errors import EngineDeadError, RequestError
from dovetail.front.llm_engine import LLMEngine, request_ids
from dovetail.front.prompts import Prompt, is_text
from dovetail.front.unread import Unread
from dovetail.request import RequestOutput
from dovetail.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from dovetail.config import EngineConfig
    from dovetail.front.facts import ModelConfig
    from dovetail.front.vllm_args import EngineArgs

logger = logging.getLogger("dovetail")


class _Aborted(Exception):
    """Somebody aborted the request: its iterator just ends."""


class _Reader:
    """The reader of one request's outputs, and its event loop."""

    __slots__ = ("aborted", "loop", "news", "takes_deltas", "unread")

    def __init__(self) -> None:
        self.loop, self.news = asyncio.get_running_loop(), asyncio.Event()
        self.unread = Unread()
        self.takes_deltas = False
        self.aborted = False  # while its text was tokenized

    async def next(self) -> tuple[RequestOutput | None, BaseException | None]:
        """Return what has come since the last call as one output, and the end, if it has come; wait for either. Rarely it is neither."""
        await self.news.wait()
        self.news.clear()
        return self.unread.take()


class AsyncLLMEngine:
    """The engine runs in a thread of its own; callers get outputs through queues of their own event loop. Texts are tokenized in a
    thread besides: a long one takes as long as a step or two, which others' next tokens would wait for.

    ```python
    async for output in engine.generate("a", "ROMEO:", SamplingParams(output_kind="delta")):
        print(output.outputs[0].text, end="")
    ```
    """

    def __init__(self, engine: LLMEngine) -> None:
        """`engine` is this one's from now on, and is closed with it."""
        self.engine = engine
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # for the engine's thread
        self._wake = engine.turns.wake  # set after each call
        self._tokenizer = ThreadPoolExecutor(1, "dovetail-tokenizer")  # one thread: texts stay in order
        self._tokenizing: dict[_Reader, str] = {}  # request ids; changed behind the door
        self._readers: dict[str, _Reader] = {}  # by request id
        self._to_wake: dict[asyncio.AbstractEventLoop, list[_Reader]] = {}  # since the last call of `_wake_readers`
        self._stopping = False
        self._door = threading.Lock()  # calls come in while there is no failure; none is left behind when it closes
        self._failure: BaseException | None = None
        engine.core.pacing.expects_arrivals = True
        if not isinstance(engine.core.clock, VirtualClock):  # which moves when it waits
            engine.core.pacing.wait_until = self._wait_until
        self._thread = threading.Thread(target=self._run, name="dovetail-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_config(cls, config: str | Path | Mapping[str, Any] | EngineConfig, **overrides: Any) -> AsyncLLMEngine:
        """As `LLMEngine.from_config`."""
        return cls(LLMEngine.from_config(config, **overrides))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs | EngineConfig) -> AsyncLLMEngine:
        """As `LLMEngine.from_engine_args`."""
        return cls(LLMEngine.from_engine_args(engine_args))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.engine!r})"

    @overload
    def generate(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, **fields: Any
    ) -> AsyncGenerator[RequestOutput, None]: ...

    @overload
    def generate(self, prompt: Prompt, sampling_params: SamplingParams, request_id: str, **fields: Any) -> AsyncGenerator[RequestOutput, None]: ...

    def generate(self, *args: Any, **fields: Any) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as they come: `generate(request_id, prompt, params)`, or in vLLM's order `generate(prompt, sampling_params,
        request_id)`, told apart by where the `SamplingParams` are; all can be given by keyword. Other `fields` are as for
        `LLMEngine.add_request`, which is called, and whose errors are raised, when the first output is asked for.

        Who reads more slowly than the engine computes gets what has come meanwhile as one output: of deltas all, of cumulative outputs the newest. So
        what waits for him takes as much memory as the answer.

        Closing the iterator, or cancelling the task that reads it, aborts the request. Raises `RequestError` at once for arguments whose order
        can't be told, and `EngineDeadError` when the engine fails or is closed before the request has finished.
        """
        return self._generate(*_in_our_order(args, fields))

    async def _generate(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None, fields: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        reader = _Reader()
        if is_text(prompt):
            if fields.get("arrival_time") is None:
                fields["arrival_time"] = self.engine.now()
            prompt = await self._tokenized(request_id, reader, prompt)
        done = not self._call(lambda: self._add(request_id, reader, prompt, params, fields), reader)
        try:
            while not done:
                output, end = await reader.next()
                done = end is not None or (output is not None and output.finished)
                if output is not None:
                    yield output
                if end is not None and not isinstance(end, _Aborted):
                    raise end
        finally:
            if not done:
                with suppress(EngineDeadError):  # then there is nothing to abort
                    self._call(lambda: self._drop(request_id, reader))

    async def abort(self, request_id: str | Sequence[str] | Set[str]) -> None:
        """End one request or several: their iterators stop after what has been sent. An unknown id is nobody's: nothing happens. Raises
        `RequestError` if it is neither an id nor a list, tuple or set of ids."""
        ids = request_ids(request_id)
        with self._door:
            for reader, tokenizing_id in self._tokenizing.items():
                reader.aborted |= tokenizing_id in ids
        with suppress(EngineDeadError):
            self._call(lambda: self._abort(ids))

    async def get_tokenizer(self) -> Any:
        """As `LLMEngine.get_tokenizer`."""
        return await asyncio.to_thread(self.engine.get_tokenizer)

    async def get_model_config(self) -> ModelConfig:
        """As `LLMEngine.get_model_config`."""
        return self.engine.get_model_config()

    async def do_log_stats(self) -> None:
        """As `LLMEngine.do_log_stats`."""
        await asyncio.to_thread(self.engine.do_log_stats)

    async def check_health(self) -> None:
        """Raises `EngineDeadError` if the engine takes no more work."""
        with self._door:
            if self._failure is not None:
                raise self._dead()

    def close(self) -> None:
        """Stop the thread, when the step under way is done, and release the model. Requests under way fail with `EngineDeadError`. Twice is as
        good as once."""
        self._stopping = True
        self._wake.set()
        self._thread.join()
        self._tokenizer.shutdown(wait=False)
        self.engine.close()

    async def __aenter__(self) -> AsyncLLMEngine:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await asyncio.to_thread(self.close)

    # In the caller's thread

    async def _tokenized(self, request_id: str, reader: _Reader, prompt: Prompt) -> Prompt:
        """Raises what `LLMEngine.tokenized` does, and `EngineDeadError`. Whoever aborts the request meanwhile finds it."""
        with self._door:
            if self._failure is not None:
                raise self._dead()
            self._tokenizing[reader] = request_id
            working = reader.loop.run_in_executor(self._tokenizer, self.engine.tokenized, prompt)
        try:
            return await working
        except BaseException:
            with self._door:
                del self._tokenizing[reader]
            raise

    def _call(self, function: Callable[[], None], reader: _Reader | None = None) -> bool:
        """Have it done in the engine's thread; False if it is of a reader whose request was aborted before. Raises `EngineDeadError` if the thread
        has ended."""
        with self._door:
            if reader is not None:
                self._tokenizing.pop(reader, None)
            if self._failure is not None:
                raise self._dead()
            if reader is not None and reader.aborted:
                return False
            self._calls.put(function)
        self._wake.set()
        return True

    def _dead(self) -> EngineDeadError:
        """An error of its own for each who must hear of the failure."""
        failure = self._failure
        known = isinstance(failure, EngineDeadError)
        error = EngineDeadError(str(failure) if known else f"the engine is dead and takes no more work: {failure!r}")
        error.__cause__ = failure.__cause__ if known and failure is not None else failure
        return error

    # In the engine's thread

    def _run(self) -> None:
        failure: BaseException = EngineDeadError("the engine was closed")
        try:
            while True:
                self._take_calls()
                if self._stopping:
                    break
                if self.engine.has_unfinished_requests():
                    for output in self.engine.step():
                        self._send(output)
                    self._wake_readers()
                    self.engine.core.check_alive()
                else:
                    self._wake.wait()
        except BaseException as error:
            failure = error
            if not isinstance(error, EngineDeadError):  # of which the core has told
                logger.exception("the engine's thread ended by an error")
        with self._door:
            self._failure = failure
        self._take_calls()  # the last that came in
        for reader in self._readers.values():
            self._end(reader, self._dead())
        self._readers.clear()
        self._wake_readers()

    def _take_calls(self) -> None:
        """Make the calls that are there now: whoever calls without end must not keep the engine from its steps, nor from its end."""
        self._wake.clear()  # first: who calls from here on sets it again
        for _ in range(self._calls.qsize()):
            if self._stopping and self._failure is None:
                return
            self._calls.get()()
        self._wake_readers()

    def _wait_until(self, instant: float) -> None:
        """The engine's idle wait: until `instant`, or somebody calls."""
        remaining = instant - self.engine.now()
        if remaining > 0 and self._calls.empty() and not self._stopping:
            self.engine.turns.sleep(remaining)

    def _add(self, request_id: str, reader: _Reader, prompt: Prompt, params: SamplingParams | None, fields: Mapping[str, Any]) -> None:
        if self._failure is not None:  # it came as the engine ended
            self._end(reader, self._dead())
            return
        try:
            self.engine.add_request(request_id, prompt, params, **fields)
        except BaseException as error:  # whatever it is, it is this caller's alone
            self._end(reader, error)
        else:
            reader.takes_deltas = params is not None and params.output_kind is OutputKind.DELTA
            self._readers[request_id] = reader

    def _send(self, output: RequestOutput) -> None:
        """To its reader; but who failed because the engine died hears of that, as an error."""
        reader = self._readers.get(output.request_id)
        died = self.engine.core.dead is not None and any(sample.finish_reason == "error" for sample in output.outputs)
        if reader is None or died:
            return
        if output.finished:
            del self._readers[output.request_id]
        if reader.unread.put(output, is_delta=reader.takes_deltas):
            self._to_wake.setdefault(reader.loop, []).append(reader)

    def _drop(self, request_id: str, reader: _Reader) -> None:
        """Its reader has gone; unless the id is another's by now."""
        if self._readers.get(request_id) is reader:
            del self._readers[request_id]
            self.engine.abort_request(request_id)

    def _abort(self, ids: Sequence[str]) -> None:
        self.engine.abort_request(ids)
        for request_id in ids:
            if (reader := self._readers.pop(request_id, None)) is not None:
                self._end(reader, _Aborted())

    def _end(self, reader: _Reader, end: BaseException) -> None:
        if reader.unread.end(end):
            self._to_wake.setdefault(reader.loop, []).append(reader)

    def _wake_readers(self) -> None:
        """Call each event loop once for all of its readers who were given something: a call for each would take longer than planning the step."""
        to_wake, self._to_wake = self._to_wake, {}
        for loop, readers in to_wake.items():
            with suppress(RuntimeError):  # the loop was closed: nobody listens
                loop.call_soon_threadsafe(_wake, readers)


def _wake(readers: list[_Reader]) -> None:
    for reader in readers:
        reader.news.set()


def _in_our_order(args: tuple[Any, ...], fields: dict[str, Any]) -> tuple[str, Prompt, SamplingParams | None, dict[str, Any]]:
    """Sort the arguments of `AsyncLLMEngine.generate`, given in either order, into id, prompt, params and the other fields. Raises `RequestError`."""
    if "sampling_params" in fields:
        if "params" in fields:
            raise RequestError("params and sampling_params are the same: give one of them")
        fields["params"] = fields.pop("sampling_params")
    names = [name for name in _names(args, fields) if name not in fields]
    if len(args) > len(names):
        raise RequestError(f"generate() was given {len(args)} arguments by position, and by keyword {', '.join(sorted(fields))}: {_ORDERS}")
    given = dict(zip(names, args, strict=False)) | {name: fields.pop(name) for name in ("request_id", "prompt", "params") if name in fields}
    for name in ("request_id", "prompt"):
        if name not in given:
            raise RequestError(f"generate() lacks {name}: {_ORDERS}")
    return given["request_id"], given["prompt"], given.get("params"), fields


_ORDERS = "it takes (request_id, prompt, params), or in vLLM's order (prompt, sampling_params, request_id)"


def _names(args: tuple[Any, ...], fields: Mapping[str, Any]) -> tuple[str, str, str]:
    """In which order arguments by position came: vLLM's has the parameters second, ours has them last."""
    ours, vllms = ("request_id", "prompt", "params"), ("prompt", "params", "request_id")
    if "request_id" in fields or len(args) < 2 or "prompt" in fields:
        return vllms if "request_id" in fields else ours
    if isinstance(args[1], SamplingParams):
        return vllms
    if args[1] is None or (len(args) > 2 and isinstance(args[2], str)):
        raise RequestError(f"generate() can't tell the id from the prompt: {_ORDERS}; name them, as in generate(request_id=…, prompt=…)")
    return ours
