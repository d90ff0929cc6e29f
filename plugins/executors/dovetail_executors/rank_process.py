"""The process of one rank: `python -m dovetail_executors.rank_process DESCRIPTOR PARENT`, as `Ranks` starts it.

It ends with the engine's process, by three ways of which each is enough: the kernel kills it when the thread that started it is gone, a thread of its
own waits for the end of the control socket, and the ring tells when its writer is gone.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from dovetail_executors.messages import Message, receive, send

if TYPE_CHECKING:
    from dovetail.api.executor import ExecutorConfig, ExecutorContext
    from dovetail_executors.rank import Rank, RankSettings

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Job:
    """The first message to a rank's process. Components are as the engine resolved them: nothing is searched for again."""

    rank: int
    device: str
    path: list[str]  # sys.path
    settings: RankSettings
    config: ExecutorConfig
    components: dict[str, Any]  # fields of `ExecutorContext`: models, attention, sampler, quantizations
    max_in_flight: int | None  # None: as many as suit the device
    address: str  # at which the rank's host is reached by the other ranks
    ring_fd: int = -1  # these are its host's: see `host_ranks`
    ring_words: int = 0
    readers: int = 0  # of the ring
    reader: int = 0  # among them
    waker_fd: int = -1

    def pickled(self) -> bytes:
        """As a message, whose other parts can be unpickled once `path` is in use."""
        return pickle.dumps({"path": self.path, "job": pickle.dumps(self)})


def main() -> int:
    """Return the exit code: 0 if it was told to end, 1 if it failed."""
    _die_with(int(sys.argv[2]))
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    first = receive(control)
    sys.path[:] = first["path"]
    job: Job = pickle.loads(first["job"])
    orders: SimpleQueue[Message] = SimpleQueue()
    threading.Thread(target=_heed, args=(control, orders), daemon=True).start()
    for fd in (job.ring_fd, job.waker_fd):
        os.set_inheritable(fd, False)

    from dovetail.errors import describe
    from dovetail_executors.rank import Rank
    from dovetail_executors.ring import WriterGone

    rank: Rank | None = None
    try:
        import torch

        send(control, {"stage": "importing"})
        joining = partial(send, control, {"joining": True})
        context = _context(job, partial(_tell_stage, control))
        rank = Rank(job.rank, torch.device(job.device), job.settings, context, joining, address=job.address)
        _run(rank, job, control, orders)
    except (WriterGone, EOFError):
        return 0
    except Exception as error:
        missed_others = rank is not None and rank.group.failure is not None
        send(control, {"failed": (describe(error), missed_others)})
        return 1
    return 0


def _die_with(parent: int) -> None:
    """Have this process killed when its parent is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        os._exit(0)


def _heed(control: socket.socket, orders: SimpleQueue[Message]) -> None:
    """Pass on what the engine says, and end this process when it is gone, or wants that."""
    try:
        while True:
            orders.put(receive(control))
    except (EOFError, OSError):
        os._exit(0)


def _tell_stage(control: socket.socket, what: str, done: int, total: int) -> None:
    """Tell the engine what of starting is done, for its log."""
    if done == total:
        send(control, {"stage": what})


def _context(job: Job, progress: Callable[[str, int, int], None]) -> ExecutorContext:
    from dovetail.api.clock import WallClock
    from dovetail.api.executor import ExecutorContext

    return ExecutorContext(config=job.config, clock=WallClock(), progress=progress, **job.components)


def _run(rank: Rank, job: Job, control: socket.socket, orders: SimpleQueue[Message]) -> None:
    """Load, allocate as many blocks as all can, and compute what comes through the ring. Raises `WriterGone` at the end."""
    from dovetail.runtime.batch_words import from_words, masks_from_words
    from dovetail.runtime.runner import PendingStep
    from dovetail_executors.ring import Kind, Ring, RingReader

    capacity = rank.load()
    send(control, {"loaded": (capacity.num_blocks, dict(capacity.details))})
    rank.worker.allocate(orders.get()["allocate"])
    send(control, {"allocated": True})

    ring = Ring(job.ring_fd, job.readers, job.ring_words)
    reader = RingReader(ring, job.reader, job.waker_fd)
    in_flight: deque[PendingStep] = deque()
    most = job.max_in_flight or capacity.max_in_flight
    while True:
        kind, words = reader.next()
        kept = most - 1 if kind is Kind.STEP else 1  # the engine has collected all others before it sent this
        while len(in_flight) > kept:
            rank.worker.collect(in_flight.popleft())
        if kind is Kind.STEP:
            in_flight.append(rank.worker.submit(from_words(words)))
        else:
            rank.worker.sample(in_flight[-1], masks_from_words(words))
        reader.done()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: what would be taken down in order goes with the process
