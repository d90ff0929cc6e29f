"""`SimulatedDisk`: a KV tier that takes the time of a disk on a virtual clock, and keeps names.

The executor `simulated` copies nothing, so a frame has no content besides its header, which the
core checks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from pydantic import BaseModel, ByteSize, ConfigDict, Field

from dovetail.api.clock import VirtualClock
from dovetail.api.kv_tier import Done, Frame, FrameKey, Job, KVTier, TierCapabilities, TierContext
from dovetail.errors import ConfigError

HEADER_BYTES = 64  # of a frame, which are kept; what follows is never written


class SimulatedDiskOptions(BaseModel):
    """Options of the KV tier `simulated_disk`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: ByteSize = Field(gt=0, description="Maximum size of all frames, such as 1TiB.")
    read_gbps: float = Field(
        3.0, gt=0, allow_inf_nan=False, description="10^9 bytes per second that are loaded."
    )
    write_gbps: float = Field(
        1.5, gt=0, allow_inf_nan=False, description="10^9 bytes per second that are stored."
    )
    latency_s: float = Field(
        1e-4, ge=0, allow_inf_nan=False, description="Additional time of each job."
    )


class SimulatedDisk(KVTier):
    """Loads and stores one job after the other in each direction. The least recently used frames
    are evicted. Raises `ConfigError` unless the clock is virtual."""

    capabilities = TierCapabilities(max_jobs=16)
    options: SimulatedDiskOptions

    def __init__(self, options: SimulatedDiskOptions, context: TierContext) -> None:
        super().__init__(options, context)
        if not isinstance(context.clock, VirtualClock):
            raise ConfigError(
                "KV tier simulated_disk keeps no content: use it with the executor `simulated`, and "
                "the tier `disk` with others"
            )
        self._rates = {"load": 1e9 * options.read_gbps, "store": 1e9 * options.write_gbps}
        self._free = {"load": 0.0, "store": 0.0}  # when a direction has nothing left to do
        self._jobs: list[tuple[float, Job]] = []  # with the time at which each ends
        # the least recently used first: header and bytes
        self._frames: OrderedDict[FrameKey, tuple[bytes, int]] = OrderedDict()
        self._bytes = 0
        self._closed = False

    def submit(self, job: Job) -> bool:
        if self._closed:
            return False
        ends = self.context.clock.now()
        if job.kind != "find":
            size = sum(len(frame.data) for frame in job.frames)
            ends = max(ends, self._free[job.kind]) + size / self._rates[job.kind]
            self._free[job.kind] = ends
        self._jobs.append((ends + self.options.latency_s, job))
        return True

    def done(self) -> Sequence[Done]:
        now = self.context.clock.now()
        ended = [job for ends, job in self._jobs if ends <= now]
        self._jobs = [(ends, job) for ends, job in self._jobs if ends > now]
        return [self._end(job) for job in ended]

    def _end(self, job: Job) -> Done:
        if job.kind == "find":
            ok = tuple(key in self._frames for key in job.keys)
        elif job.kind == "store":
            ok = tuple(map(self._store, job.frames))
        else:
            ok = tuple(map(self._load, job.frames))
        return Done(job.id, ok, None if all(ok) else "full" if job.kind == "store" else "missing")

    def _store(self, frame: Frame) -> bool:
        size = len(frame.data)
        if size > self.options.size:
            return False
        self._remove(frame.key)
        while self._bytes + size > self.options.size:
            self._remove(next(iter(self._frames)))
        self._frames[frame.key] = bytes(frame.data[:HEADER_BYTES]), size
        self._bytes += size
        return True

    def _load(self, frame: Frame) -> bool:
        header, size = self._frames.get(frame.key, (b"", 0))
        if size != len(frame.data):
            return False
        frame.data[:HEADER_BYTES] = header
        self._frames.move_to_end(frame.key)
        return True

    def _remove(self, key: FrameKey) -> None:
        self._bytes -= self._frames.pop(key, (b"", 0))[1]

    def drop(self, namespace: bytes) -> None:
        for key in [key for key in self._frames if key.namespace == namespace]:
            self._remove(key)

    def close(self, timeout_s: float) -> None:
        self._closed = True
        self._jobs.clear()
