"""The executor `tensor`: one model over several GPUs of this host, or over processes on its CPU. Rank 0 is in the engine's own process, each other
rank in a process of its own. All compute every step, and sample the same ids from the same logits; rank 0's answer counts.

    engine ─ submit ─▶ ring of shared memory ─▶ rank 1, rank 2, …      batches (`ring`, `dovetail.runtime.batch_words`)
              │                                     ▲
              └──▶ rank 0 ◀── sums, logits ─────────┘                  between ranks (`dovetail.runtime.groups`)
"""

from __future__ import annotations

import fcntl
import os
import resource
import sys
import time
import traceback
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, NoReturn
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.executor import Batch, Capacity, Executor, ExecutorCapabilities, ExecutorContext, Masks, Result
from dovetail.errors import ConfigError, DovetailError, UnsupportedError
from dovetail.runtime.batch_words import masks_to_words, to_words
from dovetail.runtime.device_choice import choose_device
from dovetail.runtime.groups import ENVIRONMENT
from dovetail.runtime.runner import PendingStep
from dovetail_executors.options import TensorOptions
from dovetail_executors.rank import Rank, RankSettings
from dovetail_executors.rank_process import Job
from dovetail_executors.ranks import RankJob, Ranks
from dovetail_executors.ring import Kind, Ring, RingWriter

TOLD_S = 2.0  # when rank 0 misses another rank, so long is waited for the watch to say what that one died of
DEVICE_POLL_S = 20e-6  # the system makes some 70 of it; with steps in flight the device has work meanwhile
MOST_FILES = 1 << 16  # file numbers that are counted with, if the system allows more
_stores = count()  # of this process
DRAIN_S = 2.0  # that steps in flight get to end when the executor is stopped


class TensorExecutor(Executor):
    """Several ranks. If one dies, fails or takes too long, all are ended, and every call raises `DovetailError` naming it."""

    capabilities = ExecutorCapabilities(masks=True)
    options: TensorOptions

    def __init__(self, options: TensorOptions, context: ExecutorContext) -> None:
        super().__init__(options, context)
        self._ranks: Ranks | None = None
        self._rank: Rank | None = None
        self._ring: Ring | None = None
        self._writer: RingWriter | None = None
        self._fds: list[int] = []
        self._in_flight: deque[PendingStep] = deque()
        self._failure: DovetailError | None = None
        self._finalizer: Any = None  # ends the ranks if nobody calls `stop`

    def start(self) -> Capacity:
        try:
            return self._start()
        except BaseException:
            self.stop()
            raise

    def submit(self, batch: Batch) -> PendingStep:
        writer, rank = self._running()
        self._limit(batch.step)
        try:
            writer.send(Kind.STEP, to_words(batch))
            handle = rank.worker.submit(batch)
        except Exception as error:
            self._fail(error)
        self._in_flight.append(handle)
        return handle

    def mask_words(self, count: int, width: int) -> NDArray[np.uint32]:
        _, rank = self._running()
        return rank.worker.mask_words(count)

    def sample(self, handle: PendingStep, masks: Masks) -> None:
        writer, rank = self._running()
        try:
            writer.send(Kind.SAMPLE, masks_to_words(masks))
            rank.worker.sample(handle, masks)
        except Exception as error:
            self._fail(error)

    def collect(self, handle: PendingStep) -> Result:
        _, rank = self._running()
        try:
            self._wait_for(handle)
            result = rank.worker.collect(handle)
        except Exception as error:
            self._fail(error)
        self._in_flight.popleft()
        self._limit(self._in_flight[0].step if self._in_flight else None)
        return result

    def check(self) -> None:
        if self._ranks is not None:
            self._ranks.check()
        if self._failure is not None:
            raise DovetailError(f"executor tensor stopped computing: {self._failure}") from self._failure

    def stop(self) -> None:
        self._drain()
        ranks, self._ranks = self._ranks, None
        if self._finalizer is not None:
            self._finalizer.detach()
        _end(ranks, self._fds)
        rank, self._rank = self._rank, None
        ring, self._ring = self._ring, None
        self._writer = None
        self._in_flight.clear()
        if ring is not None:
            ring.close()
        if rank is not None:
            rank.close()
        _let_go(self._failure)

    # Starting

    def _start(self) -> Capacity:
        if not sys.platform.startswith("linux"):
            raise UnsupportedError("executor tensor needs Linux: ranks share memory that has no name, and end with the engine's process")
        options = self.options
        devices = rank_devices(options)
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        store, settings = self._store(), self._settings(devices)
        settings = replace(settings, store_path=f"/proc/self/fd/{store}")
        ring = self._ring = Ring.make(options.size - 1)
        self._fds.append(ring.fd)
        jobs, wakers = self._jobs(devices, settings, ring, store)
        ranks = self._ranks = Ranks(jobs, "tensor")
        self._finalizer = weakref.finalize(self, _end, ranks, self._fds)
        ranks.limit(options.start_timeout_s, partial(_late_at_start, ranks, options.start_timeout_s))
        ranks.start()
        context = replace(self.context, progress=partial(_progress, self.context.progress, ranks))
        rank = self._rank = Rank(0, devices[0], settings, context, before_join=partial(_all_joining, ranks))
        ranks.on_failure = rank.group.abort
        try:
            capacity = self._load(rank, ranks)
        except Exception as error:
            if (others := self._others_failure()) is not None:
                raise others from error
            raise
        self._writer = RingWriter(ring, wakers, ranks.check)
        ranks.limit(None)
        return capacity

    def _load(self, rank: Rank, ranks: Ranks) -> Capacity:
        own = rank.load()
        if self.options.all_reduce == "symmetric" and rank.group.symmetric is None:
            raise UnsupportedError(f"executor.all_reduce: symmetric memory can't be had: {rank.group.why_not_symmetric}")
        others = ranks.heard("loaded")
        num_blocks = min(own.num_blocks, *(blocks for blocks, _ in others))
        ranks.tell(allocate=num_blocks)
        rank.worker.allocate(num_blocks)
        ranks.heard("allocated")
        devices = [own.details["device"], *(details["device"] for _, details in others)]
        details = {**own.details, "device": _in_words(devices), "ranks": str(self.options.size), "all_reduce": str(rank.group)}
        if rank.device.type == "cuda" and rank.group.symmetric is None and self.options.all_reduce == "auto":
            details["all_reduce"] += f" (no symmetric memory: {rank.group.why_not_symmetric})"
        in_flight = self.options.max_in_flight or own.max_in_flight
        return replace(own, num_blocks=num_blocks, max_in_flight=in_flight, details=details)

    def _store(self) -> int:
        """Make the file in which the ranks find each other, and return its descriptor.

        Torch's store opens its path once more when it is freed, perhaps long after the executor has stopped, and ends the process if something is
        there that is no file, such as a socket that was given the same number meanwhile. So it gets a number that nothing else is given: the system
        gives the lowest that is free.
        """
        made = os.memfd_create("dovetail-ranks")
        try:
            store = fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, _rare_number())
        finally:
            os.close(made)
        self._fds.append(store)
        return store

    def _settings(self, devices: list[torch.device]) -> RankSettings:
        options, on_gpu = self.options, devices[0].type == "cuda"
        share = max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // options.size))
        return RankSettings(
            executor="tensor",
            group=f"dovetail-{uuid4()}",
            size=options.size,
            store_path="",
            num_blocks=options.num_blocks,
            threads=options.threads or (None if on_gpu else share),
            symmetric=on_gpu and options.all_reduce != "nccl",
            step_timeout_s=options.step_timeout_s,
        )

    def _jobs(self, devices: list[torch.device], settings: RankSettings, ring: Ring, store: int) -> tuple[list[RankJob], list[int]]:
        """Return the other ranks' jobs, and the ends of their pipes that are written to."""
        context, jobs, wakers = self.context, [], []
        components = {"models": context.models, "attention": context.attention, "sampler": context.sampler}
        environment = {} if settings.threads is None else {"OMP_NUM_THREADS": str(settings.threads)}
        for rank, device in enumerate(devices[1:], 1):
            read, write = os.pipe()
            os.set_blocking(write, False)
            self._fds += [read, write]
            wakers.append(write)
            job = Job(
                rank=rank,
                device=str(device),
                path=list(sys.path),
                settings=settings,
                config=context.config,
                components=components,
                ring_fd=ring.fd,
                ring_words=len(ring.words),
                waker_fd=read,
                max_in_flight=self.options.max_in_flight,
            )
            jobs.append(RankJob(rank, job.pickled(), (ring.fd, store, read), f"rank {rank} ({device})", environment))
        return jobs, wakers

    # Steps

    def _running(self) -> tuple[RingWriter, Rank]:
        self.check()
        if self._writer is None or self._rank is None:
            raise DovetailError("executor tensor isn't running: start() hasn't been called, or stop() has")
        return self._writer, self._rank

    def _limit(self, step: int | None) -> None:
        """From now on step `step` must be done within the limit; None: there is none."""
        if self._ranks is not None and self._writer is not None:
            seconds = self.options.step_timeout_s
            late = partial(_late_in_step, self._ranks, self._writer, step, seconds)
            self._ranks.limit(None if step is None else seconds, late)

    def _wait_for(self, handle: PendingStep) -> None:
        """Wait until the device has passed the step, unless a rank dies: then the device may never do, so that this can't be left to CUDA."""
        while not handle.passed:
            self.check()
            time.sleep(DEVICE_POLL_S)

    def _fail(self, error: Exception) -> NoReturn:
        """Raise what went wrong, from now on by `check` too: another rank's failure if this one only missed it."""
        failure = self._others_failure()
        if failure is None:
            failure = error if isinstance(error, DovetailError) else DovetailError(f"executor tensor: rank 0: {type(error).__name__}: {error}")
        self._failure = self._failure or failure
        if failure is error:
            raise error
        raise failure from error

    def _others_failure(self) -> DovetailError | None:
        """Return what another rank died of, if one did; if a sum has failed here, one surely does, and is waited for."""
        ranks, rank = self._ranks, self._rank
        if ranks is None:
            return None
        if rank is not None and rank.group.failure is not None:
            ranks.await_failure(TOLD_S)
        return None if ranks.failure is None else DovetailError(str(ranks.failure))

    def _drain(self) -> None:
        """Let the steps in flight end, so that no rank waits for one that was stopped."""
        until = time.monotonic() + DRAIN_S
        while self._in_flight and time.monotonic() < until:
            if self._failure is not None or self._ranks is None or self._ranks.failure is not None:
                return
            if self._in_flight[0].passed:
                self._in_flight.popleft()
            else:
                time.sleep(0.001)


def rank_devices(options: TensorOptions) -> list[torch.device]:
    """Return each rank's device. Raises `ConfigError` if `devices` doesn't go with the other options, `UnsupportedError` if there are too few."""
    size, given = options.size, options.devices
    if given is not None and (len(given) != size or len(set(given)) != size or options.device == "cpu"):
        raise ConfigError(f"executor.devices: expected {size} different CUDA devices (executor.size: {size}), got {list(given)}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    on_cpu = options.device == "cpu" or (options.device == "auto" and given is None and count == 0)
    if on_cpu:
        return [torch.device("cpu")] * size
    indices = given or tuple(range(size))
    if max(indices) >= count:
        raise UnsupportedError(f"executor.size: {size} ranks need as many CUDA devices, and torch {torch.__version__} sees {count}")
    return [choose_device(f"cuda:{index}", "executor.devices") for index in reversed(indices)][::-1]  # rank 0's becomes the current one


def _all_joining(ranks: Ranks) -> None:
    ranks.heard("joining")


def _progress(own: object, ranks: Ranks, what: str, done: int, total: int) -> None:
    """Report progress, and break off if a rank has died meanwhile."""
    ranks.check()
    if callable(own):
        own(what, done, total)


def _late_at_start(ranks: Ranks, seconds: float) -> str:
    for what, told in (("joining", "haven't loaded the model"), ("loaded", "haven't connected"), ("allocated", "haven't made their memory")):
        if (silent := ranks.silent(what)) != "none":
            return f"not started after {seconds:g} s (executor.start_timeout_s): {silent} {told}"
    return f"not started after {seconds:g} s (executor.start_timeout_s): all ranks wait for rank 0"


def _late_in_step(ranks: Ranks, writer: RingWriter, step: int | None, seconds: float) -> str:
    what = f"step {step} wasn't done after {seconds:g} s (executor.step_timeout_s)"
    behind = [ranks.named(index) for index, done in enumerate(writer.done()) if done < writer.sent]
    return f"{what}; not through with it: {', '.join(behind)}" if behind else f"{what}, though the other ranks are through with it"


def _in_words(devices: list[str]) -> str:
    """["cpu", "cpu"] -> "2 × cpu"; different ones one by one."""
    return f"{len(devices)} × {devices[0]}" if len(set(devices)) == 1 else ", ".join(devices)


def _let_go(error: BaseException | None) -> None:
    """Have an error's frames, which may be kept with it for long, forget what they computed with: connections, memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__


def _rare_number() -> int:
    """Return a file number that is far above those in use, another one each time."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    half = (soft if 0 < soft < MOST_FILES else MOST_FILES) // 2
    return half + next(_stores) % max(1, half - 16)


def _end(ranks: Ranks | None, fds: list[int]) -> None:
    """End the ranks and close their files."""
    if ranks is not None:
        if ranks.is_forked():
            return
        ranks.stop()
    while fds:
        with suppress(OSError):
            os.close(fds.pop())
