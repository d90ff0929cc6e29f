"""KV tiers with one thing wrong."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ByteSize, ConfigDict

from dovetail.api.blocking_tier import BlockingTier
from dovetail.api.component import NoOptions
from dovetail.api.kv_tier import Done, Frame, FrameKey, Job, TierCapabilities, TierContext, Why
from dovetail_kv_tiers.disk import DiskOptions, DiskTier
from dovetail_kv_tiers.frame_folder import FrameFolder
from tests.conformance.mutants import mutant

FOLDER = {"path": "frames", "size": "1GiB"}
LATE_S = 0.03


class Inside:
    """The attributes of `BlockingTier`, which subclasses don't replace by accident."""

    def __init__(self, tier: BlockingTier) -> None:
        vars(self)["tier"] = tier

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tier, f"_BlockingTier__{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.tier, f"_BlockingTier__{name}", value)


class InMemory(BlockingTier):
    """Right: frames in a dictionary."""

    threads = 2
    options: NoOptions

    def __init__(self, options: BaseModel, context: TierContext) -> None:
        super().__init__(options, context)
        self.kept: dict[Any, bytes] = {}

    def name(self, key: FrameKey) -> Any:
        return key

    def find_frame(self, key: FrameKey) -> Why | None:
        return None if self.name(key) in self.kept else "missing"

    def store_frame(self, frame: Frame) -> Why | None:
        self.kept[self.name(frame.key)] = bytes(frame.data)
        return None

    def load_frame(self, frame: Frame) -> Why | None:
        data = self.kept.get(self.name(frame.key))
        if data is None:
            return "missing"
        frame.data[:] = data
        return None

    def forget(self, namespace: bytes) -> None:
        self.kept = {key: data for key, data in self.kept.items() if key.namespace != namespace}


# What is returned


@mutant(caught_by="kv_tier.round_trip")
class LoadsAPart(InMemory):
    def load_frame(self, frame: Frame) -> Why | None:
        data = self.kept.get(frame.key)
        half = len(frame.data) // 2
        frame.data[:half] = (data or bytes(half))[:half]
        return None if data else "missing"


@mutant(caught_by="kv_tier.round_trip")
class LoadsTheFrameOfAnotherKey(InMemory):
    def load_frame(self, frame: Frame) -> Why | None:
        alike = [data for data in self.kept.values() if len(data) == len(frame.data)]
        frame.data[:] = alike[-1]
        return None


@mutant(caught_by="kv_tier.round_trip")
class LoadsNumbersOfEightBytesFromAnAlignedPlace(InMemory):
    def store_frame(self, frame: Frame) -> Why | None:
        self.kept[frame.key] = bytes(frame.data[: len(frame.data) // 4096 * 4096 or None])
        return None

    def load_frame(self, frame: Frame) -> Why | None:
        data = self.kept[frame.key]
        frame.data[: len(data)] = data
        return None


@mutant(caught_by="kv_tier.round_trip")
class KeepsTheFirstFrameOfAJob(InMemory):
    def store_frame(self, frame: Frame) -> Why | None:
        if len(self.kept) < 3:
            super().store_frame(frame)
        return None


@mutant(caught_by="kv_tier.missing")
class FindsAnything(InMemory):
    def find_frame(self, key: FrameKey) -> Why | None:
        return None


@mutant(caught_by="kv_tier.missing")
class LoadsAnything(InMemory):
    def load_frame(self, frame: Frame) -> Why | None:
        super().load_frame(frame)
        return None


class Rewritten(InMemory):
    """Reports that `rewritten` changes."""

    def done(self) -> Sequence[Done]:
        return [another for one in super().done() for another in self.rewritten(one)]

    def rewritten(self, done: Done) -> Iterable[Done]:
        return [done]


@mutant(caught_by="kv_tier.missing")
class ReportsAJobByItsWorstFrame(Rewritten):
    def rewritten(self, done: Done) -> Iterable[Done]:
        return [replace(done, ok=(all(done.ok),) * len(done.ok), why=done.why)]


@mutant(caught_by="kv_tier.missing")
class ReportsAJobByItsBestFrame(Rewritten):
    def rewritten(self, done: Done) -> Iterable[Done]:
        any_ok = any(done.ok)
        return [replace(done, ok=(any_ok,) * len(done.ok), why=None if any_ok else done.why)]


# Names


@mutant(caught_by="kv_tier.names")
class MixesNamespaces(InMemory):
    def name(self, key: FrameKey) -> Any:
        return key.chain

    def forget(self, namespace: bytes) -> None: ...


@mutant(caught_by="kv_tier.names")
class ReadsEightBytesOfAChain(InMemory):
    def name(self, key: FrameKey) -> Any:
        return key.namespace, key.chain[:8]

    def forget(self, namespace: bytes) -> None: ...


@mutant(caught_by="kv_tier.names")
class ReadsAChainToItsFirstNul(InMemory):
    def name(self, key: FrameKey) -> Any:
        return key.namespace, key.chain.partition(b"\0")[0]

    def forget(self, namespace: bytes) -> None: ...


@mutant(caught_by="kv_tier.names")
class NamesAsText(InMemory):
    def name(self, key: FrameKey) -> Any:
        return key.namespace, key.chain.decode(errors="replace").strip().lower()

    def forget(self, namespace: bytes) -> None: ...


# Storing again


@mutant(caught_by="kv_tier.again")
class RefusesWhatItHas(InMemory):
    def store_frame(self, frame: Frame) -> Why | None:
        return "full" if frame.key in self.kept else super().store_frame(frame)


@mutant(caught_by="kv_tier.replaces")
class KeepsWhatItHas(InMemory):
    def store_frame(self, frame: Frame) -> Why | None:
        return None if frame.key in self.kept else super().store_frame(frame)


@mutant(caught_by="kv_tier.again")
class Appends(InMemory):
    def store_frame(self, frame: Frame) -> Why | None:
        self.kept[frame.key] = bytes(frame.data) + self.kept.get(frame.key, b"")
        return None


@mutant(caught_by="kv_tier.again")
class RemovesWhatItReplaces(InMemory):
    def store_frame(self, frame: Frame) -> Why | None:
        self.kept.pop(frame.key, None)
        time.sleep(LATE_S)
        return super().store_frame(frame)


# Reports


@mutant(caught_by="kv_tier.reports")
class ReportsTwice(Rewritten):
    def rewritten(self, done: Done) -> Iterable[Done]:
        return [done, done]


@mutant(caught_by="kv_tier.reports", soon=True)
class ReportsNoLateJob(InMemory):
    def submit(self, job: Job) -> bool:
        late = job.deadline is not None and job.deadline < self.context.clock.now()
        return late or super().submit(job)


@mutant(caught_by="kv_tier.reports")
class ReportsOneBoolForAll(Rewritten):
    def rewritten(self, done: Done) -> Iterable[Done]:
        return [replace(done, ok=(all(done.ok),))]


@mutant(caught_by="kv_tier.reports")
class GivesAReasonOfItsOwn(Rewritten):
    def rewritten(self, done: Done) -> Iterable[Done]:
        return [replace(done, why=done.why or "missing")]


@mutant(caught_by="kv_tier.reports")
class ReportsOneJobOfEachCall(InMemory):
    """The others are lost."""

    def done(self) -> Sequence[Done]:
        time.sleep(LATE_S)
        return super().done()[:1]


@mutant(caught_by="kv_tier.wake")
class NeverWakes(InMemory):
    def __init__(self, options: BaseModel, context: TierContext) -> None:
        super().__init__(options, replace(context, wake=lambda: None))


@mutant(caught_by="kv_tier.wake")
class WakesBeforeItReports(InMemory):
    def __init__(self, options: BaseModel, context: TierContext) -> None:
        super().__init__(options, replace(context, wake=lambda: None))
        self.wakes = context.wake

    def find_frame(self, key: FrameKey) -> Why | None:
        self.wakes()
        time.sleep(LATE_S)
        return super().find_frame(key)


@mutant(caught_by="kv_tier.busy")
class CountsCancelledJobsForEver(InMemory):
    def __init__(self, options: BaseModel, context: TierContext) -> None:
        super().__init__(options, context)
        self.cancelled = 0

    def cancel(self, job: int) -> None:
        self.cancelled += 1
        super().cancel(job)

    def submit(self, job: Job) -> bool:
        return self.cancelled < self.capabilities.max_jobs and super().submit(job)


@mutant(caught_by="kv_tier.busy")
class ReportsWhatItRefused(InMemory):
    def submit(self, job: Job) -> bool:
        taken = super().submit(job)
        if not taken:
            Inside(self).reports.append(Done(job.id, (False,) * len(job.keys), "unavailable"))
        return taken


@mutant(caught_by="kv_tier.busy")
class TakesOneJobAtMost(InMemory):
    capabilities = TierCapabilities(max_jobs=0)

    def submit(self, job: Job) -> bool:
        return not Inside(self).jobs and super().submit(job)


@mutant(caught_by="kv_tier.cancel")
class ForgetsCancelledJobs(InMemory):
    def cancel(self, job: int) -> None:
        with Inside(self).changed:
            Inside(self).jobs.pop(job, None)
            Inside(self).urgent.clear()
            Inside(self).reports[:] = [done for done in Inside(self).reports if done.job != job]


@mutant(caught_by="kv_tier.cancel")
class KnowsTheJobsItCancels(InMemory):
    def cancel(self, job: int) -> None:
        assert Inside(self).jobs[job].left
        super().cancel(job)


# Memory that was lent


class Later(InMemory):
    """Has a thread that does things later."""

    def __init__(self, options: BaseModel, context: TierContext) -> None:
        super().__init__(options, context)
        self.timers: list[threading.Timer] = []

    def later(self, call: Any, *arguments: Any) -> None:
        timer = threading.Timer(LATE_S, call, arguments)
        timer.start()
        self.timers.append(timer)

    def close(self, timeout_s: float) -> None:
        super().close(timeout_s)
        for timer in self.timers:
            timer.join()


@mutant(caught_by="kv_tier.lent")
class ReportsAStoreBeforeItReads(Later):
    def store_frame(self, frame: Frame) -> Why | None:
        self.later(super().store_frame, frame)
        return None


@mutant(caught_by="kv_tier.lent")
class KeepsTheMemoryItself(InMemory):
    def store_frame(self, frame: Frame) -> Why | None:
        self.kept[frame.key] = frame.data  # type: ignore[assignment]
        return None


@mutant(caught_by="kv_tier.lent")
class ReportsALoadBeforeItWrites(Later):
    def load_frame(self, frame: Frame) -> Why | None:
        why = super().load_frame(frame)
        self.later(super().load_frame, frame)
        return why


@mutant(caught_by="kv_tier.lent")
class WritesWhatWasCancelled(Later):
    def cancel(self, job: int) -> None:
        progress = Inside(self).jobs.get(job)
        super().cancel(job)
        for frame in () if progress is None else progress.job.frames:
            self.later(InMemory.load_frame, self, frame)


# Dropping


@mutant(caught_by="kv_tier.drop")
class DropsNothing(InMemory):
    def forget(self, namespace: bytes) -> None: ...


@mutant(caught_by="kv_tier.drop")
class DropsAllNamespaces(InMemory):
    def forget(self, namespace: bytes) -> None:
        self.kept.clear()


@mutant(caught_by="kv_tier.drop")
class DropsOnlyOnce(InMemory):
    def __init__(self, options: BaseModel, context: TierContext) -> None:
        super().__init__(options, context)
        self.dropped: set[bytes] = set()

    def drop(self, namespace: bytes) -> None:
        if namespace not in self.dropped:
            self.dropped.add(namespace)
            super().drop(namespace)


@mutant(caught_by="kv_tier.drop")
class DropsWhatIsStoredLater(InMemory):
    def __init__(self, options: BaseModel, context: TierContext) -> None:
        super().__init__(options, context)
        self.dropped: set[bytes] = set()

    def drop(self, namespace: bytes) -> None:
        self.dropped.add(namespace)
        super().drop(namespace)

    def store_frame(self, frame: Frame) -> Why | None:
        why = super().store_frame(frame)
        if frame.key.namespace in self.dropped:
            self.dropped.discard(frame.key.namespace)
            self.forget(frame.key.namespace)
        return why


@mutant(caught_by="kv_tier.drop")
class TakesNothingOfADroppedNamespace(InMemory):
    def __init__(self, options: BaseModel, context: TierContext) -> None:
        super().__init__(options, context)
        self.dropped: set[bytes] = set()

    def forget(self, namespace: bytes) -> None:
        self.dropped.add(namespace)
        super().forget(namespace)

    def store_frame(self, frame: Frame) -> Why | None:
        return "full" if frame.key.namespace in self.dropped else super().store_frame(frame)


# Threads and time


@mutant(caught_by="kv_tier.any_thread")
class BelongsToAThread(InMemory):
    def __init__(self, options: BaseModel, context: TierContext) -> None:
        super().__init__(options, context)
        self.owner = threading.get_ident()

    def submit(self, job: Job) -> bool:
        if threading.get_ident() != self.owner:
            raise RuntimeError("made in another thread")
        return super().submit(job)


@mutant(caught_by="kv_tier.returns", options=FOLDER)
class LooksForFilesItself(DiskTier):
    def submit(self, job: Job) -> bool:
        Path("frames").mkdir(exist_ok=True)
        return super().submit(job)


@mutant(caught_by="kv_tier.returns")
class SleepsInDone(InMemory):
    def done(self) -> Sequence[Done]:
        time.sleep(0.001)
        return super().done()


@mutant(caught_by="kv_tier.returns", options=FOLDER, soon=True)
class HoldsItsLockWhileItStores(DiskTier):
    def store_frame(self, frame: Frame) -> Why | None:
        with Inside(self).changed:
            return super().store_frame(frame)


@mutant(caught_by="kv_tier.returns", options=FOLDER)
class DropsWhereItIsCalled(DiskTier):
    def drop(self, namespace: bytes) -> None:
        self._folder.forget(namespace)


@mutant(caught_by="kv_tier.returns_at_first", options=FOLDER)
class HoldsItsLockUntilThereIsAFile(DiskTier):
    used = False

    def store_frame(self, frame: Frame) -> Why | None:
        if self.used:
            return super().store_frame(frame)
        with Inside(self).changed:
            why = super().store_frame(frame)
        self.used = True
        return why


# A medium that fails, or is full


@mutant(caught_by="kv_tier.failing", options=FOLDER)
class LosesJobsByErrors(DiskTier):
    """A frame's error leaves its job without a report."""

    def done(self) -> Sequence[Done]:
        return [done for done in super().done() if done.why != "unavailable"]


@mutant(caught_by="kv_tier.failing", options=FOLDER)
class GivesUpAfterAnError(DiskTier):
    broken = False

    def done(self) -> Sequence[Done]:
        reports = super().done()
        self.broken = self.broken or any(done.why == "unavailable" for done in reports)
        return reports

    def store_frame(self, frame: Frame) -> Why | None:
        return "unavailable" if self.broken else super().store_frame(frame)


@mutant(caught_by="kv_tier.failing", options=FOLDER)
class RaisesTheErrorLater(DiskTier):
    def done(self) -> Sequence[Done]:
        reports = super().done()
        if any(done.why == "unavailable" for done in reports):
            raise OSError("the medium has failed")
        return reports


class InPlace(DiskTier):
    """Writes a file piece by piece where it is looked for, and believes its name."""

    def __init__(self, options: Any, context: TierContext) -> None:
        super().__init__(options, replace(context, frame_bytes=()))

    def path(self, key: FrameKey) -> Path:
        return Path(self._folder._path(key))

    def write(self, path: Path, data: memoryview) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb", buffering=0) as file:
            for begin in range(0, len(data), 2**16):
                file.write(data[begin : begin + 2**16])
                time.sleep(0.0005)

    def store_frame(self, frame: Frame) -> Why | None:
        self.write(self.path(frame.key), frame.data)
        return None

    def load_frame(self, frame: Frame) -> Why | None:
        try:
            data = self.path(frame.key).read_bytes()
        except FileNotFoundError:
            return "missing"
        frame.data[: len(data)] = data
        return None


@mutant(caught_by="kv_tier.no_room", options=FOLDER)
class LeavesAPart(InPlace):
    pass


@mutant(caught_by="kv_tier.no_room", options=FOLDER)
class CallsAPartStored(InPlace):
    def store_frame(self, frame: Frame) -> Why | None:
        try:
            return super().store_frame(frame)
        except OSError:
            return None


@mutant(caught_by="kv_tier.killed", options=FOLDER)
class WritesInPlace(InPlace):
    pass


@mutant(caught_by="kv_tier.killed", options=FOLDER, soon=True)
class WritesWhenItIsClosed(DiskTier):
    def __init__(self, options: Any, context: TierContext) -> None:
        super().__init__(options, context)
        self.held: dict[FrameKey, bytes] = {}

    def find_frame(self, key: FrameKey) -> Why | None:
        return None if key in self.held else super().find_frame(key)

    def store_frame(self, frame: Frame) -> Why | None:
        self.held[frame.key] = bytes(frame.data)
        return None

    def load_frame(self, frame: Frame) -> Why | None:
        if frame.key not in self.held:
            return super().load_frame(frame)
        frame.data[:] = self.held[frame.key]
        return None

    def close(self, timeout_s: float) -> None:
        super().close(timeout_s)
        for key, data in self.held.items():
            self._folder.store(key, memoryview(data))


# Sizes


class Sized(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    size: ByteSize = ByteSize(2**40)


SMALL = {"small": {"size": "1MiB"}}


@mutant(caught_by="kv_tier.bounded", settings=SMALL)
class GrowsForEver(InMemory):
    options: Sized  # type: ignore[assignment]


@mutant(caught_by="kv_tier.bounded", settings=SMALL)
class CountsOnlyFramesOfThisProcess(DiskTier):
    """It doesn't see those that it finds."""

    options: Sized  # type: ignore[assignment]

    def __init__(self, options: Any, context: TierContext) -> None:
        super().__init__(DiskOptions(path="frames", size=options.size), context)
        self.room = int(options.size)

    def store_frame(self, frame: Frame) -> Why | None:
        self.room -= len(frame.data)
        return "full" if self.room < 0 else self._write(frame)

    def _write(self, frame: Frame) -> Why | None:
        self._folder.limit = 2**40
        return super().store_frame(frame)


@mutant(caught_by="kv_tier.bounded", settings=SMALL)
class EmptiesItselfWhenItIsFull(InMemory):
    options: Sized  # type: ignore[assignment]

    def store_frame(self, frame: Frame) -> Why | None:
        if (len(self.kept) + 1) * len(frame.data) > self.options.size:
            self.kept = {}
            self.options = Sized(size=ByteSize(1))
            return "full"
        return super().store_frame(frame)


@mutant(caught_by="kv_tier.bounded", settings=SMALL)
class RemovesUntilThereIsRoom(InMemory):
    """A frame that is larger than all has none."""

    options: Sized  # type: ignore[assignment]

    def store_frame(self, frame: Frame) -> Why | None:
        while self.kept and (len(self.kept) + 1) * len(frame.data) > self.options.size:
            del self.kept[next(iter(self.kept))]
        return super().store_frame(frame)


@mutant(caught_by="kv_tier.memory")
class KeepsReports(InMemory):
    def __init__(self, options: BaseModel, context: TierContext) -> None:
        super().__init__(options, context)
        self.past: list[Done] = []

    def done(self) -> Sequence[Done]:
        reports = super().done()
        self.past += reports
        return reports


@mutant(caught_by="kv_tier.memory")
class RemembersDroppedNamespaces(InMemory):
    def __init__(self, options: BaseModel, context: TierContext) -> None:
        super().__init__(options, context)
        self.dropped: dict[bytes, list[FrameKey]] = {}

    def forget(self, namespace: bytes) -> None:
        self.dropped[namespace] = [key for key in self.kept if key.namespace == namespace] * 9
        super().forget(namespace)


@mutant(caught_by="kv_tier.keeps_new", settings=SMALL)
class RemovesTheNewest(InMemory):
    options: Sized  # type: ignore[assignment]

    def store_frame(self, frame: Frame) -> Why | None:
        super().store_frame(frame)
        while sum(map(len, self.kept.values())) > self.options.size:
            del self.kept[[*self.kept][-1]]
        return None


@mutant(caught_by="kv_tier.reasons")
class RaisesForAMissingFrame(InMemory):
    def load_frame(self, frame: Frame) -> Why | None:
        frame.data[:] = self.kept[frame.key]
        return None


@mutant(caught_by="kv_tier.reasons", settings=SMALL)
class RaisesWithoutRoom(InMemory):
    options: Sized  # type: ignore[assignment]

    def store_frame(self, frame: Frame) -> Why | None:
        if len(frame.data) > self.options.size:
            raise OSError("full")
        return super().store_frame(frame)


@mutant(caught_by="kv_tier.starts")
class LooksForItsServerAtOnce(InMemory):
    def __init__(self, options: BaseModel, context: TierContext) -> None:
        super().__init__(options, context)
        socket.getaddrinfo("127.0.0.1", 1)


# The end


@mutant(caught_by="kv_tier.close")
class LeavesAThread(InMemory):
    def __init__(self, options: BaseModel, context: TierContext) -> None:
        super().__init__(options, context)
        timer = threading.Timer(2.0, self.done)
        timer.daemon = True
        timer.start()


@mutant(caught_by="kv_tier.close")
class TakesJobsAfterClose(InMemory):
    def submit(self, job: Job) -> bool:
        return super().submit(job) or Inside(self).closed


@mutant(caught_by="kv_tier.close")
class ClosesOnce(InMemory):
    def close(self, timeout_s: float) -> None:
        if Inside(self).closed:
            raise RuntimeError("closed before")
        super().close(timeout_s)


@mutant(caught_by="kv_tier.close", options=FOLDER)
class LeavesAFileOpen(DiskTier):
    def close(self, timeout_s: float) -> None:
        self.left = os.open(self.options.path, os.O_RDONLY)
        super().close(timeout_s)


@mutant(caught_by="kv_tier.close_hung", options=FOLDER)
class WaitsForItsThreads(DiskTier):
    def close(self, timeout_s: float) -> None:
        super().close(timeout_s)
        for worker in Inside(self).workers:
            worker.join()


# What persistent tiers promise


@mutant(caught_by="kv_tier.restart")
class ClaimsToBePersistent(InMemory):
    capabilities = TierCapabilities(persistent=True)


@mutant(caught_by="kv_tier.restart", options=FOLDER)
class DropsForThisProcess(DiskTier):
    """Dropped frames are found again after a restart."""

    def __init__(self, options: Any, context: TierContext) -> None:
        super().__init__(options, context)
        self.dropped: set[bytes] = set()

    def find_frame(self, key: FrameKey) -> Why | None:
        return "missing" if key.namespace in self.dropped else super().find_frame(key)

    def forget(self, namespace: bytes) -> None:
        self.dropped.add(namespace)


@mutant(caught_by="kv_tier.together", options=FOLDER)
class SharesATemporaryName(InPlace):
    """Two engines write to one file, and both rename it."""

    def store_frame(self, frame: Frame) -> Why | None:
        path = self.path(frame.key)
        temporary = path.with_suffix(".tmp")
        self.write(temporary, frame.data)
        temporary.rename(path)
        return None


@mutant(caught_by="kv_tier.together", options={**FOLDER, "shared": True})
class HasAFolderOfItsOwn(DiskTier):
    def __init__(self, options: Any, context: TierContext) -> None:
        super().__init__(options, context)
        folder = Path("frames", uuid4().hex)
        folder.mkdir()
        self._folder = FrameFolder(folder, options.size)


# The process


@mutant(caught_by="kv_tier.process_untouched", soon=True)
class SetsTheTimeoutOfSockets(InMemory):
    def __init__(self, options: BaseModel, context: TierContext) -> None:
        super().__init__(options, context)
        socket.setdefaulttimeout(5.0)


@mutant(caught_by="kv_tier.first_use")
class SetsTheUmaskOnce(InMemory):
    def __init__(self, options: BaseModel, context: TierContext) -> None:
        super().__init__(options, context)
        os.umask(0o077)
