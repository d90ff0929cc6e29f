"""`Unread`: coalesces a request's outputs while its consumer is slow."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from dovetail.request import CompletionOutput, RequestOutput, TokenLogprobMap


class Unread:
    """Filled by the engine's thread, emptied by the consumer's. Deltas are joined, of cumulative outputs the newest is kept: memory is bounded by the
    answer's length, and a consumer that keeps up gets each output as it was put in."""

    def __init__(self, notify: Callable[[], None], joins: bool = False) -> None:
        """`notify` is called by the producer when something is there and the consumer hasn't been notified since its last `take`. `joins`: the
        outputs are deltas."""
        self.joins = joins
        self._notify = notify
        self._lock = threading.Lock()
        self._output: RequestOutput | None = None  # the newest
        self._deltas: dict[int, _Deltas] | None = None  # by sample: all that wait, `_output` included; None while that is the only one
        self._notified = False
        self._end: BaseException | None = None

    def put(self, output: RequestOutput) -> None:
        with self._lock:
            if self.joins and self._output is not None:
                if self._deltas is None:
                    self._deltas = {}
                    _append(self._deltas, self._output.outputs)
                _append(self._deltas, output.outputs)
            self._output = output
            notified, self._notified = self._notified, True
        if not notified:
            self._notify()

    def end(self, reason: BaseException) -> None:
        """Note that no more outputs come, and why."""
        with self._lock:
            self._end = reason
            notified, self._notified = self._notified, True
        if not notified:
            self._notify()

    def take(self) -> tuple[RequestOutput | None, BaseException | None]:
        """Return the output that waits, if any, and the exception that ended the request, if it has ended."""
        with self._lock:
            output, deltas, self._output, self._deltas, self._notified = self._output, self._deltas, None, None, False
            end = self._end
        if output is not None and deltas is not None:
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
        return replace(self._newest, text=self._text.getvalue(), token_ids=self._token_ids, logprobs=logprobs)


def _append(deltas: dict[int, _Deltas], outputs: Sequence[CompletionOutput]) -> None:
    for delta in outputs:
        deltas.setdefault(delta.index, _Deltas()).append(delta)
