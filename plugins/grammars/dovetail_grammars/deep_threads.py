"""`in_deep_thread`: calls that recurse as deep as a user's text is long.

llguidance follows references between the rules of a grammar by recursion when it compiles: with a
thread's usual stack, a chain of 3,000 rules ends the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

# of stack for a character of text; chains of the shortest rules take less than half
BYTES_A_CHAR = 1024
LEAST_BYTES = 2**24
_starting = threading.Lock()  # `threading.stack_size` is of all threads that are started


def in_deep_thread(work: Callable[[], T], chars: int) -> T:
    """Return what `work` does, called in a thread whose stack suffices for a text of `chars`
    characters. Raises what it raises."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="dovetail-grammar", daemon=True)
    with _starting:
        before = threading.stack_size(max(LEAST_BYTES, BYTES_A_CHAR * chars))
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return result.result()
