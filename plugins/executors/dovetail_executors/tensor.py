"""The executor `tensor`: one model over several GPUs, or over processes on CPUs. Rank 0 is in the
engine's process, each other rank in its own, on this host or on others. All compute every step and
sample the same ids from the same logits; rank 0's result is used.

    engine ─ submit ─▶ ring of shared memory ─▶ rank 1, rank 2, …      batches (`ring`, `dovetail_executors.runtime.batch_words`);
              │   └──▶ TCP ─▶ another host's ring ─▶ rank 4, …         to other hosts over TCP (`remote_ranks`, `agent`)
              │                                     ▲
              └──▶ rank 0 ◀── sums, logits ─────────┘                  between ranks (`dovetail_executors.runtime.groups`)
"""

from __future__ import annotations

import fcntl
import logging
import os
import resource
import socket
import sys
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, NoReturn
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.executor import (
    Batch,
    Capacity,
    Executor,
    ExecutorCapabilities,
    ExecutorContext,
    Masks,
    Result,
)
from dovetail.errors import ConfigError, DovetailError, UnsupportedError
from dovetail_executors.all_ranks import AllRanks
from dovetail_executors.options import TensorOptions
from dovetail_executors.rank import Rank, RankSettings
from dovetail_executors.rank_process import RankJob
from dovetail_executors.rank_transfers import RankedTransfers, SharedSlabs
from dovetail_executors.ranks import Ranks
from dovetail_executors.ring import Kind
from dovetail_executors.runtime.batch_words import masks_to_words, to_words
from dovetail_executors.runtime.groups import ENVIRONMENT, LOOPBACK
from dovetail_executors.runtime.recording import ALONE
from dovetail_executors.runtime.step import Step

log = logging.getLogger("dovetail")

TOLD_S = 2.0  # when rank 0 misses another rank, wait so long for the watch to report its failure
# sleeps about 70 µs in practice; with steps in flight the device has work meanwhile
DEVICE_POLL_S = 20e-6
MOST_FILES = 1 << 16  # upper bound of descriptor numbers used, if the system allows more
_stores = count()  # of this process
DRAIN_S = 2.0  # that steps in flight get to finish when the executor is stopped


class TensorExecutor(Executor):
    """Several ranks. If one dies, fails or takes too long, all are ended, and every call raises
    `DovetailError` naming it."""

    capabilities = ExecutorCapabilities(
        logprobs=True,
        masks=True,
        samples=True,
        draft_model=True,
        draft_head=True,
        logits_processors=True,
    )
    options: TensorOptions

    def __init__(self, options: TensorOptions, context: ExecutorContext) -> None:
        super().__init__(options, context)
        self._ranks: AllRanks | None = None
        self._rank: Rank | None = None
        self._loaded = False
        self._fds: list[int] = []
        self._slabs: SharedSlabs | None = None  # None: ranks of several hosts
        self._in_flight: deque[Step] = deque()
        self._failure: DovetailError | None = None
        self._finalizer: Any = None  # ends the ranks if `stop` isn't called

    def start(self) -> Capacity:
        try:
            with ALONE:
                return self._start()
        except BaseException:
            self.stop()
            raise

    def submit(self, batch: Batch) -> Step:
        ranks, rank = self._running()
        self._limit(f"step {batch.step}")
        try:
            ranks.send(Kind.STEP, to_words(batch))
            handle = rank.worker.submit(batch)
        except Exception as error:
            self._fail(error)
        self._in_flight.append(handle)
        return handle

    def mask_words(self, count: int, width: int) -> NDArray[np.uint32]:
        _, rank = self._running()
        return rank.worker.mask_words(count)

    def sample(self, handle: Step, masks: Masks) -> None:
        ranks, rank = self._running()
        try:
            ranks.send(Kind.SAMPLE, masks_to_words(masks))
            rank.worker.sample(handle, masks)
        except Exception as error:
            self._fail(error)

    def collect(self, handle: Step) -> Result:
        _, rank = self._running()
        try:
            self._wait_for(handle)
            result = rank.worker.collect(handle)
        except Exception as error:
            self._fail(error)
        self._in_flight.popleft()
        self._limit(f"step {self._in_flight[0].number}" if self._in_flight else None)
        return result

    def finish_start(self) -> bool:
        ranks, rank = self._running()
        if rank.worker.has_finished_start:
            return False
        self._limit("the recording of a CUDA graph")
        try:
            ranks.send(Kind.FINISH_START, ())
            return rank.worker.finish_start()
        except Exception as error:
            self._fail(error)
        finally:
            self._limit(None)

    def transfers(self) -> RankedTransfers | None:
        """None over several hosts, too: a page's bytes would be on all of them."""
        ranks, rank = self._running()
        if self._slabs is None:
            return None
        copies = rank.worker.page_copies()
        if copies is None:
            return None

        def share(what: str, message: dict[str, Any]) -> Sequence[str]:
            ranks.tell(**message)
            return ranks.heard(what)

        name = rank.worker.name_of_bytes()
        return RankedTransfers(copies, name, self.options.size, self._slabs, ranks.send, share)

    def check(self) -> None:
        if self._ranks is not None:
            self._ranks.check()
        if self._failure is not None:
            raise DovetailError(
                f"executor tensor stopped computing: {self._failure}"
            ) from self._failure

    def stop(self) -> None:
        self._drain()
        ranks = self._ranks
        self._ranks = None
        if self._finalizer is not None:
            self._finalizer.detach()
        if ranks is not None:
            ranks.stop()
        rank = self._rank
        self._rank = None
        self._loaded = False
        self._in_flight.clear()
        if rank is not None:
            rank.close()
        if self._slabs is not None:
            self._slabs.close()
            self._slabs = None
        # last: torch's threads look into the store, and wait for a file that isn't there
        _close(self._fds)
        _let_go(self._failure)

    # Starting

    def _start(self) -> Capacity:
        if not sys.platform.startswith("linux"):
            raise UnsupportedError(
                "executor tensor needs Linux: ranks share memory that has no name, and end with "
                "the engine's process"
            )
        options = self.options
        devices = rank_devices(options)
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        hosts = options.hosts or (LOOPBACK,)
        store, at = self._store() if options.hosts is None else self._listening(hosts[0])
        settings = self._settings(devices, at)
        if options.hosts is None:
            slabs_fd = SharedSlabs.make(options.size)
            self._fds.append(slabs_fd)
            self._slabs = SharedSlabs(slabs_fd, options.size)
        jobs = [self._job(rank, settings, devices, hosts) for rank in range(options.size)]
        each = options.size // len(hosts)
        here = Ranks(jobs[1:each], () if self._slabs is None else (store, self._slabs.fd))
        others = [(host, jobs[n * each : (n + 1) * each]) for n, host in enumerate(hosts)][1:]
        ranks = self._ranks = AllRanks(here, others, (hosts[0], options.port))
        self._ends_with(ranks.stop)
        ranks.limit(
            options.start_timeout_s, partial(_late_at_start, ranks, options.start_timeout_s)
        )
        ranks.start()
        context = replace(
            self.context,
            progress=partial(_progress, self.context.progress, ranks, time.monotonic()),
        )
        rank = self._rank = Rank(
            0, devices[0], settings, context, partial(_all_joining, ranks), store, hosts[0]
        )
        self._ends_with(_end, ranks, rank)
        ranks.on_failure = rank.group.abort
        try:
            capacity = self._load(rank, ranks)
        except UnsupportedError:  # of the model: every rank finds it, some perhaps sooner
            raise
        except Exception as error:
            if (others_failure := self._others_failure()) is not None:
                raise others_failure from error
            raise
        self._loaded = True
        ranks.limit(None)
        return capacity

    def _ends_with(self, end: Callable[..., None], *args: Any) -> None:
        """Call `end` if the executor is garbage collected, or the process ends, before `stop`."""
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(self, end, *args)

    def _load(self, rank: Rank, ranks: AllRanks) -> Capacity:
        own = rank.load()
        if self.options.all_reduce == "symmetric" and rank.group.shares is None:
            raise UnsupportedError(
                f"executor.all_reduce: symmetric memory can't be had: "
                f"{rank.group.why_not_symmetric}"
            )
        others = ranks.heard("loaded")
        num_pages = min(own.num_pages, *(pages for pages, _ in others))
        ranks.tell(allocate=num_pages)
        rank.worker.allocate(num_pages)
        ranks.heard("allocated")
        devices = [own.details["device"], *(details["device"] for _, details in others)]
        details = {
            **own.details,
            "device": _in_words(devices, self.options.hosts),
            "ranks": str(self.options.size),
            "all_reduce": str(rank.group),
        }
        if (
            rank.device.type == "cuda"
            and rank.group.shares is None
            and self.options.all_reduce == "auto"
        ):
            details["all_reduce"] += f" (no symmetric memory: {rank.group.why_not_symmetric})"
        in_flight = self.options.max_in_flight or own.max_in_flight
        lines = rank.worker.line_costs
        drafts = rank.worker.draft_costs
        return replace(
            own,
            num_pages=num_pages,
            max_in_flight=in_flight,
            details=details,
            line_costs=lines,
            draft_costs=drafts,
        )

    def _store(self) -> tuple[int, str]:
        """Create the file of torch's store, by which the ranks find each other, and return its
        descriptor and path.

        The store opens its path again when it is freed, perhaps long after the executor has
        stopped, and ends the process unless it finds a file: a socket may have the same descriptor
        number by then. So it gets a high number; the system assigns the lowest free one to
        others.
        """
        made = os.memfd_create("dovetail-ranks")
        try:
            store = fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, _rare_number())
        finally:
            os.close(made)
        self._fds.append(store)
        return store, f"/proc/self/fd/{store}"

    def _listening(self, address: str) -> tuple[int, str]:
        """Create the socket of torch's store for ranks of several hosts, and return its descriptor
        and URL."""
        try:
            sock = socket.create_server(
                (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
            )
        except OSError as error:
            raise DovetailError(
                f"executor.hosts: {address} isn't an address of this host: "
                f"{error.strerror or error}"
            ) from error
        at = f"tcp://{address}:{sock.getsockname()[1]}"
        self._fds.append(sock.detach())
        return self._fds[-1], at

    def _settings(self, devices: list[torch.device], store: str) -> RankSettings:
        options = self.options
        on_gpu = devices[0].type == "cuda"
        share = max(
            1,
            min(
                torch.get_num_threads(),
                (os.cpu_count() or 1) * len(options.hosts or ("",)) // options.size,
            ),
        )
        return RankSettings(
            group=f"dovetail-{uuid4()}",
            size=options.size,
            store=store,
            num_pages=options.num_pages,
            threads=options.threads or (None if on_gpu else share),
            symmetric=on_gpu and options.all_reduce != "nccl" and options.hosts is None,
            step_timeout_s=options.step_timeout_s,
        )

    def _job(
        self, rank: int, settings: RankSettings, devices: list[torch.device], hosts: Sequence[str]
    ) -> RankJob:
        context = self.context
        address = hosts[rank * len(hosts) // len(devices)]
        return RankJob(
            rank=rank,
            name=f"rank {rank} ({devices[rank]}{'' if address == hosts[0] else f' of {address}'})",
            device=str(devices[rank]),
            path=[],
            settings=settings,
            config=context.config,
            components={
                name: getattr(context, name)
                for name in ("models", "attention", "sampler", "quantizations", "logits_processors")
            },
            max_in_flight=self.options.max_in_flight,
            address=address,
            slabs_fd=-1 if self._slabs is None else self._slabs.fd,
        )

    # Steps

    def _running(self) -> tuple[AllRanks, Rank]:
        self.check()
        if not self._loaded or self._ranks is None or self._rank is None:
            raise DovetailError(
                "executor tensor isn't running: start() hasn't been called, or stop() has"
            )
        return self._ranks, self._rank

    def _limit(self, work: str | None) -> None:
        """Set the deadline of work that all ranks do, as errors call it; None: there is none."""
        if self._ranks is not None and self._loaded:
            seconds = self.options.step_timeout_s
            late = partial(_late_in, self._ranks, work, seconds)
            self._ranks.limit(None if work is None else seconds, late)

    def _wait_for(self, handle: Step) -> None:
        """Wait until the device has passed the step. Polls instead of a CUDA wait, which would
        never return if a rank dies."""
        while not handle.passed:
            self.check()
            time.sleep(DEVICE_POLL_S)

    def _fail(self, error: Exception) -> NoReturn:
        """Raise an error, from now on in `check`, too: another rank's failure if that caused it."""
        failure = self._others_failure()
        if failure is None:
            failure = (
                error
                if isinstance(error, DovetailError)
                else DovetailError(f"executor tensor: rank 0: {type(error).__name__}: {error}")
            )
        self._failure = self._failure or failure
        if failure is error:
            raise error
        raise failure from error

    def _others_failure(self) -> DovetailError | None:
        """Return another rank's failure, if any. If a sum has failed here, wait for the failure
        that caused it."""
        ranks = self._ranks
        rank = self._rank
        if ranks is None:
            return None
        if rank is not None and rank.group.failure is not None:
            ranks.await_failure(TOLD_S)
        return None if ranks.failure is None else DovetailError(str(ranks.failure))

    def _drain(self) -> None:
        """Wait for the steps in flight, so that no rank waits for a stopped one."""
        until = time.monotonic() + DRAIN_S
        while self._in_flight and time.monotonic() < until:
            if self._failure is not None or self._ranks is None or self._ranks.failure is not None:
                return
            if self._in_flight[0].passed:
                self._in_flight.popleft()
            else:
                time.sleep(0.001)


def rank_devices(options: TensorOptions) -> list[torch.device]:
    """Return each rank's device. Raises `ConfigError` if `devices` doesn't go with the other
    options, `UnsupportedError` if there are too few."""
    size = options.size
    given = options.devices
    hosts = options.hosts or (LOOPBACK,)
    if size % len(hosts) or len(set(hosts)) != len(hosts):
        raise ConfigError(
            f"executor.size: {size} ranks can't be dealt evenly to {len(hosts)} different hosts "
            f"(executor.hosts: {', '.join(hosts)})"
        )
    each = size // len(hosts)
    if given is not None and (
        len(given) != each or len(set(given)) != each or min(given) < 0 or options.device == "cpu"
    ):
        of_host = "" if options.hosts is None else " on each host"
        raise ConfigError(
            f"executor.devices: expected {each} different CUDA devices{of_host} (executor.size: "
            f"{size}), got {list(given)}"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    on_cpu = options.device == "cpu" or (options.device == "auto" and given is None and count == 0)
    if on_cpu:
        return [torch.device("cpu")] * size
    indices = given or tuple(range(each))
    if max(indices) >= count:
        here = "" if options.hosts is None else " on each host"
        raise UnsupportedError(
            f"executor.size: {each} ranks{here} need as many CUDA devices, and torch "
            f"{torch.__version__} sees {count}"
        )
    # none is initialised: this process must use memory on rank 0's only
    return [torch.device("cuda", index) for index in indices] * len(hosts)


def _all_joining(ranks: AllRanks) -> None:
    ranks.heard("joining")


def _end(ranks: AllRanks, rank: Rank) -> None:
    ranks.stop()
    rank.close()


def _progress(
    own: object, ranks: AllRanks, started: float, what: str, done: int, total: int
) -> None:
    """Report progress; raise if a rank has died."""
    ranks.check()
    if done == total:
        log.debug(
            "rank 0: %s, done %.2f s after the other ranks were started",
            what,
            time.monotonic() - started,
        )
    if callable(own):
        own(what, done, total)


def _late_at_start(ranks: AllRanks, seconds: float) -> str:
    for what, told in (
        ("joining", "haven't loaded the model"),
        ("loaded", "haven't connected"),
        ("allocated", "haven't made their memory"),
    ):
        if (silent := ranks.silent(what)) != "none":
            return f"not started after {seconds:g} s (executor.start_timeout_s): {silent} {told}"
    return f"not started after {seconds:g} s (executor.start_timeout_s): all ranks wait for rank 0"


def _late_in(ranks: AllRanks, work: str | None, seconds: float) -> str:
    what = f"{work} wasn't done after {seconds:g} s (executor.step_timeout_s)"
    behind = ranks.behind()
    return (
        f"{what}; not through with it: {', '.join(behind)}"
        if behind
        else f"{what}, though the other ranks are through with it"
    )


def _in_words(devices: list[str], hosts: Sequence[str] | None) -> str:
    """["cpu", "cpu"] -> "2 × cpu"; different ones are listed; with hosts, each host's after its
    address."""
    if hosts is not None:
        each = len(devices) // len(hosts)
        return "; ".join(
            f"{host}: {_in_words(devices[n * each : (n + 1) * each], None)}"
            for n, host in enumerate(hosts)
        )
    return f"{len(devices)} × {devices[0]}" if len(set(devices)) == 1 else ", ".join(devices)


def _let_go(error: BaseException | None) -> None:
    """Clear the frames of an error that may be kept for long: they hold connections and memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _rare_number() -> int:
    """Return a descriptor number far above those in use, a new one each time."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    half = (soft if 0 < soft < MOST_FILES else MOST_FILES) // 2
    return half + next(_stores) % max(1, half - 16)


def _close(fds: list[int]) -> None:
    while fds:
        with suppress(OSError):
            os.close(fds.pop())
