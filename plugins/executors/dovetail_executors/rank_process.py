"""The process of one rank: `python -m dovetail_executors.rank_process DESCRIPTOR PARENT`, started
by `Ranks`.

It ends with the engine's process in three independent ways: the kernel kills it when the thread
that started it ends, a thread of its own waits for the end of the control connection, and the ring
reports that its writer is gone.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from dovetail.api.process_watch import die_with

if TYPE_CHECKING:
    from dovetail.api.executor import ExecutorConfig, ExecutorContext
    from dovetail_executors.rank import Rank, RankSettings

LONGEST_REASON = 8192  # characters; the watch of `Ranks` relies on short messages

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RankJob:
    """The first message to a rank's process. Components are resolved already."""

    rank: int
    name: str  # for people
    device: str
    path: list[str]  # sys.path
    settings: RankSettings
    config: ExecutorConfig
    # fields of `ExecutorContext`: models, attention, sampler, quantizations, logits_processors
    components: dict[str, Any]
    max_in_flight: int | None  # None: as many as suit the device
    address: str  # of the rank's host, for the other ranks
    ring_fd: int = -1  # these are set by `Ranks`
    ring_words: int = 0
    readers: int = 0  # of the ring
    reader: int = 0  # among them
    waker_fd: int = -1
    slabs_fd: int = -1  # see `SharedSlabs`; -1: ranks of several hosts

    def pickled(self) -> bytes:
        """Return the message; its job can be unpickled once `path` is in use."""
        return pickle.dumps({"path": self.path, "job": pickle.dumps(self)})


def main() -> int:
    """Return the exit code: 0 if told to end, 1 if failed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    die_with(int(sys.argv[2]))
    control: Connection[Any, Any] = Connection(int(sys.argv[1]))
    first = control.recv()
    sys.path[:] = first["path"]
    job: RankJob = pickle.loads(first["job"])
    orders: SimpleQueue[Message] = SimpleQueue()
    threading.Thread(target=_heed, args=(control, orders), daemon=True).start()
    for fd in (control.fileno(), job.ring_fd, job.waker_fd, job.slabs_fd):
        if fd >= 0:
            os.set_inheritable(fd, False)

    from dovetail.errors import describe
    from dovetail_executors.rank import Rank
    from dovetail_executors.ring import WriterGone

    rank: Rank | None = None
    try:
        import torch

        control.send({"stage": "importing"})
        joining = partial(control.send, {"joining": True})
        context = context_of(job, partial(_tell_stage, control))
        rank = Rank(
            job.rank, torch.device(job.device), job.settings, context, joining, address=job.address
        )
        run(rank, job, control, orders)
    except (WriterGone, EOFError):
        return 0
    except Exception as error:
        missed_others = rank is not None and rank.group.failure is not None
        control.send({"failed": (describe(error)[:LONGEST_REASON], missed_others)})
        return 1
    return 0


def _heed(control: Connection[Any, Any], orders: SimpleQueue[Message]) -> None:
    """Queue the engine's messages, and end this process when the connection is closed."""
    try:
        while True:
            orders.put(control.recv())
    except (EOFError, OSError):
        os._exit(0)


def _tell_stage(control: Connection[Any, Any], what: str, done: int, total: int) -> None:
    """Report a finished stage of the start for the engine's log."""
    if done == total:
        control.send({"stage": what})


def context_of(job: RankJob, progress: Callable[[str, int, int], None]) -> ExecutorContext:
    """Return the arguments of the rank's worker."""
    from dovetail.api.clock import WallClock
    from dovetail.api.executor import ExecutorContext

    return ExecutorContext(
        config=job.config, clock=WallClock(), progress=progress, **job.components
    )


def run(
    rank: Rank, job: RankJob, control: Connection[Any, Any], orders: SimpleQueue[Message]
) -> None:
    """Load, allocate as many blocks as all ranks can, and compute the ring's batches. Raises
    `WriterGone` at the end."""
    from dovetail_executors.rank_transfers import RankTransfers, SharedSlabs
    from dovetail_executors.ring import Kind, Ring, RingReader
    from dovetail_executors.runtime.batch_words import from_words, masks_from_words
    from dovetail_executors.runtime.step import Step

    capacity = rank.load()
    control.send({"loaded": (capacity.num_pages, dict(capacity.details))})
    rank.worker.allocate(orders.get()["allocate"])
    transfers: RankTransfers | None = None
    if job.slabs_fd >= 0:
        slabs = SharedSlabs(job.slabs_fd, job.settings.size)
        transfers = RankTransfers(job.rank, slabs, rank.worker.page_copies)
        serving = (orders, control.send)
        threading.Thread(target=transfers.serve, args=serving, daemon=True).start()
    control.send({"allocated": True})

    ring = Ring(job.ring_fd, job.readers, job.ring_words)
    reader = RingReader(ring, job.reader, job.waker_fd)
    in_flight: deque[Step] = deque()
    most = job.max_in_flight or capacity.max_in_flight
    while True:
        kind, words = reader.next()
        if kind in (Kind.SAVE, Kind.RESTORE):
            assert transfers is not None
            transfers.start(kind, words)
            reader.done()
            continue
        if kind is Kind.FINISH_START:
            rank.worker.finish_start()
            reader.done()
            continue
        batch = from_words(words) if kind is Kind.STEP else None
        # the engine has collected all others before it sent this
        kept = most - 1 if batch is not None else 1
        if batch is not None and (
            batch.drafts is not None or (in_flight and in_flight[-1].batch.drafts is not None)
        ):
            kept = 0  # only then the lengths of all rows are known
        while len(in_flight) > kept:
            rank.worker.collect(in_flight.popleft())
        if batch is not None:
            in_flight.append(rank.worker.submit(batch))
        else:
            rank.worker.sample(in_flight[-1], masks_from_words(words))
        reader.done()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once, without tearing anything down in order
