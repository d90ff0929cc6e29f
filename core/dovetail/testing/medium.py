"""`medium_that`: lets files, sockets and processes hang or fail for the threads of a component."""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

# audit events of Python, see the standard library's "Audit events table"
SOCKETS = ("socket.connect", "socket.getaddrinfo", "socket.sendmsg", "socket.sendto")
USES = (
    "open",
    "os.chmod",
    "os.link",
    "os.listdir",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.scandir",
    "os.symlink",
    "os.truncate",
    "os.utime",
    "sqlite3.connect",
    "subprocess.Popen",
    *SOCKETS,
)


@dataclass(frozen=True, slots=True)
class _Trouble:
    """A medium that hangs, or fails, for all threads but `spared`, which use it by one of `events`.
    `met` is set once a thread has used it; threads that hang wait for `over`."""

    spared: int
    hangs: bool
    events: Collection[str]
    met: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)


_troubles: list[_Trouble] = []


@contextmanager
def medium_that(
    does: Literal["hangs", "fails"], events: Collection[str] = USES
) -> Iterator[threading.Event]:
    """Let each use of a file, socket or process by another thread than this one wait until the end
    of the block, or raise `OSError`. `events`: the uses, of `USES`. Yields an event that is set by the first of these. Reads and
    writes of open files aren't affected. For one thread at a time."""
    _listen()
    trouble = _Trouble(threading.get_ident(), does == "hangs", events)
    _troubles.append(trouble)
    try:
        yield trouble.met
    finally:
        _troubles.remove(trouble)
        trouble.over.set()


@cache
def _listen() -> None:
    """Add the hook, which can't be removed, once."""
    sys.addaudithook(_use)


def _use(event: str, arguments: object) -> None:
    if not _troubles or event not in USES:
        return
    for trouble in tuple(_troubles):
        if threading.get_ident() == trouble.spared or event not in trouble.events:
            continue
        trouble.met.set()
        if not trouble.hangs:
            raise OSError(errno.EIO, "the suite lets the medium fail")
        trouble.over.wait()
