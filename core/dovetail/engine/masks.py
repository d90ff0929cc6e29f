"""`MaskFiller`: the masks of a late step, filled by its requests' grammars in a thread, while the core delivers results and plans the next step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import TYPE_CHECKING

import numpy as np

from dovetail.api.executor import Masks
from dovetail.engine.live_request import LiveRequest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dovetail.api.grammar import GrammarBackend, Matcher

    UInt32 = NDArray[np.uint32]

FEW = 4  # masks that are filled at once: handing them to a thread would take longer
LIKELY = 64  # words in which nearly every mask has a token: only the others are looked through


class MaskFiller:
    """Fills the masks of one step at a time: `begin`, then `finish`."""

    def __init__(self, vocab_size: int) -> None:
        self._width = -(-vocab_size // 32)
        self._thread: ThreadPoolExecutor | None = None  # once there was something to fill
        self._requests: list[LiveRequest] = []
        self._indices: list[int] = []  # theirs, in the step
        self._words: UInt32 = np.zeros((0, 0), np.uint32)
        self._filled: Future[dict[int, str]] | None = None  # line -> why its matcher failed

    def begin(self, requests: Sequence[LiveRequest], indices: Sequence[int], memory: Callable[[int, int], UInt32]) -> None:
        """Begin with the masks of a step's `requests` at these indices: those that have constraints whose grammar has begun. `memory` gives out
        room for so many masks of so many words."""
        self._requests, self._indices = [], []
        matchers: list[Matcher] = []
        backend: GrammarBackend | None = None
        for index in indices:
            constraint = requests[index].constraint
            if constraint is not None and (matcher := constraint.matcher) is not None:
                self._requests.append(requests[index])
                self._indices.append(index)
                matchers.append(matcher)
                backend = constraint.backend
        self._words = memory(len(matchers), self._width)
        if backend is None:
            self._filled = None
        elif len(matchers) <= FEW:
            self._filled = Future()
            self._filled.set_result(_fill(backend, matchers, self._words))
        else:
            self._thread = self._thread or ThreadPoolExecutor(1, "dovetail-masks")
            begun = Event()
            self._filled = self._thread.submit(_fill, backend, matchers, self._words, begun)
            begun.wait()  # else the thread might wait for Python's lock for as long as all masks take

    def finish(self) -> tuple[Masks, dict[LiveRequest, str]]:
        """Wait for the masks. Return them, and why some requests can't go on: a matcher that fails, or that allows nothing, ends its own request
        alone."""
        failed = {} if self._filled is None else self._filled.result()
        words, requests, indices = self._words, self._requests, self._indices
        unlikely = np.flatnonzero(~words[:, :LIKELY].any(axis=1))
        for line in unlikely[~words[unlikely].any(axis=1)].tolist():
            failed.setdefault(line, "its grammar allows no token that the model has: nothing can come next")
        if failed:
            good = [line for line in range(len(indices)) if line not in failed]
            indices, words = [indices[line] for line in good], words[good]
        return Masks(np.array(indices, np.int32), words), {requests[line]: why for line, why in failed.items()}

    def stop(self) -> None:
        """End the thread, if there is one."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _fill(backend: GrammarBackend, matchers: Sequence[Matcher], words: UInt32, begun: Event | None = None) -> dict[int, str]:
    """Fill a mask for each matcher. Return, by line, why one failed."""
    if begun is not None:
        begun.set()
    try:
        backend.fill_many(matchers, words)
    except Exception:  # find out whose it is
        failed = {}
        for line, matcher in enumerate(matchers):
            try:
                matcher.fill(words[line])
            except Exception as error:
                failed[line] = f"its grammar failed: {type(error).__name__}: {error}"
        return failed
    return {}
