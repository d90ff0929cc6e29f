"""`BlockingTier`: base class of tiers whose medium has blocking calls, such as files or the client
of a server.

It provides the queue, the threads and the reports. A subclass implements four methods, which may
block and raise, each for one frame or namespace:

    class Folder(BlockingTier):
        def find_frame(self, key): ...
        def store_frame(self, frame): ...
        def load_frame(self, frame): ...
        def forget(self, namespace): ...
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel

from dovetail.api.kv_tier import Done, Frame, FrameKey, Job, KVTier, TierContext, Why
from dovetail.errors import describe

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Progress:
    """A job that isn't reported yet."""

    job: Job
    left: int
    ok: list[bool] = field(default_factory=list)
    why: Why | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """One key of a job."""

    progress: _Progress
    index: int

    @property
    def key(self) -> FrameKey:
        return self.progress.job.keys[self.index]

    @property
    def is_store(self) -> bool:
        return self.progress.job.kind == "store"


class BlockingTier(KVTier):
    """A tier that calls its medium in its own threads, separately for each frame of a job.

    The four methods run in these threads, several at a time, even for equal keys. They may block,
    and raise any exception: the frame is then reported as "unavailable", and the exception is
    logged once until the tier works again. Finds and loads take precedence over stores; with two
    threads or more, one never stores.
    """

    threads: int = 4
    """Number of threads that use the medium. A constructor may set it."""

    def __init__(self, options: BaseModel, context: TierContext) -> None:
        super().__init__(options, context)
        # Mangled names: a subclass may have attributes and methods of any name.
        self.__changed = threading.Condition()  # guards all that follows
        self.__workers: list[threading.Thread] = []
        self.__working = 0  # threads that haven't ended
        self.__jobs: dict[int, _Progress] = {}
        self.__urgent = deque[_Piece]()
        self.__stores = deque[_Piece]()
        self.__drops = deque[bytes]()  # those that wait
        self.__dropping: set[bytes] = set()  # and those that run: nothing else of them begins
        self.__active = Counter[bytes]()  # pieces and drops that run, by namespace
        self.__storing = 0
        self.__reports: list[Done] = []
        self.__closed = False
        self.__has_failed = False

    @abstractmethod
    def find_frame(self, key: FrameKey) -> Why | None:
        """Return None if there is a frame with this key, otherwise "missing"."""

    @abstractmethod
    def store_frame(self, frame: Frame) -> Why | None:
        """Store the frame, even if there is one with its key. Return None once others can load it,
        otherwise the reason, such as "full"."""

    @abstractmethod
    def load_frame(self, frame: Frame) -> Why | None:
        """Fill `frame.data` completely and return None, otherwise return "missing" or
        "damaged"."""

    @abstractmethod
    def forget(self, namespace: bytes) -> None:
        """Remove all frames of a namespace. No other method runs for the namespace meanwhile."""

    def disconnect(self) -> None:
        """Release the medium, such as connections. By default, do nothing.

        Called once after `close`, by the last thread to end, when no other method runs or will run.
        `close` waits for it within its timeout. Not called if there was no job: connect in the
        other methods, not in the constructor.
        """

    def submit(self, job: Job) -> bool:
        with self.__changed:
            if self.__closed or len(self.__jobs) >= self.capabilities.max_jobs:
                return False
            progress = _Progress(job, len(job.keys), [False] * len(job.keys))
            self.__jobs[job.id] = progress
            queue = self.__stores if job.kind == "store" else self.__urgent
            queue.extend(_Piece(progress, index) for index in range(len(job.keys)))
            self.__begin()
        return True

    def done(self) -> Sequence[Done]:
        with self.__changed:
            reports = self.__reports
            self.__reports = []
        return reports

    def cancel(self, job: int) -> None:
        with self.__changed:
            has_report = self.__give_up(lambda piece: piece.progress.job.id == job)
        if has_report:
            self.context.wake()

    def drop(self, namespace: bytes) -> None:
        with self.__changed:
            if self.__closed:
                return
            has_report = self.__give_up(lambda piece: piece.key.namespace == namespace)
            if namespace not in self.__drops:
                self.__drops.append(namespace)
            self.__dropping.add(namespace)
            self.__begin()
        if has_report:
            self.context.wake()

    def close(self, timeout_s: float) -> None:
        """End the threads. Wait at most `timeout_s`, even if a call of the medium hangs."""
        deadline = time.monotonic() + timeout_s
        with self.__changed:
            self.__closed = True
            self.__urgent.clear()
            self.__stores.clear()
            self.__drops.clear()
            self.__jobs.clear()
            self.__reports.clear()
            self.__changed.notify_all()
        for worker in self.__workers:
            worker.join(max(0.0, deadline - time.monotonic()))

    def __begin(self) -> None:
        """Wake the threads, after starting them on the first call. The caller holds the lock."""
        while len(self.__workers) < self.threads:
            name = f"{type(self).__name__}-{len(self.__workers)}"
            # daemons: a medium that hangs must not keep the process from ending
            worker = threading.Thread(target=self.__work, name=name, daemon=True)
            worker.start()
            self.__workers.append(worker)
            self.__working += 1
        self.__changed.notify_all()

    def __give_up(self, is_given_up: Callable[[_Piece], bool]) -> bool:
        """Settle queued pieces as missing. Return True if this completes a job. The caller holds
        the lock."""
        has_report = False
        for queue in (self.__urgent, self.__stores):
            given_up = [piece for piece in queue if is_given_up(piece)]
            for piece in given_up:
                queue.remove(piece)
                has_report |= self.__settle(piece, "missing")
        return has_report

    def __settle(self, piece: _Piece, why: Why | None) -> bool:
        """Record the result of a piece. Return True if this completes its job. The caller holds the
        lock."""
        progress = piece.progress
        progress.ok[piece.index] = why is None
        progress.why = progress.why or why
        progress.left -= 1
        if progress.left or self.__closed:
            return False
        del self.__jobs[progress.job.id]
        self.__reports.append(Done(progress.job.id, tuple(progress.ok), progress.why))
        return True

    def __work(self) -> None:
        while True:
            with self.__changed:
                found = self.__changed.wait_for(lambda: self.__closed or self.__take())
            if isinstance(found, bytes):
                self.__forget(found)
            elif isinstance(found, _Piece):
                self.__do(found)
            else:
                break
            found = None  # a waiting thread must not hold a frame
        with self.__changed:
            self.__working -= 1
            is_last = not self.__working
        if is_last:
            self.__disconnect()

    def __take(self) -> _Piece | bytes | None:
        """Remove and return the next piece of work for a thread. The caller holds the lock."""
        for namespace in self.__drops:
            if not self.__active[namespace]:
                self.__drops.remove(namespace)
                self.__active[namespace] += 1
                return namespace
        # one thread is left for finds and loads
        may_store = self.__storing < max(1, self.threads - 1)
        for queue in (self.__urgent, self.__stores) if may_store else (self.__urgent,):
            for piece in queue:
                if piece.key.namespace not in self.__dropping:
                    queue.remove(piece)
                    self.__active[piece.key.namespace] += 1
                    self.__storing += piece.is_store
                    return piece
        return None

    def __forget(self, namespace: bytes) -> None:
        try:
            self.forget(namespace)
        except Exception as error:
            self.__complain(error)
        with self.__changed:
            self.__end(namespace)
            if namespace not in self.__drops:
                self.__dropping.discard(namespace)

    def __disconnect(self) -> None:
        try:
            self.disconnect()
        except Exception as error:
            self.__complain(error)

    def __do(self, piece: _Piece) -> None:
        try:
            why = self.__call(piece)
        except Exception as error:
            why = "unavailable"
            self.__complain(error)
        else:
            self.__has_failed = self.__has_failed and why not in (None, "missing")
        with self.__changed:
            self.__end(piece.key.namespace)
            self.__storing -= piece.is_store
            has_report = self.__settle(piece, why)
        if has_report:
            self.context.wake()

    def __end(self, namespace: bytes) -> None:
        """Record the end of a piece or drop of a namespace. The caller holds the lock."""
        self.__active[namespace] -= 1
        if not self.__active[namespace]:
            del self.__active[namespace]
        self.__changed.notify_all()

    def __call(self, piece: _Piece) -> Why | None:
        job = piece.progress.job
        if job.kind == "find":
            return self.find_frame(piece.key)
        frame = job.frames[piece.index]
        return self.store_frame(frame) if job.kind == "store" else self.load_frame(frame)

    def __complain(self, error: Exception) -> None:
        if not self.__has_failed:
            self.__has_failed = True
            logger.warning(
                "KV tier %s: %s; not logged again until the tier works",
                type(self).__name__,
                describe(error),
                # a medium that is lost needs no traceback, a mistake in the code does
                exc_info=None if isinstance(error, OSError) else error,
                extra={"error": error},
            )
