"""`in_thread` calls a method of a component in a new thread; `InThreads` calls all, in turns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any


def in_thread(method: Callable[[], Any]) -> Any:
    """Call a method in a new thread. Raises what it raises."""
    result: list[Any] = []
    raised: list[Exception] = []

    def run() -> None:
        try:
            result.append(method())
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return result[0]


class InThreads:
    """Passes each call of a component's methods on from another thread than the call before.

    The threads take turns and stay alive: the identifier of one that has ended is given to the
    next, which would then pass for the same.
    """

    def __init__(self, component: Any) -> None:
        self._component = component
        self._threads = cycle([ThreadPoolExecutor(1) for _ in range(3)])

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._component, name)
        if not callable(value):
            return value
        return lambda *arguments: next(self._threads).submit(value, *arguments).result()
