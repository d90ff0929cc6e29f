"""`Footprint`: threads, child processes, open files and temporary files that a component holds."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 1.0  # for threads and processes to end after being told to
POLL_S = 0.01
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Footprint:
    """A snapshot of resources. Without /proc it has only the processes of `multiprocessing`, and no
    files."""

    threads: frozenset[threading.Thread]
    processes: frozenset[int]
    files: tuple[str, ...]  # open files, by target

    @classmethod
    def now(cls) -> Footprint:
        return cls(
            frozenset(threading.enumerate()),
            frozenset(child_processes()),
            tuple(sorted(_open_files())),
        )

    def left_behind(self) -> list[str]:
        """Return in words what there is now and wasn't then; threads and processes only if they
        don't end within a moment."""
        deadline = time.monotonic() + GRACE_S
        while True:
            now = Footprint.now()
            threads = [f"thread {thread.name!r}" for thread in now.threads - self.threads]
            processes = [f"process {pid}" for pid in sorted(now.processes - self.processes)]
            if not (threads or processes) or time.monotonic() > deadline:
                return (
                    sorted(threads)
                    + processes
                    + [f"open file {name}" for name in _more(now.files, self.files)]
                )
            time.sleep(POLL_S)


def tensor_bytes() -> int:
    """Return the bytes of all tensors that somebody can reach; 0 where torch was never imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return 0
    gc.collect()
    tensors = [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), torch.Tensor) and thing.layout is torch.strided
    ]
    return sum(
        {
            storage.data_ptr(): storage.nbytes()
            for storage in (tensor.untyped_storage() for tensor in tensors)
        }.values()
    )


def child_processes() -> list[int]:
    """Return the ids of this process's children; those of `multiprocessing` first."""
    known = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
    return [*known, *(pid for pid in _children() if pid not in known)]


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Use a new folder for temporary files instead of the system's."""
    with tempfile.TemporaryDirectory() as folder:
        before = tempfile.tempdir
        tempfile.tempdir = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = before


def _children() -> Iterator[int]:
    """Yield child processes by /proc/<pid>/stat: "pid (name) state parent …"; zombies (state Z)
    don't count."""
    for stat in _PROC.glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has just ended
            continue
        if int(parent) == os.getpid() and state != "Z":
            yield int(stat.parent.name)


def _open_files() -> Iterator[str]:
    for link in _PROC.glob("self/fd/*"):
        try:
            yield os.readlink(link)
        except OSError:  # the one by which this folder was read
            continue


def _more(now: tuple[str, ...], before: tuple[str, ...]) -> list[str]:
    """Return the files that are open more often than before, if more are open in all: pipes and
    sockets get a new name each time."""
    return sorted((Counter(now) - Counter(before)).elements()) if len(now) > len(before) else []
