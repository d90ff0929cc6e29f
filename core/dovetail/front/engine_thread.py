"""`EngineThread`: drives an `LLMEngine` in a thread of its own, for callers in other threads. `LLM`
and `AsyncLLMEngine` each have one.

`Unread` coalesces a request's outputs while its consumer is slow.
"""

from __future__ import annotations

import io
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from dovetail.end_reason import EndReason
from dovetail.engine.core import EngineCore
from dovetail.errors import EngineDeadError
from dovetail.front.outputs import EngineOutput
from dovetail.request.outputs import CompletionOutput, RequestOutput, TokenLogprobMap
from dovetail.request.pooling import PoolingRequestOutput

logger = logging.getLogger("dovetail")

R = TypeVar("R")
Call = Callable[[], object]


class DrivenEngine(Protocol):
    """The part of an `LLMEngine` that its thread uses."""

    @property
    def core(self) -> EngineCore: ...

    def compute(self) -> list[EngineOutput]: ...

    def abort_request(self, request_id: str) -> None: ...

    def returns_deltas(self, request_id: str) -> bool: ...


class Aborted(Exception):
    """Ends the `Unread` of a request that was aborted by another caller than its reader."""


class EngineThread:
    """Runs calls first come, first served, between steps, and steps while any request has a reader:
    its outputs go to an `Unread`.

    While idle it holds no reference to the engine, so that an unused engine is freed; the thread
    then ends. All methods but those under "In the engine's thread" may be called by any thread.
    """

    def __init__(self, engine: DrivenEngine, flush: Call) -> None:
        """`flush` is called in the thread after each round of calls and each step, when readers
        have been notified."""
        self._engine = weakref.ref(engine)
        self._flush = flush
        # None: end. `put` is reentrant: finalizers may call it at any point
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._next: deque[Call | None] = deque()  # taken from the queue already
        self._readers: dict[str, Unread] = {}  # by request id
        # by id: outputs for `step`, of requests that have no reader
        self._unclaimed: dict[str, Unread] = {}
        self._door = threading.Lock()  # no call is queued once the thread has ended
        self._failure: EngineDeadError | None = None
        self._thread = threading.Thread(target=self._run, name="dovetail-engine", daemon=True)
        self._thread.start()
        weakref.finalize(engine, self._calls.put, None).atexit = False

    def submit(self, call: Call) -> None:
        """Queue a call, which must not raise; one made by a call runs after the next step. Raises
        `EngineDeadError` if the thread has ended."""
        with self._door:
            self.check()
            self._calls.put(call)

    def call(self, function: Callable[[], R]) -> R:
        """Run `function` between steps and return its result or raise its error; in this thread if
        the engine's thread has ended."""
        if threading.get_ident() == self._thread.ident:
            return function()
        result: Future[R] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except BaseException as error:  # whatever it is, it is the caller's
                result.set_exception(error)

        try:
            self.submit(run)
        except EngineDeadError:
            self._thread.join()
            return function()
        return result.result()

    def step(self) -> list[EngineOutput]:
        """Return the waiting outputs of requests without a reader; run a step first if there are
        none."""
        if not (outputs := self._take_unclaimed()):
            self.call(self._step)
            outputs = self._take_unclaimed()
        return outputs

    @property
    def has_unclaimed(self) -> bool:
        """True if outputs wait for `step`."""
        return bool(self._unclaimed)

    def abandon(self, request_ids: Sequence[str], unreads: Mapping[int, Unread]) -> None:
        """Abort requests for their reader: the `Unread`s of some of `request_ids`, by their place.

        A call that is queued already may fill the list. For finalizers, too: takes no lock and
        waits for nothing.
        """
        self._calls.put(partial(self._drop, request_ids, unreads))

    def check(self) -> None:
        """Raise `EngineDeadError` with the reason if the thread has ended."""
        if self._failure is not None:
            raise _copy(self._failure)

    def close(self) -> None:
        """End the thread once the step under way is done. Its readers get an `EngineDeadError`.
        Idempotent."""
        self._calls.put(None)
        if threading.get_ident() != self._thread.ident:
            self._thread.join()

    # In the engine's thread

    def read(self, request_id: str, unread: Unread) -> None:
        """Deliver the outputs of a request that was just added to `unread`."""
        self._readers[request_id] = unread

    def aborted(self, request_ids: Iterable[str]) -> None:
        """End the `Unread`s of aborted requests, and discard outputs that wait for `step`."""
        for request_id in request_ids:
            with self._door:
                self._unclaimed.pop(request_id, None)
            if (unread := self._readers.pop(request_id, None)) is not None:
                unread.end(Aborted())

    def wait(self, seconds: float) -> None:
        """Wait at most so long for a call."""
        if not self._next:
            with suppress(Empty):
                self._next.append(self._calls.get(timeout=seconds))

    def _run(self) -> None:
        failure = EngineDeadError("the engine was closed")
        try:
            while self._take_calls(wait=not self._readers and not self._idle()):
                if self._readers:
                    self._step()
        except EngineDeadError as error:  # the core has logged it
            failure = error
        except BaseException as error:
            logger.exception("the engine's thread ended by an error")
            failure = EngineDeadError(f"the engine is dead and takes no more work: {error!r}")
            failure.__cause__ = error
        with self._door:
            self._failure = failure
        self._take_calls(wait=False)  # the last ones
        for unread in self._readers.values():
            unread.end(_copy(failure))
        self._readers.clear()
        self._flush()

    def _take_calls(self, wait: bool) -> bool:
        """Run the calls that are queued now, but no later ones: a caller that never stops must not
        keep the engine from its steps. `wait`: wait for one. Returns False if the thread should
        end."""
        if wait and not self._next:
            self._next.append(self._calls.get())
        goes_on = True
        for _ in range(len(self._next) + self._calls.qsize()):
            call = self._next.popleft() if self._next else self._calls.get()
            if call is None:
                goes_on = False
            else:
                call()
        self._flush()
        return goes_on

    def _step(self) -> None:
        engine = self._engine()
        assert engine is not None  # a reader's call, or the caller of `step`, holds it
        for output in engine.compute():
            if (unread := self._readers.get(output.request_id)) is None:
                with self._door:
                    self._unclaimed.setdefault(
                        output.request_id,
                        Unread(lambda: None, engine.returns_deltas(output.request_id)),
                    ).put(output)
            elif not _died(output):  # else its reader gets the reason as an error
                if output.finished:
                    del self._readers[output.request_id]
                unread.put(output)
        self._flush()

    def _idle(self) -> bool:
        """Do a piece of what the engine has left for later. Returns True if more is left.

        The executor's start isn't finished: other threads of a program may use the device.
        """
        engine = self._engine()
        return engine is not None and engine.core.idle()

    def _take_unclaimed(self) -> list[EngineOutput]:
        with self._door:
            waiting = self._unclaimed
            self._unclaimed = {}
        return [output for unread in waiting.values() if (output := unread.take()[0]) is not None]

    def _drop(self, request_ids: Sequence[str], unreads: Mapping[int, Unread]) -> None:
        """Abort requests, but for those whose id is another's by now, or that were never added."""
        engine = self._engine()
        if engine is None:
            return
        added = {place: unread for place, unread in unreads.items() if place < len(request_ids)}
        for place, unread in added.items():
            if self._readers.get(request_ids[place]) is unread:
                del self._readers[request_ids[place]]
                engine.abort_request(request_ids[place])


def _died(output: EngineOutput) -> bool:
    """Return True if the engine's death ended the request."""
    ends = [output] if isinstance(output, PoolingRequestOutput) else output.outputs
    return any(end.end_reason is EndReason.ENGINE_DEAD for end in ends)


def _copy(error: EngineDeadError) -> EngineDeadError:
    """Return an error of the same reason, for one more caller to raise."""
    copy = EngineDeadError(str(error))
    copy.__cause__ = error.__cause__
    return copy


class Unread:
    """Filled by the engine's thread, emptied by the consumer's. Deltas are joined, of cumulative
    outputs the newest is kept: memory is bounded by the answer's length, and a consumer that keeps
    up gets each output as it was put in."""

    def __init__(self, notify: Callable[[], None], joins: bool = False) -> None:
        """`notify` is called by the producer when something is there and the consumer hasn't been
        notified since its last `take`. `joins`: the outputs are deltas."""
        self.joins = joins
        self._notify = notify
        self._lock = threading.Lock()
        self._output: EngineOutput | None = None  # the newest
        # by sample: all that wait, `_output` included; None while that is the only one
        self._deltas: dict[int, _Deltas] | None = None
        self._notified = False
        self._end: BaseException | None = None

    def put(self, output: EngineOutput) -> None:
        with self._lock:
            if (
                self.joins
                and isinstance(output, RequestOutput)
                and isinstance(self._output, RequestOutput)
            ):
                if self._deltas is None:
                    self._deltas = {}
                    _append(self._deltas, self._output.outputs)
                _append(self._deltas, output.outputs)
            self._output = output
            notified = self._notified
            self._notified = True
        if not notified:
            self._notify()

    def end(self, reason: BaseException) -> None:
        """Note that no more outputs come, and why."""
        with self._lock:
            self._end = reason
            notified = self._notified
            self._notified = True
        if not notified:
            self._notify()

    def take(self) -> tuple[EngineOutput | None, BaseException | None]:
        """Return the output that waits, if any, and the exception that ended the request, if it has
        ended."""
        with self._lock:
            output = self._output
            deltas = self._deltas
            self._output = None
            self._deltas = None
            self._notified = False
            end = self._end
        if isinstance(output, RequestOutput) and deltas is not None:
            output = replace(output, outputs=[deltas[index].joined() for index in sorted(deltas)])
        return output, end


class _Deltas:
    """Deltas of one sample. Each is added in O(1) tokens."""

    def __init__(self) -> None:
        self._text = io.StringIO()
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobMap] = []
        self._newest: CompletionOutput

    def append(self, delta: CompletionOutput) -> None:
        self._text.write(delta.text)
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs or ()
        self._newest = delta

    def joined(self) -> CompletionOutput:
        logprobs = None if self._newest.logprobs is None else self._logprobs
        return replace(
            self._newest, text=self._text.getvalue(), token_ids=self._token_ids, logprobs=logprobs
        )


def _append(deltas: dict[int, _Deltas], outputs: Sequence[CompletionOutput]) -> None:
    for delta in outputs:
        deltas.setdefault(delta.index, _Deltas()).append(delta)
