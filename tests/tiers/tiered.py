"""An engine core over the fakes with tiers, and tiers that go wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.api.component import NoOptions
from dovetail.api.executor import Batch
from dovetail.api.kv_tier import Done, FrameKey, Job, KVTier, TierCapabilities, TierContext
from dovetail.engine.tiers.feature import TierFeature
from dovetail.engine.tiers.host_pool import HostPool
from dovetail.engine.tiers.keys import FrameLayout, namespaces
from dovetail.testing import FakeExecutor
from tests.engine.policies import FCFS
from tests.engine.world import RecordingExecutor, Shape, World

FRAME = 8  # tokens


class ToyTier(KVTier):
    """A tier in memory, whose jobs end after a time on the clock. Tests change how it goes wrong."""

    capabilities = TierCapabilities(persistent=True)

    def __init__(self, clock: Any, seconds: float = 0.001) -> None:
        super().__init__(NoOptions(), TierContext(clock, lambda: None))
        self.kept: dict[FrameKey, bytes] = {}
        self.seconds = seconds
        self.jobs: list[tuple[float, Job]] = []
        self.counts = {"find": 0, "store": 0, "load": 0}
        self.closed = False
        self.drops: list[bytes] = []

    def submit(self, job: Job) -> bool:
        self.counts[job.kind] += 1
        self.jobs.append((self.context.clock.now() + self.seconds, job))
        return True

    def done(self) -> Sequence[Done]:
        now = self.context.clock.now()
        ended = [job for at, job in self.jobs if at <= now]
        self.jobs = [(at, job) for at, job in self.jobs if at > now]
        return [Done(job.id, tuple(self.do(job))) for job in ended]

    def do(self, job: Job) -> list[bool]:
        if job.kind == "find":
            return [key in self.kept for key in job.keys]
        if job.kind == "store":
            self.kept |= {frame.key: bytes(frame.data) for frame in job.frames}
            return [True] * len(job.frames)
        return [self.load(frame.key, frame.data) for frame in job.frames]

    def load(self, key: FrameKey, data: memoryview) -> bool:
        if key not in self.kept:
            return False
        data[:] = self.kept[key]
        return True

    def drop(self, namespace: bytes) -> None:
        self.drops.append(namespace)
        self.kept = {key: data for key, data in self.kept.items() if key.namespace != namespace}

    def close(self, timeout_s: float) -> None:
        self.closed = True


class InOrder(RecordingExecutor):
    """Copies may read what those before them have written: a state is restored, and used."""

    def submit(self, batch: Batch) -> int:
        self.sent.append(batch)
        return FakeExecutor.submit(self, batch)


@dataclass
class Tiered:
    """A world with tiers."""

    world: World
    feature: TierFeature
    pool: HostPool
    tiers: Sequence[KVTier]

    @classmethod
    def of(
        cls,
        shape: Shape | None = None,
        *,
        host_bytes: int = 1 << 16,
        tiers: Callable[[Any], Sequence[KVTier]] = lambda clock: (),
        policy: type = FCFS,
        world: World | None = None,
    ) -> Tiered:
        world = world or World(policy, shape, executor=InOrder)
        transfers = world.executor.transfers()
        layout = world.core.books.layout
        frames = FrameLayout(layout, transfers.page_bytes)
        pool = HostPool(transfers.allocate, host_bytes, {group.bytes for group in frames.groups})
        feature = TierFeature(layout, world.kv, transfers, pool, frames, world.clock)
        made = tiers(world.clock)
        named = [(f"tier {number}", tier) for number, tier in enumerate(made)]
        feature.use(named, lambda: namespaces(b"model", layout, "fake"))
        feature.measure(world.core.books.fit)
        assert isinstance(world.core.features, list)
        feature.wait_until_open()
        world.core.features.append(feature)
        world.may_keep = True
        return cls(world, feature, pool, made)

    def settle(self) -> None:
        """Let everything end that was begun."""
        while self.world.core.idle():
            self.world.clock.wait_until(self.world.clock.now() + 0.01)
            self.feature.woken.set()

    def forget_device(self) -> None:
        """Let the prefix cache forget all, as if others had taken its pages."""
        self.world.kv.reset()

    def check(self) -> None:
        """After `settle`."""
        self.world.check_end()
        assert not self.world.kv.counts.held, "pages are held by nobody"
        self.pool.check_integrity()
