"""`TierJobs`: the jobs of one tier, with their queue and deadlines, and the switch-off of failing
tiers.

A tier that misses a deadline keeps the job's frames until it reports the job. A tier that fails
three times in a row is switched off for a while, for stores or for the other jobs, since a
read-only medium may still be loaded from: stores are then dropped, or finds and loads are misses.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Literal

from dovetail.api.clock import Clock
from dovetail.api.kv_tier import Done, Frame, FrameKey, Job, KVTier
from dovetail.engine.tiers.host_pool import HostFrame, HostPool
from dovetail.engine.tiers.keys import FrameName, header, read_header
from dovetail.engine.tiers.stats import TierStats

logger = logging.getLogger("dovetail")

JOB_FRAMES = 8  # maximum frames of a store or load
STORE_S = 60.0  # timeout of a store
QUEUE_SHARE = 0.25  # maximum share of the host pool, or one frame, that waits to be stored
KEPT_NAMES = 1 << 17  # maximum number of names known to be in a tier
FAILURES = 3  # consecutive failures that switch a tier off
OFF_S = 30.0  # the first time; doubled each time in a row
LONGEST_OFF_S = 600.0

Then = Callable[[Sequence[bool]], None]


@dataclass(slots=True, eq=False)
class _Job:
    kind: Literal["find", "store", "load"]
    names: Sequence[FrameName]
    frames: Sequence[HostFrame]
    then: Then | None
    begun: float
    deadline: float
    load_begun: float  # of a load, on `_LoadTime`
    late: bool = False
    outdated: bool = False  # the tier has dropped all since


class _LoadTime:
    """Time shared by the loads that run at the same time: of n loads, each is charged with 1 / n of
    each second. Bytes of a load by its seconds are then the rate of the medium, however many loads
    share it."""

    def __init__(self, now: float) -> None:
        self._running = 0
        self._charged = 0.0  # seconds to each load that has run since the begin
        self._at = now

    def change(self, now: float, running: int) -> float:
        """Add `running` to the number of loads that run. Return the seconds charged by now to a
        load since the begin."""
        if self._running:
            self._charged += (now - self._at) / self._running
        self._at = now
        self._running += running
        return self._charged


@dataclass(slots=True)
class _Switch:
    """Switches off what fails `FAILURES` times in a row, for longer each time."""

    failures: int = 0  # consecutive
    off_until: float = 0.0
    off_s: float = OFF_S  # the next time

    def worked(self) -> None:
        self.failures = 0
        self.off_s = OFF_S

    def failed(self, now: float) -> float:
        """Count a failure, unless it is off. Return the seconds for which this switches it off."""
        if now < self.off_until:
            return 0.0
        self.failures += 1
        if self.failures < FAILURES:
            return 0.0
        off_s = self.off_s
        self.failures = 0
        self.off_until = now + off_s
        self.off_s = min(2 * off_s, LONGEST_OFF_S)
        return off_s


class TierJobs:
    """The jobs of one tier. All methods return at once."""

    def __init__(
        self,
        name: str,
        tier: KVTier,
        pool: HostPool,
        clock: Clock,
        ids: count[int],
        stats: TierStats,
    ) -> None:
        """`name`: display name. `ids`: ids of jobs."""
        self.name = name
        self.tier = tier
        self.namespaces: Sequence[bytes] = ()  # of groups; none: the tier isn't used yet
        self.rate = 0.0  # bytes per second of all loads, a running mean; 0: not measured
        self._pool = pool
        self._clock = clock
        self._ids = ids
        self._stats = stats
        self._queue: deque[HostFrame] = deque()  # to be stored; each is held
        self._queued_bytes = 0  # in the queue and in store jobs
        self._jobs: dict[int, _Job] = {}
        self._kept: OrderedDict[FrameName, None] = OrderedDict()
        self._load_time = _LoadTime(clock.now())
        self._storing = _Switch()
        self._reading = _Switch()  # of finds and loads

    @property
    def pending(self) -> bool:
        """True while frames wait to be stored, or are being stored and not late."""
        return bool(self._queue) or any(
            job.kind == "store" and not job.late for job in self._jobs.values()
        )

    def has(self, name: FrameName) -> bool:
        """Return True if the tier is known to have that frame."""
        return name in self._kept

    def lost(self, name: FrameName) -> None:
        """Forget that the tier has a frame, which was damaged, so that it is stored again."""
        self._kept.pop(name, None)

    def is_used(self, now: float, *, stores: bool = False) -> bool:
        """Return True unless the tier is off for finds and loads, or for `stores`."""
        return bool(self.namespaces) and now >= self._switch(stores).off_until

    def _switch(self, stores: bool) -> _Switch:
        return self._storing if stores else self._reading

    @property
    def _hangs(self) -> bool:
        """True if the tier has its maximum number of jobs, and all are late."""
        return self.free_jobs <= 0 and all(job.late for job in self._jobs.values())

    # Jobs

    def store(self, frame: HostFrame, now: float) -> None:
        """Queue a named frame to be stored, or drop it if the queue is full or the tier off."""
        if frame.name is None or frame.name in self._kept:
            return
        most = max(frame.bytes, QUEUE_SHARE * self._pool.limit)
        if not self.is_used(now, stores=True):
            self._stats.dropped_frames["unavailable"] += 1
        elif self._queued_bytes + frame.bytes > most:
            self._stats.dropped_frames["slow"] += 1
        else:
            self._pool.hold(frame)
            self._queue.append(frame)
            self._queued_bytes += frame.bytes

    @property
    def loading_bytes(self) -> int:
        """Bytes of the frames that are being loaded, without those of late jobs."""
        loads = [job for job in self._jobs.values() if job.kind == "load" and not job.late]
        return sum(frame.bytes for job in loads for frame in job.frames)

    @property
    def free_jobs(self) -> int:
        """Number of jobs that the tier takes at the moment."""
        return self.tier.capabilities.max_jobs - len(self._jobs)

    def find(self, names: Sequence[FrameName], now: float, within_s: float, then: Then) -> bool:
        """Ask which of these frames the tier has. Return False if it can't be asked now."""
        return self._begin("find", names, (), now, within_s, then)

    def load(
        self,
        names: Sequence[FrameName],
        frames: Sequence[HostFrame],
        now: float,
        within_s: float,
        then: Then,
    ) -> bool:
        """Load frames into memory that the caller holds. The caller keeps the hold if this returns
        False, and on frames that `then` reports as loaded; others are released."""
        return self._begin("load", names, frames, now, within_s, then)

    def _begin(
        self,
        kind: Literal["find", "store", "load"],
        names: Sequence[FrameName],
        frames: Sequence[HostFrame],
        now: float,
        within_s: float,
        then: Then | None,
    ) -> bool:
        if not self.is_used(now, stores=kind == "store") or self.free_jobs <= 0:
            return False
        keys = tuple(map(self._key, names))
        number = next(self._ids)
        lent = tuple(
            Frame(key, frame.data.toreadonly() if kind == "store" else frame.data)
            for key, frame in zip(keys, frames, strict=False)
        )
        job = _Job(kind, names, frames, then, now, now + within_s, 0.0)
        submitted = Job(number, kind, keys, lent, job.deadline)
        if not self._call(partial(self.tier.submit, submitted), now):
            return False
        self._jobs[number] = job
        if kind == "load":
            job.load_begun = self._load_time.change(now, 1)
        return True

    def _key(self, name: FrameName) -> FrameKey:
        return FrameKey(self.namespaces[name.group], name.chain)

    # Their progress

    def poll(self, now: float) -> None:
        """Process reports, time out late jobs, and begin stores."""
        if self._jobs:
            reports: Sequence[Done] = self._call(self._reports, now) or ()
            for done in reports:
                job = self._jobs.pop(done.job, None)
                if job is not None:
                    self._ended(job, done, now)
            for job in [*self._jobs.values()]:
                if not job.late and now >= job.deadline:
                    job.late = True
                    if job.kind == "load":
                        self._load_time.change(now, -1)
                    why = f"a {job.kind} took more than {job.deadline - job.begun:g} s"
                    self._failed(now, why, stores=job.kind == "store")
                    if job.then is not None:
                        job.then([False] * len(job.names))
        while self._queue and self._store(now):
            pass

    def _reports(self) -> list[Done]:
        """Return the tier's reports. Raises if one is malformed: its job then ends late."""
        return [
            Done(int(done.job), tuple(bool(ok) for ok in done.ok), done.why)
            for done in self.tier.done()
        ]

    def _call(self, method: Callable[[], Any], now: float) -> Any:
        """Call a method of the tier. An exception counts as a failure, and gives None."""
        try:
            return method()
        except Exception as error:
            why = f"it raised {type(error).__name__}: {error}"
            self._failed(now, why, stores=False)
            return None

    def _ended(self, job: _Job, done: Done, now: float) -> None:
        ok = list(done.ok) if len(done.ok) == len(job.names) else [False] * len(job.names)
        if job.late:
            ok = [False] * len(job.names)
        elif done.why == "unavailable" or len(done.ok) != len(job.names):
            self._failed(now, "it reports that it is unavailable", stores=job.kind == "store")
        else:
            self._switch(job.kind == "store").worked()
        if job.kind == "store":
            self._stored(job, ok)
        elif job.kind == "load":
            ok = self._loaded(job, ok, now)
        if job.then is not None and not job.late:
            job.then(ok)
        for name, here in zip(job.names, ok, strict=True):
            self._note(name, here and not job.outdated)

    def _stored(self, job: _Job, ok: Sequence[bool]) -> None:
        for frame, stored in zip(job.frames, ok, strict=True):
            self._queued_bytes -= frame.bytes
            if stored:
                self._stats.stored_frames[self.name] += 1
                self._stats.stored_bytes[self.name] += frame.bytes
            else:
                self._stats.dropped_frames["refused"] += 1
            self._pool.release(frame)

    def _loaded(self, job: _Job, ok: Sequence[bool], now: float) -> list[bool]:
        """Release frames with unusable headers. Return which frames are usable."""
        sound = []
        loaded_bytes = 0
        for name, frame, loaded in zip(job.names, job.frames, ok, strict=True):
            found = read_header(frame.data, self._key(name)) if loaded else None
            if loaded and found is None:
                self._stats.damaged(self.name)
            if found is None:
                self._pool.release(frame)
            else:
                frame.seed, frame.checksum = found
                loaded_bytes += frame.bytes
                self._stats.loaded_frames[self.name] += 1
            sound.append(found is not None)
        self._stats.loaded_bytes[self.name] += loaded_bytes
        if job.late:
            return sound
        seconds = self._load_time.change(now, -1) - job.load_begun
        self._stats.load_s[self.name] += seconds
        if loaded_bytes and seconds > 0:
            rate = loaded_bytes / seconds
            self.rate = rate if not self.rate else 0.7 * self.rate + 0.3 * rate
        return sound

    def _note(self, name: FrameName, here: bool) -> None:
        if not here:
            self._kept.pop(name, None)
            return
        self._kept[name] = None
        self._kept.move_to_end(name)
        if len(self._kept) > KEPT_NAMES:
            self._kept.popitem(last=False)

    def _failed(self, now: float, why: str, *, stores: bool) -> None:
        off_s = self._switch(stores).failed(now)
        if off_s:
            logger.warning(
                "KV tier %s is off for %g s, since %s: %s",
                self.name,
                off_s,
                why,
                "nothing is stored there" if stores else "K and V are computed meanwhile",
            )
            self._stats.off[self.name] += 1

    def _store(self, now: float) -> bool:
        """Begin the next store. Return False if it must wait."""
        if not self.is_used(now, stores=True) or self._hangs:
            self._drop_queue()
            return False
        frames: list[HostFrame] = []
        while self._queue and len(frames) < JOB_FRAMES:
            frame = self._queue.popleft()
            if frame.name is None or frame.name in self._kept:  # dropped, or stored meanwhile
                self._unqueue(frame)
            else:
                frames.append(frame)
        names = [frame.name for frame in frames if frame.name is not None]
        for frame, name in zip(frames, names, strict=True):
            top = header(self._key(name), frame.bytes, frame.seed, frame.checksum)
            frame.data[: len(top)] = top
        if not frames or self._begin("store", names, frames, now, STORE_S, None):
            return bool(frames)
        if self.free_jobs <= 0:
            self._queue.extendleft(reversed(frames))
            return False
        self._stats.dropped_frames["refused"] += len(frames)
        for frame in frames:
            self._unqueue(frame)
        return True

    def _unqueue(self, frame: HostFrame) -> None:
        self._queued_bytes -= frame.bytes
        self._pool.release(frame)

    def _drop_queue(self) -> None:
        self._stats.dropped_frames["unavailable"] += len(self._queue)
        while self._queue:
            self._unqueue(self._queue.popleft())

    # Its end

    def reset(self, now: float) -> None:
        """Forget all frames of this engine's namespaces, and drop them from the tier."""
        self._drop_queue()
        self._kept.clear()
        for namespace in self.namespaces:
            self._call(partial(self.tier.drop, namespace), now)
        for job in self._jobs.values():
            job.outdated = True

    def close(self, timeout_s: float) -> None:
        """Store queued frames, for at most `timeout_s`, and close the tier."""
        until = time.monotonic() + timeout_s
        try:
            while self.pending and (left := until - time.monotonic()) > 0:
                now = self._clock.now()
                self.poll(now)
                self._clock.wait_until(now + min(left, 0.001))
        finally:
            left = max(0.1, until - time.monotonic())
            self._call(partial(self.tier.close, left), self._clock.now())
