"""Groups of ranks that are processes, over `torch.distributed`: gloo between CPUs, NCCL between GPUs. The parallel layers of `dovetail.nn` sum and
gather through one, inside CUDA graphs too. An executor of several ranks makes one in each of its processes.

torch's default group isn't used, so that several engines, and programs with a group of their own, can be in one process.

Between GPUs of a host most sums go through memory that all of them can read (`rank_shares`), and NCCL has the rest.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore, _register_process_group, _unregister_process_group
from torch.distributed.distributed_c10d import GroupName

from dovetail.errors import DovetailError
from dovetail.nn.kernels.available import has_triton
from dovetail.nn.kernels.launch import KernelUnavailable, is_compiling_ahead
from dovetail.runtime import rank_shares
from dovetail.runtime.rank_shares import RankShares, make_rank_shares

log = logging.getLogger("dovetail")

JOIN_S = 60.0  # that ranks may take to connect to each other, once all of them are about to
POLL_S = 0.002
ABORT_S = 5.0  # that NCCL gets to let go of its memory
LOOPBACK = "127.0.0.1"
ENVIRONMENT = {  # of all ranks, unless it says otherwise already
    "NCCL_NVLS_ENABLE": "0",  # no multicast, here …
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",  # … and there
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # it would end the engine's own process; the executor watches the ranks
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # likewise
}


class TorchGroup:
    """One rank of a group of processes, a `dovetail.api.model.ParallelGroup`. It joins the others by `join`, or else by the first sum that is asked
    for, so that a rank may load its weights while others are still starting.

    While kernels are only compiled ahead nothing is sent: what they compute is undefined anyway, and a rank may break off.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        name: str,
        store: str,
        timeout_s: float,
        before_join: Callable[[], None] = lambda: None,
        store_fd: int | None = None,
        address: str = LOOPBACK,
    ) -> None:
        """`name` is the group's own on this host. `store` is where the ranks find each other, the same for all: a file that is empty at first, or
        "tcp://HOST:PORT", where rank 0 listens with the socket `store_fd`. `address` is that at which the other ranks reach this host, between
        CPUs. `timeout_s` is how long a sum may wait for the others on a CPU; on a GPU it is the executor's business to break off. `before_join`
        is called right before this rank joins, and by rank 0 again and again while it waits for the others to: it may raise what they died
        of."""
        self.rank, self.size, self.device = rank, size, device
        self.failure: BaseException | None = None  # the error of the first sum that failed
        self._shares: RankShares | None = None
        self.why_not_symmetric = "the ranks are on CPUs" if device.type == "cpu" else "it wasn't asked for"
        self._name, self._store, self._timeout_s, self._before_join = name, store, timeout_s, before_join
        self._store_fd, self._address = store_fd, address
        self._group: dist.ProcessGroup | None = None
        self._backend: Any = None
        self._aborting: threading.Thread | None = None
        self._ended = False
        self._connections: set[tuple[int, str]] = set()  # that joining has made; a lost host doesn't end them
        self._synchronous = dist.AllreduceOptions()
        self._synchronous.asyncOp = False

    @property
    def transport(self) -> str:
        """The library that connects the ranks: "gloo" or "nccl"."""
        return "nccl" if self.device.type == "cuda" else "gloo"

    @property
    def _over_hosts(self) -> bool:
        """Return whether connections of gloo lead to other hosts. A dead process of this one has the kernel end them."""
        return self.device.type == "cpu" and "://" in self._store

    def __str__(self) -> str:
        """The ways that sums take, for people."""
        if self._shares is None:
            return self.transport
        fused = self._shares.numbers * self._shares.dtype.itemsize
        return (
            f"with the norm, up to {fused >> 20} MiB; otherwise symmetric memory up to {self._shares.most_exchanged >> 20} MiB, then {self.transport}"
        )

    @property
    def shares(self) -> RankShares | None:
        """The memory that the ranks share: connected, unless kernels are only compiled. Raises as `join` does."""
        if self._shares is not None and not is_compiling_ahead():
            self.join()
        return self._shares

    def join(self) -> None:
        """Connect to the other ranks, if that hasn't been done. Raises `DovetailError` if they don't come in time, `RuntimeError` after `abort`."""
        if self._group is not None:
            return
        if self._ended:
            raise RuntimeError("the group of ranks was ended")
        self._before_join()
        store = self._open_store()
        store.set_timeout(timedelta(seconds=JOIN_S))
        if self.rank == 0:
            self._wait_for_others(store)
        store.set(_presence(self.rank), "")
        while not store.check([_presence(0)]):  # it may have to load and compile for longer than connecting may take
            time.sleep(POLL_S)
        before = _sockets() if self._over_hosts else set()
        try:
            if self.rank == 0 and self.device.type == "cuda":
                self._while_others_live(lambda: self._connect(store))
            else:
                self._connect(store)
        except RuntimeError as error:
            self.failure = error
            raise DovetailError(f"rank {self.rank} can't connect to the other ranks: {error}") from error
        if self._over_hosts:
            self._connections = _sockets() - before

    def reserve(self, share_numbers: int, part_numbers: int, dtype: torch.dtype) -> None:
        """Make memory for sums of up to `share_numbers` that are added to a residual stream, and for other sums and gatherings of up to as many or
        `part_numbers` of each rank's, on every rank and before it joins. Where GPUs can't share memory, `why_not_symmetric` says why, once the rank
        has joined, and all sums go through NCCL."""
        if self.device.type != "cuda" or self._shares is not None:
            return
        self.why_not_symmetric = "" if has_triton() else "Triton isn't installed"
        if has_triton():
            try:
                self._shares = make_rank_shares(share_numbers, part_numbers, dtype, self.device, self.rank, self.size)
            except (ImportError, RuntimeError, NotImplementedError) as error:  # ImportError: torch for a system that hasn't got it
                self.why_not_symmetric = _in_short(error)

    def _connect(self, store: Store) -> None:
        """Make the group, and have the ranks find each other's memory."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread
        group = dist.ProcessGroup(store, self.rank, self.size)
        kind, backend = self._make_backend(store)
        group._set_default_backend(kind)
        group._register_backend(self.device, kind, backend)
        group._set_group_name(GroupName(self._name))
        self._backend = backend
        if not self._agree(group, self._shares is not None) or self._shares is None:
            if self._shares is not None:
                self.why_not_symmetric = "another rank can't have it"
            self._shares = None
        else:
            self._connect_shares(group, self._shares)
        self._group = group

    def _connect_shares(self, group: dist.ProcessGroup, shares: RankShares) -> None:
        """All ranks have memory, which none uses yet."""
        _register_process_group(group.group_name, group)  # torch finds it by its name
        acts: list[Callable[[], None]] = [partial(rank_shares.connect, shares, group), partial(rank_shares.check, shares, self.device)]
        for act in acts:
            why = ""
            try:
                act()
            except (RuntimeError, NotImplementedError, KernelUnavailable) as error:
                why = _in_short(error)
            if not self._agree(group, not why):
                self._shares, self.why_not_symmetric = None, why or "another rank can't have it"
                return

    def _agree(self, group: dist.ProcessGroup, fine: bool) -> bool:
        """Return whether all ranks are fine, once all have said whether they are."""
        votes = torch.tensor([fine], dtype=torch.float32, device=self.device)
        if (work := group.allreduce([votes], self._synchronous)) is not None:
            work.wait()
        return int(votes.item()) == self.size

    def _while_others_live(self, act: Callable[[], None]) -> None:
        """Call `act` in a thread and wait for it, but not in vain: some of torch's calls wait for another rank for ever, and nothing can end them.
        Raises what it raises, or what `before_join` says that a rank died of."""
        errors: list[BaseException] = []

        def run() -> None:
            try:
                act()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="dovetail-joins", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL_S)
            self._before_join()
        if errors:
            raise errors[0]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over the ranks, in place, and return it. Raises what the transport raises."""
        shares = self.shares
        if x.numel() == 0 or (shares is not None and shares.all_reduce(x)) or is_compiling_ahead():
            return x
        self._run(lambda group: group.allreduce([x], self._synchronous))
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' tensors along `dim`, in the order of ranks. Raises what the transport raises."""
        shares, last = self.shares, dim in (-1, x.dim() - 1)
        if shares is not None and last and (whole := shares.all_gather(x)) is not None:
            return whole
        gathered = x.new_empty((self.size, *x.shape))
        if is_compiling_ahead() or x.numel() == 0:
            gathered.zero_()
        else:
            flat = x.contiguous().view(-1)
            self._run(lambda group: group._allgather_base(gathered.view(-1), flat))
        return torch.cat(gathered.unbind(), dim=dim)

    def abort(self) -> None:
        """End what waits for other ranks, from any thread, as they will not come: kernels return, and gloo's connections to other hosts end. What is
        computed then is undefined, and whatever is asked for from now on raises `RuntimeError`. Idempotent. Waits for nothing, and raises nothing.
        """
        if self._shares is not None:
            self._shares.release()
        backend, self._backend = self._backend, None
        self._ended, self._group = True, None
        if backend is not None and self.device.type == "cuda":
            self._aborting = threading.Thread(target=self._abort, args=(backend,), name="dovetail-aborts", daemon=True)
            self._aborting.start()
        for number, _ in self._connections & _sockets() if self._connections else ():
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.getpeername()  # raises for the one that listens, which gloo can't do without
                connection.shutdown(socket.SHUT_RDWR)
        if self.failure is not None:  # which may be kept for long, and with it its frames, and with them the connections
            traceback.clear_frames(self.failure.__traceback__)

    def close(self) -> None:
        """Abort, and let go of all memory, which no kernel uses any more and no CUDA graph: waits for NCCL, but no longer than `ABORT_S`."""
        self.abort()
        self._shares = None
        if self._aborting is not None:
            self._aborting.join(ABORT_S)
            if self._aborting.is_alive():
                log.error("NCCL hasn't let go of its memory after %g s; it does when this process ends", ABORT_S)

    def _abort(self, backend: Any) -> None:
        """NCCL's kernels return at once. The call returns when no CUDA graph is left in which some are recorded."""
        try:
            backend.abort()
            with suppress(RuntimeError):  # it wasn't registered
                _unregister_process_group(GroupName(self._name))
        except RuntimeError as error:
            self.failure = self.failure or error

    def _run(self, start: Callable[[dist.ProcessGroup], Any]) -> None:
        try:
            work = start(self._joined())
            if work is not None:
                work.wait()
        except RuntimeError as error:
            self.failure = self.failure or error
            raise

    def _joined(self) -> dist.ProcessGroup:
        self.join()
        assert self._group is not None
        return self._group

    def _open_store(self) -> Store:
        scheme, _, place = self._store.rpartition("://")
        if not scheme:
            return FileStore(self._store, self.size)
        host, _, port = place.rpartition(":")
        limit = timedelta(seconds=JOIN_S)
        if self.rank > 0:
            return TCPStore(host, int(port), self.size, False, limit, wait_for_workers=False)
        listening = None if self._store_fd is None else os.dup(self._store_fd)  # the store closes it
        return TCPStore(host, int(port), self.size, True, limit, wait_for_workers=False, master_listen_fd=listening)

    def _wait_for_others(self, store: Store) -> None:
        """Wait until every other rank has left word in the store. So this rank isn't held in a call that nothing can end, should one die."""
        until = time.monotonic() + JOIN_S
        while missing := [rank for rank in range(1, self.size) if not store.check([_presence(rank)])]:
            self._before_join()
            if time.monotonic() > until:
                others = self.size - 1
                raise DovetailError(f"of {others} other ranks {others - len(missing)} have come within {JOIN_S:g} s")
            time.sleep(POLL_S)

    def _make_backend(self, store: Store) -> tuple[Any, Any]:
        kinds, timeout = dist.ProcessGroup.BackendType, timedelta(seconds=self._timeout_s)
        if self.device.type == "cpu":
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
            options._timeout = timeout
            return kinds.GLOO, dist.ProcessGroupGloo(store, self.rank, self.size, options)
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return kinds.NCCL, dist.ProcessGroupNCCL(store, self.rank, self.size, nccl)


def _in_short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _presence(rank: int) -> str:
    """The key of the store that says that a rank has come."""
    return f"rank {rank} is here"


def _sockets() -> set[tuple[int, str]]:
    """The sockets that this process has open: numbers and names."""
    found = set()
    with suppress(OSError):  # a system without this folder
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # it was closed meanwhile
                name = os.readlink(f"/proc/self/fd/{number}")
                if name.startswith("socket:"):
                    found.add((int(number), name))
    return found
