"""`EngineThread`: drives an `LLMEngine` in a thread of its own, for callers in other threads. `LLM` and `AsyncLLMEngine` each have one."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

from dovetail.api.clock import VirtualClock
from dovetail.engine.core import EngineCore
from dovetail.errors import EngineDeadError
from dovetail.front.unread import Unread
from dovetail.request import RequestOutput

logger = logging.getLogger("dovetail")

R = TypeVar("R")


class DrivenEngine(Protocol):
    """The methods of an `LLMEngine` that its thread calls."""

    @property
    def core(self) -> EngineCore: ...

    def now(self) -> float: ...

    def compute(self) -> list[RequestOutput]: ...

    def abort_request(self, request_id: str) -> None: ...

    def returns_deltas(self, request_id: str) -> bool: ...


E = TypeVar("E", bound=DrivenEngine)


class Aborted(Exception):
    """Ends the `Unread` of a request that was aborted by another caller than its reader."""


class EngineThread(Generic[E]):
    """Runs calls in the order in which they come, between steps, and steps while anybody reads: each request's outputs go to its `Unread`.

    While idle it holds no reference to the engine, so that an engine which nobody uses any more is freed; the thread then ends. All methods but
    those under "In the engine's thread" may be called by any thread.
    """

    def __init__(self, engine: E, flush: Callable[[], None] = lambda: None) -> None:
        """`flush` is called in the thread after each round of calls and each step, when readers have been notified."""
        self._engine = weakref.ref(engine)
        self._flush = flush
        self._calls: SimpleQueue[Callable[[E], None] | None] = SimpleQueue()  # None: stop. `put` may be called by finalizers, amidst anything
        self._next: deque[Callable[[E], None] | None] = deque()  # taken from the queue already
        self._readers: dict[str, Unread] = {}  # by request id
        self._unclaimed: dict[str, Unread] = {}  # outputs of requests that have no reader, by id, for `step`
        self._after_step: list[Callable[[], None]] = []
        self._stopping = False
        self._door = threading.Lock()  # no call is queued once the thread has ended
        self._failure: BaseException | None = None
        if not isinstance(engine.core.clock, VirtualClock):  # which advances when it waits
            engine.core.plan_timing.wait_until = self._wait_until
        self._thread = threading.Thread(target=self._run, name="dovetail-engine", daemon=True)
        self._thread.start()
        weakref.finalize(engine, self._calls.put, None).atexit = False

    def submit(self, call: Callable[[E], None]) -> None:
        """Queue a call, which must not raise. Raises `EngineDeadError` if the thread has ended."""
        with self._door:
            if self._failure is not None:
                raise self.dead()
            self._calls.put(call)

    def abandon(self, call: Callable[[E], None]) -> None:
        """Queue a call if the thread still runs. For finalizers: takes no lock."""
        self._calls.put(call)

    def call(self, function: Callable[[], R]) -> R:
        """Run `function` between steps and return its result or raise its error; in this thread if the engine's thread has ended."""
        if threading.get_ident() == self._thread.ident:
            return function()
        result: Future[R] = Future()
        try:
            self.submit(lambda engine: _settle(result, function))
        except EngineDeadError:
            self._thread.join()
            return function()
        return result.result()

    def step(self) -> list[RequestOutput]:
        """Return the outputs of requests without a reader that wait here; run a step first if there are none."""
        if not self._unclaimed:
            self.call(self._step)
        with self._door:
            waiting, self._unclaimed = self._unclaimed, {}
        return [output for unread in waiting.values() if (output := unread.take()[0]) is not None]

    @property
    def has_unclaimed(self) -> bool:
        """True if outputs wait for `step`."""
        return bool(self._unclaimed)

    def check(self) -> None:
        """Raise `EngineDeadError` if the thread takes no more calls."""
        with self._door:
            if self._failure is not None:
                raise self.dead()

    def dead(self) -> EngineDeadError:
        """Return a new error that gives the reason why the thread has ended: each reader raises its own."""
        failure = self._failure
        known = isinstance(failure, EngineDeadError)
        error = EngineDeadError(str(failure) if known else f"the engine is dead and takes no more work: {failure!r}")
        error.__cause__ = failure.__cause__ if known and failure is not None else failure
        return error

    def close(self) -> None:
        """End the thread once the step under way is done. Its readers get an `EngineDeadError`. Idempotent."""
        self._stopping = True
        self._calls.put(None)
        if threading.get_ident() != self._thread.ident:
            self._thread.join()

    # In the engine's thread

    def read(self, engine: E, request_id: str, unread: Unread) -> None:
        """Deliver the outputs of a request that was just added to `unread`."""
        unread.joins = engine.returns_deltas(request_id)
        self._readers[request_id] = unread

    def after_step(self, call: Callable[[], None]) -> None:
        """Have `call` called once, after the next step."""
        self._after_step.append(call)

    def drop(self, engine: E, request_id: str, unread: Unread) -> None:
        """Abort a request that its reader has given up, unless its id is another's by now."""
        if self._readers.get(request_id) is unread:
            del self._readers[request_id]
            engine.abort_request(request_id)

    def aborted(self, request_ids: Iterable[str]) -> None:
        """End the `Unread`s of requests that somebody has aborted, and discard outputs that wait for `step`."""
        for request_id in request_ids:
            with self._door:
                self._unclaimed.pop(request_id, None)
            if (unread := self._readers.pop(request_id, None)) is not None:
                unread.end(Aborted())

    def _run(self) -> None:
        failure: BaseException = EngineDeadError("the engine was closed")
        try:
            while not self._stopping and (call := self._calls.get()) is not None:
                self._next.append(call)
                del call  # it may hold the engine
                self._work()
        except BaseException as error:
            failure = error
            if not isinstance(error, EngineDeadError):  # the core has logged that
                logger.exception("the engine's thread ended by an error")
        with self._door:
            self._failure = failure
        self._take_calls()  # the last ones
        for unread in self._readers.values():
            unread.end(self.dead())
        self._readers.clear()
        self._flush()

    def _work(self) -> None:
        """Take calls and step until there is nothing to do. Raises `EngineDeadError` if the engine has failed."""
        self._take_calls()
        while (self._readers or self._next) and not self._stopping:
            if self._readers and (engine := self._engine()) is not None:
                engine.core.check_alive()
                self._step()
            self._take_calls()

    def _take_calls(self) -> None:
        """Run the calls that are queued now, but no later ones: a caller that never stops must not keep the engine from its steps."""
        engine = self._engine()
        for _ in range(len(self._next) + self._calls.qsize()):
            if self._stopping and self._failure is None:
                break
            call = self._next.popleft() if self._next else self._calls.get()
            if call is not None and engine is not None:
                call(engine)
        self._flush()

    def _step(self) -> None:
        engine = self._engine()
        assert engine is not None  # a reader's call, or the caller of `step`, holds it
        for output in engine.compute():
            self._send(engine, output)
        while self._after_step:
            self._after_step.pop()()
        self._flush()

    def _send(self, engine: E, output: RequestOutput) -> None:
        """Give an output to its reader; but readers of requests that failed with the engine get the reason, as an error, when the thread ends."""
        unread = self._readers.get(output.request_id)
        if unread is None:
            with self._door:
                unread = self._unclaimed.setdefault(output.request_id, Unread(lambda: None, engine.returns_deltas(output.request_id)))
                unread.put(output)
            return
        if engine.core.dead is not None and any(sample.finish_reason == "error" for sample in output.outputs):
            return
        if output.finished:
            del self._readers[output.request_id]
        unread.put(output)

    def _wait_until(self, instant: float) -> None:
        """Wait until `instant` on the engine's clock or until a call comes: the core's wait while it is idle."""
        engine = self._engine()
        remaining = 0.0 if engine is None else instant - engine.now()
        if remaining > 0 and not self._next and not self._stopping:
            with suppress(Empty):
                self._next.append(self._calls.get(timeout=min(remaining, threading.TIMEOUT_MAX)))


def _settle(result: Future[R], function: Callable[[], R]) -> None:
    try:
        result.set_result(function())
    except BaseException as error:  # whatever it is, it is the caller's
        result.set_exception(error)
