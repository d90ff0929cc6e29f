"""`Unread`: what of one request waits for its reader, as one output, however long he takes. `AsyncLLMEngine` has one for each."""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from dataclasses import replace

from dovetail.request import CompletionOutput, RequestOutput, TokenLogprobMap


class Unread:
    """Filled by the engine's thread, emptied by its reader's. Of cumulative outputs the newest is kept, deltas become one: both take as much memory
    as the answer, and a reader who is in time gets each as it was put in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._output: RequestOutput | None = None  # the newest
        self._deltas: dict[int, _Deltas] | None = None  # by sample: of all that wait, `_output` among them; None while it is one
        self._told = False  # the reader was told, and hasn't taken anything since
        self._end: BaseException | None = None

    def put(self, output: RequestOutput, *, is_delta: bool) -> bool:
        """Add an output. Returns True if the reader must be told that one is there."""
        with self._lock:
            if is_delta and self._output is not None:
                if self._deltas is None:
                    self._deltas = {}
                    _append(self._deltas, self._output.outputs)
                _append(self._deltas, output.outputs)
            self._output = output
            return self._tell()

    def end(self, end: BaseException) -> bool:
        """Note that no more outputs come, and why. Returns the same as `put`."""
        with self._lock:
            self._end = end
            return self._tell()

    def take(self) -> tuple[RequestOutput | None, BaseException | None]:
        """Take the output that waits, if any, and the exception that ended the request, if it has ended."""
        with self._lock:
            output, deltas, self._output, self._deltas, self._told = self._output, self._deltas, None, None, False
            end = self._end
        if output is not None and deltas is not None:
            output = replace(output, outputs=[deltas[index].joined() for index in sorted(deltas)])
        return output, end

    def _tell(self) -> bool:
        told, self._told = self._told, True
        return not told


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
