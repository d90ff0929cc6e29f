"""`Turns`: one thread at a time in an engine, in the order in which they come. `LLMEngine` takes its turn for each call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial, wraps
from threading import get_ident
from typing import Concatenate, ParamSpec, Protocol, TypeVar, TypeVarTuple

P = ParamSpec("P")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class Turns:
    """A lock that its owner may take again, and that is fair: whoever steps in a loop would else have it back before those who wait are awake.

    An interrupt (Ctrl-C) at any point leaves it as it should be. Objects that the garbage collector finalizes mustn't take a turn: that may be
    amidst another call of the same thread.
    """

    def __init__(self) -> None:
        self._door = threading.Lock()  # held by who is next
        self._room = threading.RLock()  # held by who is in
        self._inside: int | None = None  # that thread
        self._asleep = False
        self.wake = threading.Event()  # ends a `sleep`

    def take(self, function: Callable[[*Ts], R], *args: *Ts) -> R:
        """Call it when it is this thread's turn, at once within another call of the same thread.

        It makes no object that Python's garbage collector counts, since it is around each step: a few more, and there may be a collection each step.
        """
        if self._inside == get_ident():
            return function(*args)
        try:
            with self._door:
                if self._asleep:
                    self.wake.set()
                self._room.acquire()
            self._inside = get_ident()
            try:
                return function(*args)
            finally:
                self._inside = None
        finally:
            try:  # noqa: SIM105 - `suppress` is Python code, before which an interrupt may come
                self._room.release()
            except RuntimeError:  # interrupted while it waited: it isn't in
                pass

    def sleep(self, seconds: float) -> None:
        """Wait within a turn, but not longer than until somebody else wants one, or `wake` is set."""
        self._asleep = True
        try:
            if not self._door.locked():
                self.wake.wait(min(seconds, threading.TIMEOUT_MAX))
        finally:
            self._asleep = False
            self.wake.clear()


class _TakesTurns(Protocol):
    turns: Turns


S = TypeVar("S", bound=_TakesTurns)


def in_turn(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Have each call of a method wait for its turn."""

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.turns.take(partial(method, self, *args, **kwargs))

    return call
