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
        self._begun = threading.Semaphore(0)
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        run = partial(_run, self._calls, self._begun, self._ended)
        threading.Thread(target=run, name=name, daemon=True).start()
        finalize(self, self._calls.put, None)

    def run(self, call: Callable[[], None]) -> Callable[[], None]:
        """Begin `call`. Return a function that waits for its end, and raises what it raised."""
        self._calls.put(call)
        self._begun.acquire()
        return self._wait

    def _wait(self) -> None:
        error = self._ended.get()
        if error is not None:
            raise error


def _run(
    calls: SimpleQueue[Callable[[], None] | None],
    begun: threading.Semaphore,
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
