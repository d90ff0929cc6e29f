"""`DrafterThread`: calls a drafter in a thread of its own, so that nothing it does fails a step or
delays one for long."""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any

from dovetail.api.drafter import Drafter
from dovetail.request import Request

logger = logging.getLogger("dovetail")

PAUSE = 4  # calls that are left out after one that took too long; each further one doubles it
# calls of `on_finished` that may wait for a drafter, each with a request; if none returns then, it
# is given up
MOST_WAITING = 4096


class DrafterThread:
    """A drafter's calls, one at a time and in order.

    A call that raises, returns what it must not, or takes too long yields no drafts; the log names
    the drafter the first time. One that hasn't returned is left alone; if too many others wait for
    it, the drafter isn't called any more.
    """

    def __init__(self, drafter: Drafter, name: str, vocab_size: int, timeout_s: float) -> None:
        self._drafter = drafter
        self._name = name
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._late: Future[Any] | None = None  # the call that took too long
        self._pause = PAUSE
        self._left_out = 0
        self._room = threading.Semaphore(MOST_WAITING)
        self._has_failed = self._is_given_up = False

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[array[int]]:
        """Return the drafter's proposals for `requests`; none for all of them if it fails."""
        none = [array("q")] * len(requests)
        if self._is_given_up:
            return none
        if self._late is not None:
            if not self._late.done():
                return none
            self._late = None
            self._left_out = self._pause
            self._pause = 2 * self._pause
        if self._left_out:
            self._left_out -= 1
            return none
        # tuples: a drafter can't change what its drafts are checked against
        call = self._call(lambda: self._propose(tuple(requests), tuple(most)))
        try:
            error = call.exception(self._timeout_s)
        except TimeoutError:
            self._late = call
            self._failed(f"took longer than {self._timeout_s:g} s in propose()")
            return none
        if error is not None:
            self._failed(f"failed in propose(): {type(error).__name__}: {error}")
            return none
        drafts: list[array[int]] = call.result()
        return drafts

    def finished(self, request: Request) -> None:
        """Call `on_finished` after the calls before it, without waiting for them unless very many
        are left."""
        if self._is_given_up or type(self._drafter).on_finished is Drafter.on_finished:
            return
        if self._room.acquire(timeout=self._timeout_s):
            self._call(lambda: self._drafter.on_finished(request)).add_done_callback(
                self._on_finished_returned
            )
        else:
            self._give_up()

    def stop(self) -> None:
        """End the thread once the calls so far have returned; wait for that, unless one hangs."""
        thread = self._thread
        self._thread = None
        if thread is not None:
            self._calls.put(None)
            if self._late is None or self._late.done():
                thread.join(self._timeout_s)

    def _propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[array[int]]:
        # iterators are fine, endless ones too
        answer = islice(self._drafter.propose(requests, most), len(requests) + 1)
        proposed = [array("q", islice(tokens, max(most) + 1)) for tokens in answer]
        if len(proposed) != len(requests):
            count = len(proposed) if len(proposed) < len(requests) else "too many"
            raise ValueError(f"{count} lists of drafts for {len(requests)} requests")
        for tokens, limit in zip(proposed, most, strict=True):
            if len(tokens) > limit:
                raise ValueError(f"more drafts for a request than the {limit} that it may have")
            if tokens and (min(tokens) < 0 or max(tokens) >= self._vocab_size):
                raise ValueError(f"drafts outside of the vocabulary of {self._vocab_size} ids")
        return proposed

    def _call(self, function: Callable[[], Any]) -> Future[Any]:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(self._calls,), name="dovetail-drafter", daemon=True
            )
            self._thread.start()
        call: Future[Any] = Future()
        self._calls.put((function, call))
        return call

    @staticmethod
    def _run(calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
        while (item := calls.get()) is not None:
            function, call = item
            try:
                call.set_result(function())
            except BaseException as error:  # SystemExit too: the thread goes on
                call.set_exception(error)
            del item, function, call  # don't keep a request while idle

    def _give_up(self) -> None:
        """Drop the calls that wait, and make no more."""
        self._is_given_up = True
        try:
            while True:
                self._calls.get_nowait()
        except Empty:
            self._calls.put(None)
        logger.error(
            "drafter %s hasn't returned from a call for %d requests that have ended since: it "
            "isn't called any more",
            self._name,
            MOST_WAITING,
        )

    def _on_finished_returned(self, call: Future[Any]) -> None:
        self._room.release()
        if (error := call.exception()) is not None:
            self._failed(f"failed in on_finished(): {type(error).__name__}: {error}")

    def _failed(self, what: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.error(
                "drafter %s %s: steps go on without its drafts (logged once)", self._name, what
            )
