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
        self._changed = threading.Condition()  # guards all that follows
        self._workers: list[threading.Thread] = []
        self._working = 0  # threads that haven't ended
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
        """End the threads. Wait at most `timeout_s`, even if a call of the medium hangs."""
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
        """Wake the threads, after starting them on the first call. The caller holds the lock."""
        while len(self._workers) < self.threads:
            name = f"{type(self).__name__}-{len(self._workers)}"
            # daemons: a medium that hangs must not keep the process from ending
            worker = threading.Thread(target=self._work, name=name, daemon=True)
            worker.start()
            self._workers.append(worker)
            self._working += 1
        self._changed.notify_all()

    def _give_up(self, is_given_up: Callable[[_Piece], bool]) -> bool:
        """Settle queued pieces as missing. Return True if this completes a job. The caller holds
        the lock."""
        has_report = False
        for queue in (self._urgent, self._stores):
            given_up = [piece for piece in queue if is_given_up(piece)]
            for piece in given_up:
                queue.remove(piece)
                has_report |= self._settle(piece, "missing")
        return has_report

    def _settle(self, piece: _Piece, why: Why | None) -> bool:
        """Record the result of a piece. Return True if this completes its job. The caller holds the
        lock."""
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
                break
            found = None  # a waiting thread must not hold a frame
        with self._changed:
            self._working -= 1
            is_last = not self._working
        if is_last:
            self._disconnect()

    def _take(self) -> _Piece | bytes | None:
        """Remove and return the next piece of work for a thread. The caller holds the lock."""
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

    def _disconnect(self) -> None:
        try:
            self.disconnect()
        except Exception as error:
            self._complain(error)

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
        """Record the end of a piece or drop of a namespace. The caller holds the lock."""
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
                "KV tier %s: %s; not logged again until the tier works",
                type(self).__name__,
                describe(error),
            )
