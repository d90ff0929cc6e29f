"""Right KV tiers in styles of their own."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Sequence

from pydantic import BaseModel

from dovetail.api.component import NoOptions
from dovetail.api.kv_tier import Done, FrameKey, Job, KVTier, TierCapabilities, TierContext

WAIT_S = 0.002


class OnALoop(KVTier):
    """Does each job in a task of an asyncio loop."""

    capabilities = TierCapabilities(max_jobs=3)
    options: NoOptions

    def __init__(self, options: BaseModel, context: TierContext) -> None:
        super().__init__(options, context)
        self.frames: dict[FrameKey, bytes] = {}
        self.reports = queue.SimpleQueue[Done]()
        self.running: dict[int, asyncio.Task[None]] = {}
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.is_open = True

    def submit(self, job: Job) -> bool:
        if not self.is_open or len(self.running) >= self.capabilities.max_jobs:
            return False
        self.loop.call_soon_threadsafe(self.begin, job)
        return True

    def begin(self, job: Job) -> None:
        self.running[job.id] = self.loop.create_task(self.do(job))

    async def do(self, job: Job) -> None:
        try:
            await asyncio.sleep(WAIT_S)
            ok = tuple(self.did(job, index) for index in range(len(job.keys)))
        except asyncio.CancelledError:
            ok = (False,) * len(job.keys)
        del self.running[job.id]
        self.reports.put(Done(job.id, ok, None if all(ok) else "missing"))
        self.context.wake()

    def did(self, job: Job, index: int) -> bool:
        key = job.keys[index]
        if job.kind == "store":
            self.frames[key] = bytes(job.frames[index].data)
        if job.kind == "load" and key in self.frames:
            job.frames[index].data[:] = self.frames[key]
        return key in self.frames

    def done(self) -> Sequence[Done]:
        return [self.reports.get() for _ in range(self.reports.qsize())]

    def drop(self, namespace: bytes) -> None:
        if self.is_open:
            self.loop.call_soon_threadsafe(self.forget, namespace)

    def forget(self, namespace: bytes) -> None:
        for key in [key for key in self.frames if key.namespace == namespace]:
            del self.frames[key]

    def close(self, timeout_s: float) -> None:
        if self.is_open:
            self.is_open = False
            asyncio.run_coroutine_threadsafe(self.end(), self.loop)
            self.thread.join(timeout_s)
            self.loop.close()
        self.done()

    async def end(self) -> None:
        for task in self.running.values():
            task.cancel()
        await asyncio.gather(*self.running.values(), return_exceptions=True)
        self.loop.stop()
