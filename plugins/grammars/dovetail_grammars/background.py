"""`Background`: a thread for work that needs no lock of Python's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from weakref import finalize


class Background:
    """A thread for calls that release Python's lock while they work, one at a time.

    The caller goes on as soon as the call has released the lock, and gives it up only where it
    waits: otherwise the thread would wait for it, as long as the interpreter's switch interval.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._begun = threading.Lock()  # released by the thread, once for each call
        self._begun.acquire()
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        run = partial(_run, self._calls, self._begun, self._ended)
        threading.Thread(target=run, name=name, daemon=True).start()
        finalize(self, self._calls.put, None)

    def run(self, call: Callable[[], None]) -> Callable[[], None]:
        """Begin `call`. Return a function that waits for its end, and raises what it raised. Once it
        has returned or raised, calling it again does nothing."""
        self._calls.put(call)
        self._begun.acquire()
        return _Ending(self._ended)


class _Ending:
    """Waits for the end of a call, once."""

    def __init__(self, ended: SimpleQueue[BaseException | None]) -> None:
        self._ended: SimpleQueue[BaseException | None] | None = ended

    def __call__(self) -> None:
        if self._ended is None:
            return
        error = self._ended.get()
        self._ended = None
        if error is not None:
            raise error


def _run(
    calls: SimpleQueue[Callable[[], None] | None],
    begun: threading.Lock,
    ended: SimpleQueue[BaseException | None],
) -> None:
    """Run calls until there is None; end with the object whose thread this is."""
    while (call := calls.get()) is not None:
        begun.release()
        try:
            call()
        except BaseException as error:  # raised where its end is awaited
            ended.put(error)
        else:
            ended.put(None)
        del call
