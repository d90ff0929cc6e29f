"""`TierWorld`: a tier with the core's side of it, for its suite: jobs, the memory lent to them, and
reports, which are checked."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from dovetail.api.blocking_tier import logger as tier_logger
from dovetail.api.clock import WallClock
from dovetail.api.kv_tier import Done, Frame, FrameKey, Job, KVTier, TierContext, Why
from dovetail.errors import describe
from dovetail.testing.checks import fail, require

SIZES = (72, 4_160, 65_600, 262_208)  # bytes of frames
BEFORE = 8  # bytes in front of a frame: those in the host pool aren't aligned to a disk's blocks
JOB_S = 10.0  # a job that takes longer counts as never reported
POLL_S = 0.01
PATTERN = 0xA5  # memory after a report, and before a load


def content(key: FrameKey, size: int) -> bytes:
    """Return the bytes of the frame of a key: always the same, as in an engine. They can't be
    compressed, so that the limit of a tier that compresses is tried, too."""
    seed = hashlib.sha256(key.namespace + key.chain).digest()
    return random.Random(seed).randbytes(size)


@dataclass(frozen=True, slots=True)
class Lent:
    """Memory of the host pool for one frame."""

    key: FrameKey
    memory: bytearray

    @classmethod
    def for_load(cls, key: FrameKey, size: int) -> Lent:
        return cls(key, bytearray([PATTERN]) * (BEFORE + size))

    @classmethod
    def for_store(cls, key: FrameKey, size: int) -> Lent:
        return cls(key, bytearray(BEFORE) + content(key, size))

    @property
    def view(self) -> memoryview:
        return memoryview(self.memory)[BEFORE:]

    @property
    def is_whole(self) -> bool:
        return self.view == content(self.key, len(self.view))

    @property
    def is_untouched(self) -> bool:
        return self.memory.count(PATTERN) == len(self.memory)

    def use_again(self) -> None:
        """Write something else, as the core does once the job was reported."""
        self.memory[:] = bytes([PATTERN]) * len(self.memory)


class _Errors(logging.Handler):
    """Keeps the latest error that a `BlockingTier` has logged."""

    latest: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.latest = getattr(record, "error", None)


class TierWorld:
    """A tier that the suite made. `waits_for_wake`: look for reports only after `wake`."""

    def __init__(
        self,
        make: Callable[[TierContext], KVTier],
        *,
        sizes: tuple[int, ...] = SIZES,
        waits_for_wake: bool = False,
    ) -> None:
        self.sizes = sizes
        self.woken = threading.Event()
        self.tier = make(TierContext(WallClock(), self.woken.set, sizes))
        self._waits_for_wake = waits_for_wake
        self._ids = 0
        self._jobs: dict[int, Job] = {}
        self._reports: dict[int, Done] = {}
        self.lent: dict[int, list[Lent]] = {}
        self._errors = _Errors()
        tier_logger.addHandler(self._errors)

    def keys(self, count: int, namespace: bytes | None = None) -> list[FrameKey]:
        """Return new keys of one namespace."""
        namespace = namespace or os.urandom(32)
        return [FrameKey(namespace, os.urandom(32)) for _ in range(count)]

    def size(self, key: FrameKey) -> int:
        return self.sizes[key.chain[0] % len(self.sizes)]

    def job(self, kind: Any, keys: Sequence[FrameKey], deadline_s: float | None = None) -> Job:
        """Return a job with the memory that it needs, not submitted."""
        self._ids += 1
        make = Lent.for_store if kind == "store" else Lent.for_load
        lent = [] if kind == "find" else [make(key, self.size(key)) for key in keys]
        self.lent[self._ids] = lent
        return Job(
            self._ids,
            kind,
            tuple(keys),
            tuple(
                Frame(one.key, one.view.toreadonly() if kind == "store" else one.view)
                for one in lent
            ),
            None if deadline_s is None else self.tier.context.clock.now() + deadline_s,
        )

    def submit(self, job: Job) -> bool:
        """Submit a job. Returns False if the tier is too busy."""
        self._jobs[job.id] = job  # before it can be reported
        taken = self.call("submit", job)
        require(isinstance(taken, bool), f"submit returned {taken!r}, expected True or False")
        if not taken:
            del self._jobs[job.id]
        return bool(taken)

    def call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self.tier, method)(*arguments)
        except Exception as error:
            fail(f"{method} raised {describe(error)}", error)

    def begin(self, kind: Any, keys: Sequence[FrameKey], deadline_s: float | None = None) -> int:
        """Submit a job, after the reports of others if the tier is too busy. Returns its id."""
        job = self.job(kind, keys, deadline_s)
        limit = time.monotonic() + JOB_S
        while not self.submit(job):
            require(time.monotonic() < limit, f"the tier took no {kind} for {JOB_S:g} s")
            self.look()
            time.sleep(POLL_S)
        return job.id

    def report(self, id: int) -> Done:
        """Wait for the report of a job."""
        return self.reports([id])[0]

    def reports(self, ids: Iterable[int]) -> list[Done]:
        """Wait for the reports of these jobs."""
        ids = list(ids)
        limit = time.monotonic() + JOB_S
        while missing := [id for id in ids if id not in self._reports]:
            if self.woken.wait(POLL_S) or not self._waits_for_wake:
                self.woken.clear()
                self.look()
            if time.monotonic() > limit:
                self.look()
                require(
                    missing[0] not in self._reports,
                    "a job was reported, and `wake` wasn't called after it",
                )
                fail(f"{self._jobs[missing[0]]!r:.80} wasn't reported within {JOB_S:g} s")
        return [self._reports.pop(id) for id in ids]

    def reported(self) -> list[Done]:
        """Return the reports that there are by now, once."""
        self.look()
        reports = [*self._reports.values()]
        self._reports.clear()
        return reports

    def do(self, kind: Any, keys: Sequence[FrameKey]) -> Done:
        """Do one job, to its report."""
        return self.report(self.begin(kind, keys))

    def store(self, keys: Sequence[FrameKey]) -> None:
        """Store frames, all of which must be stored."""
        self.require_stored(self.do("store", keys), "frames weren't stored")

    def require_stored(self, done: Done, what: str) -> None:
        """Require that a store stored all frames. `what`: the opposite."""
        error = self._errors.latest
        if error is not None and done.why == "unavailable":
            fail(f"{what}: {describe(error)}", error)  # one cause of many checks' failures
        require(all(done.ok), f"{what}: {done}")

    def load(self, keys: Sequence[FrameKey]) -> tuple[bool, ...]:
        """Load frames. Those reported as loaded must be whole."""
        id = self.begin("load", keys)
        done = self.report(id)
        for is_loaded, lent in zip(done.ok, self.lent.pop(id), strict=True):
            require(
                not is_loaded or lent.is_whole,
                f"a frame of {len(lent.view)} bytes was reported as loaded, and isn't what was "
                "stored",
            )
        return done.ok

    def require_loaded(self, keys: Sequence[FrameKey], when: str) -> None:
        """Require that frames are found and loaded."""
        found = self.do("find", keys)
        require(all(found.ok), f"{when}, a stored frame isn't found: {found}")
        require(all(self.load(keys)), f"{when}, a stored frame can't be loaded")

    def require_whole_or_missing(self, keys: Sequence[FrameKey], when: str) -> tuple[bool, ...]:
        """Require of each frame that it is whole, or isn't found. Returns which are there."""
        found = self.do("find", keys).ok
        loaded = self.load(keys)
        for is_found, is_loaded in zip(found, loaded, strict=True):
            require(
                is_loaded or not is_found, f"{when}, a frame is found, and can't be loaded whole"
            )
        return loaded

    def drop(self, namespace: bytes, keys: Sequence[FrameKey]) -> None:
        """Drop a namespace, and wait until its frames aren't found any more."""
        self.call("drop", namespace)
        limit = time.monotonic() + JOB_S
        while any(self.do("find", keys).ok):
            require(
                time.monotonic() < limit,
                f"a frame is found {JOB_S:g} s after `drop` of its namespace",
            )
            time.sleep(POLL_S)

    def close(self, timeout_s: float | None = None) -> None:
        tier_logger.removeHandler(self._errors)
        self.call("close", JOB_S if timeout_s is None else timeout_s)

    def look(self) -> None:
        """Take the reports that are there."""
        for done in self.call("done"):
            require(isinstance(done, Done), f"done returned {done!r}, expected Done(…)")
            job = self._jobs.pop(done.job, None)
            if job is None:
                fail(f"{done} is of a job that was reported before, or that `submit` didn't take")
            require(
                len(done.ok) == len(job.keys) and all(type(one) is bool for one in done.ok),
                f"{done} should have a bool for each of {len(job.keys)} keys",
            )
            require(
                done.why in ((None,) if all(done.ok) else get_args(Why)),
                f"{done}: `why` should be None if all is well, otherwise one of "
                f"{', '.join(get_args(Why))}",
            )
            self._reports[job.id] = done
            if job.kind == "store":
                for lent in self.lent.pop(job.id):
                    lent.use_again()


def in_time(call: Callable[[], object], what: str) -> None:
    """Require that a call returns, in a thread of its own."""
    errors: list[BaseException] = []

    def try_it() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=try_it, daemon=True)
    thread.start()
    thread.join(JOB_S)
    require(not thread.is_alive(), f"{what} hasn't returned after {JOB_S:g} s")
    if errors:
        raise errors[0]
