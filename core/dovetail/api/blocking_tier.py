"""`BlockingTier`: base class of tiers whose medium has blocking calls, such as files, or a client of
a server.

It has the queue, the threads and the reports. A subclass has four methods that may block and raise,
each for one frame or namespace:

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
    """A tier that calls its medium in threads of its own, for each frame of a job separately.

    The four methods run in these threads, several at a time, also for equal keys. They may block,
    and raise any exception: the frame is then reported as "unavailable", and the log says it once.
    Finds and loads go before stores, and never wait until all threads have stored.
    """

    threads: int = 4
    """Threads that use the medium. A constructor may set it, too."""

    def __init__(self, options: BaseModel, context: TierContext) -> None:
        super().__init__(options, context)
        self._changed = threading.Condition()  # guards all that follows
        self._workers: list[threading.Thread] = []
        self._jobs: dict[int, _Progress] = {}
        self._urgent = deque[_Piece]()
        self._stores = deque[_Piece]()
        self._drops = deque[bytes]()  # those that wait
        self._dropping: set[bytes] = set()  # and those that run: nothing else of them begins
        self._active = Counter[bytes]()  # pieces and drops that run, by namespace
        self._storing = 0
        self._reports: list[Done] = []
        self._closed = False
        self._has_failed = False

    @abstractmethod
    def find_frame(self, key: FrameKey) -> Why | None:
        """Return None if there is a frame of this key, otherwise why not: "missing"."""

    @abstractmethod
    def store_frame(self, frame: Frame) -> Why | None:
        """Keep the frame, also if there is one of its key. Return None once others can load it,
        otherwise why it wasn't kept."""

    @abstractmethod
    def load_frame(self, frame: Frame) -> Why | None:
        """Fill `frame.data`. Return None if it was filled whole, otherwise why not."""

    @abstractmethod
    def forget(self, namespace: bytes) -> None:
        """Remove all frames of a namespace. No other method runs for it meanwhile."""

    def submit(self, job: Job) -> bool:
        with self._changed:
            if self._closed or len(self._jobs) >= self.capabilities.max_jobs:
                return False
            progress = _Progress(job, len(job.keys), [False] * len(job.keys))
            self._jobs[job.id] = progress
            queue = self._stores if job.kind == "store" else self._urgent
            queue.extend(_Piece(progress, index) for index in range(len(job.keys)))
            self._begin()
        return True

    def done(self) -> Sequence[Done]:
        with self._changed:
            reports = self._reports
            self._reports = []
        return reports

    def cancel(self, job: int) -> None:
        with self._changed:
            has_report = self._give_up(lambda piece: piece.progress.job.id == job)
        if has_report:
            self.context.wake()

    def drop(self, namespace: bytes) -> None:
        with self._changed:
            if self._closed:
                return
            has_report = self._give_up(lambda piece: piece.key.namespace == namespace)
            if namespace not in self._drops:
                self._drops.append(namespace)
            self._dropping.add(namespace)
            self._begin()
        if has_report:
            self.context.wake()

    def close(self, timeout_s: float) -> None:
        """End the threads. A thread whose call of the medium hangs isn't waited for any longer than
        `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closed = True
            self._urgent.clear()
            self._stores.clear()
            self._drops.clear()
            self._jobs.clear()
            self._reports.clear()
            self._changed.notify_all()
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))

    def _begin(self) -> None:
        """Let the threads look for work; they are started with the first. Locked by the caller."""
        while len(self._workers) < self.threads:
            name = f"{type(self).__name__}-{len(self._workers)}"
            # daemons: a medium that hangs must not keep the process from ending
            worker = threading.Thread(target=self._work, name=name, daemon=True)
            worker.start()
            self._workers.append(worker)
        self._changed.notify_all()

    def _give_up(self, is_given_up: Callable[[_Piece], bool]) -> bool:
        """Settle queued pieces without doing them. Returns True if a job is reported thereby.
        Locked by the caller."""
        has_report = False
        for queue in (self._urgent, self._stores):
            given_up = [piece for piece in queue if is_given_up(piece)]
            for piece in given_up:
                queue.remove(piece)
                has_report |= self._settle(piece, "missing")
        return has_report

    def _settle(self, piece: _Piece, why: Why | None) -> bool:
        """Note the result of a piece. Returns True if its job is reported. Locked by the caller."""
        progress = piece.progress
        progress.ok[piece.index] = why is None
        progress.why = progress.why or why
        progress.left -= 1
        if progress.left or self._closed:
            return False
        del self._jobs[progress.job.id]
        self._reports.append(Done(progress.job.id, tuple(progress.ok), progress.why))
        return True

    def _work(self) -> None:
        while True:
            with self._changed:
                found = self._changed.wait_for(lambda: self._closed or self._take())
            if isinstance(found, bytes):
                self._forget(found)
            elif isinstance(found, _Piece):
                self._do(found)
            else:
                return
            found = None  # a waiting thread must not hold a frame

    def _take(self) -> _Piece | bytes | None:
        """Remove and return what a thread can do next. Locked by the caller."""
        for namespace in self._drops:
            if not self._active[namespace]:
                self._drops.remove(namespace)
                self._active[namespace] += 1
                return namespace
        # one thread is left for finds and loads
        may_store = self._storing < max(1, self.threads - 1)
        for queue in (self._urgent, self._stores) if may_store else (self._urgent,):
            for piece in queue:
                if piece.key.namespace not in self._dropping:
                    queue.remove(piece)
                    self._active[piece.key.namespace] += 1
                    self._storing += piece.is_store
                    return piece
        return None

    def _forget(self, namespace: bytes) -> None:
        try:
            self.forget(namespace)
        except Exception as error:
            self._complain(error)
        with self._changed:
            self._end(namespace)
            if namespace not in self._drops:
                self._dropping.discard(namespace)

    def _do(self, piece: _Piece) -> None:
        try:
            why = self._call(piece)
        except Exception as error:
            why = "unavailable"
            self._complain(error)
        else:
            self._has_failed = self._has_failed and why not in (None, "missing")
        with self._changed:
            self._end(piece.key.namespace)
            self._storing -= piece.is_store
            has_report = self._settle(piece, why)
        if has_report:
            self.context.wake()

    def _end(self, namespace: bytes) -> None:
        """Note that a piece or drop of a namespace has ended. Locked by the caller."""
        self._active[namespace] -= 1
        if not self._active[namespace]:
            del self._active[namespace]
        self._changed.notify_all()

    def _call(self, piece: _Piece) -> Why | None:
        job = piece.progress.job
        if job.kind == "find":
            return self.find_frame(piece.key)
        frame = job.frames[piece.index]
        return self.store_frame(frame) if job.kind == "store" else self.load_frame(frame)

    def _complain(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.warning(
                "KV tier %s: %s; not said again until it has worked",
                type(self).__name__,
                describe(error),
            )
