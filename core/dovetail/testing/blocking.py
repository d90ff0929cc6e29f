"""`heard_blocking_calls`: the calls by which code blocks its thread: sleeping, starting a process,
using the network, or waiting for input."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache

# audit events of Python, see the standard library's "Audit events table"
BLOCKING = (
    "builtins.input",
    "os.posix_spawn",
    "os.system",
    "socket.connect",
    "socket.getaddrinfo",
    "subprocess.Popen",
    "time.sleep",
)


@contextmanager
def heard_blocking_calls(also: Collection[str] = ()) -> Iterator[list[str]]:
    """Yield a list that gets the name of each blocking call of this thread, of Python's
    `time.sleep` wherever a module has imported it to. `also`: further audit events. Not for several
    threads at once."""
    _listen()
    heard = list[str]()
    _heard.names = heard
    _heard.events = frozenset((*BLOCKING, *also))
    real_sleep = time.sleep
    sleep = _sleep_after_telling(real_sleep)
    holders = [
        vars(module)
        for module in list(sys.modules.values())
        if getattr(module, "__dict__", {}).get("sleep") is real_sleep
    ]
    for names in holders:
        names["sleep"] = sleep
    try:
        yield heard
    finally:
        for names in holders:
            names["sleep"] = real_sleep
        _heard.names = None


def _sleep_after_telling(real_sleep: Callable[[float], None]) -> Callable[[float], None]:
    """Return a `time.sleep` that raises its audit event, as Python 3.13 does."""

    def sleep(seconds: float) -> None:
        _hear("time.sleep", seconds)
        real_sleep(seconds)

    return sleep


class _Heard(threading.local):
    """This thread's list of blocking calls by name; None while nobody listens."""

    names: list[str] | None = None
    events: frozenset[str] = frozenset()


_heard = _Heard()


@cache
def _listen() -> None:
    """Add the hook, which can't be removed, once."""
    sys.addaudithook(_hear)


def _hear(event: str, arguments: object) -> None:
    if _heard.names is not None and event in _heard.events:
        _heard.names.append(event)
