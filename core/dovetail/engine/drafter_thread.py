"""`DrafterThread`: calls a drafter in a thread of its own, so that nothing it does fails a step or
delays one for long."""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Callable, Sequence
from itertools import islice
from queue import Empty, SimpleQueue
from typing import TypeAlias

from dovetail.api.drafter import Drafter
from dovetail.errors import describe
from dovetail.request import Request

logger = logging.getLogger("dovetail")

PAUSE = 4  # calls that are left out after one that took too long; each further one doubles it
# calls of `on_finished` that may wait for a drafter, each with a request; if none returns then, it
# is given up
MOST_WAITING = 4096

_Answer: TypeAlias = "list[array[int]] | BaseException"


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
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._late: SimpleQueue[_Answer] | None = None  # the answer that took too long
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
            if self._late.empty():
                return none
            self._late = None
            self._left_out = self._pause
            self._pause = 2 * self._pause
        if self._left_out:
            self._left_out -= 1
            return none
        # A queue rather than a `Future`, which takes twice as long: the device waits meanwhile.
        answer: SimpleQueue[_Answer] = SimpleQueue()
        # tuples: a drafter can't change what its drafts are checked against
        asked = tuple(requests), tuple(most)
        self._call(lambda: answer.put(self._answer(*asked)))
        try:
            drafts = answer.get(timeout=self._timeout_s)
        except Empty:
            self._late = answer
            self._failed(f"took longer than {self._timeout_s:g} s in propose()")
            return none
        if isinstance(drafts, BaseException):
            self._failed(f"failed in propose(): {describe(drafts)}")
            return none
        return drafts

    def finished(self, request: Request) -> None:
        """Call `on_finished` after the calls before it, without waiting for them unless very many
        are left."""
        if self._is_given_up or type(self._drafter).on_finished is Drafter.on_finished:
            return
        if self._room.acquire(timeout=self._timeout_s):
            self._call(lambda: self._finished(request))
        else:
            self._give_up()

    def stop(self) -> None:
        """End the thread once the calls so far have returned; wait for that, unless one hangs."""
        thread = self._thread
        self._thread = None
        if thread is not None:
            self._calls.put(None)
            if self._late is None or not self._late.empty():
                thread.join(self._timeout_s)

    # In the thread

    def _answer(self, requests: Sequence[Request], most: Sequence[int]) -> _Answer:
        try:
            return self._propose(requests, most)
        except BaseException as error:  # SystemExit too: the thread goes on
            return error.with_traceback(None)  # whose frames would keep the requests

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

    def _finished(self, request: Request) -> None:
        try:
            self._drafter.on_finished(request)
        except BaseException as error:
            self._failed(f"failed in on_finished(): {describe(error)}")
        finally:
            self._room.release()

    @staticmethod
    def _run(calls: SimpleQueue[Callable[[], None] | None]) -> None:
        while (call := calls.get()) is not None:
            call()
            del call  # don't keep a request while idle

    # In the engine's thread

    def _call(self, function: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(self._calls,), name="dovetail-drafter", daemon=True
            )
            self._thread.start()
        self._calls.put(function)

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

    def _failed(self, what: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.error(
                "drafter %s %s: steps go on without its drafts (logged once)", self._name, what
            )
