"""Groups of ranks that are processes, over `torch.distributed`: gloo between CPUs, NCCL between GPUs. The parallel layers of `dovetail.nn` sum and
gather through one, inside CUDA graphs too. An executor of several ranks makes one in each of its processes.

torch's default group isn't used, so that several engines, and programs with a group of their own, can be in one process.

Between CPUs all of it is tested. Between GPUs it hasn't been run as a whole; `docs/several-gpus.md` says which calls were, and how.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore, _register_process_group, _unregister_process_group
from torch.distributed.distributed_c10d import GroupName

from dovetail.errors import DovetailError
from dovetail.nn.kernels.available import has_triton
from dovetail.nn.kernels.launch import KernelUnavailable, is_compiling_ahead
from dovetail.runtime.rank_shares import RankShares, make_rank_shares
from dovetail.runtime.symmetric import SymmetricBuffer, symmetric_buffer

log = logging.getLogger("dovetail")

JOIN_S = 60.0  # that ranks may take to connect to each other, once all of them are about to
POLL_S = 0.002
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
        self.symmetric: SymmetricBuffer | None = None
        self.shares: RankShares | None = None
        self.why_not_symmetric = "the ranks are on CPUs" if device.type == "cpu" else "it wasn't asked for"
        self._name, self._store, self._timeout_s, self._before_join = name, store, timeout_s, before_join
        self._store_fd, self._address = store_fd, address
        self._group: dist.ProcessGroup | None = None
        self._backend: Any = None
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
        if self.symmetric is None:
            return self.transport
        fused = "" if self.shares is None else f"with the norm, up to {self.shares.numbers * self.shares.dtype.itemsize >> 20} MiB; otherwise "
        return f"{fused}symmetric memory up to {self.symmetric.most_bytes >> 20} MiB, then {self.transport}"

    def join(self) -> None:
        """Connect to the other ranks, if that hasn't been done. Raises `DovetailError` if they don't come in time."""
        if self._group is not None:
            return
        self._before_join()
        store = self._open_store()
        store.set_timeout(timedelta(seconds=JOIN_S))
        if self.rank == 0:
            self._wait_for_others(store)
        else:
            store.set(_presence(self.rank), "")
        group = dist.ProcessGroup(store, self.rank, self.size)
        before = _sockets() if self._over_hosts else set()
        try:
            kind, backend = self._make_backend(store)
            group._set_default_backend(kind)
            group._register_backend(self.device, kind, backend)
            group._set_group_name(GroupName(self._name))
            self._group, self._backend = group, backend
            self.all_reduce(torch.zeros(1, device=self.device))
            if self._over_hosts:
                self._connections = _sockets() - before
        except RuntimeError as error:
            self.failure = error
            raise DovetailError(f"rank {self.rank} can't connect to the other ranks: {error}") from error

    def reserve(self, numbers: int, dtype: torch.dtype) -> None:
        """Make the symmetric memory for sums of up to so many `numbers`, on every rank at once and before anything is recorded. Where it can't be
        had, `why_not_symmetric` says why, and all sums go through NCCL. Raises `DovetailError` as `join` does."""
        self.join()
        if self.device.type == "cuda" and self.symmetric is None:
            made, why = symmetric_buffer(numbers, dtype, self.device, self._registered())
            agreed = torch.tensor([made is not None], dtype=torch.float32, device=self.device)
            if int(self.all_reduce(agreed).item()) == self.size:
                self.symmetric, self.why_not_symmetric = made, ""
                self._reserve_shares(numbers, dtype)
            else:
                self.why_not_symmetric = why or "another rank can't have it"

    def _reserve_shares(self, numbers: int, dtype: torch.dtype) -> None:
        made: RankShares | None = None
        if has_triton():
            try:
                made = make_rank_shares(numbers, dtype, self.device, self._joined())
            except (RuntimeError, KernelUnavailable) as error:
                log.warning("sums over the ranks and norms aren't computed in one kernel: %s", error)
        agreed = torch.tensor([made is not None], dtype=torch.float32, device=self.device)
        if int(self.all_reduce(agreed).item()) == self.size and made is not None and self.symmetric is not None:
            self.shares = made
            self.symmetric.also_release(made.flags)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over the ranks, in place, and return it. Raises what the transport raises."""
        if is_compiling_ahead() or x.numel() == 0:
            return x
        if self.symmetric is not None and self.symmetric.all_reduce(x):
            return x
        self._run(lambda group: group.allreduce([x], self._synchronous))
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' tensors along `dim`, in the order of ranks. Raises what the transport raises."""
        gathered = x.new_empty((self.size, *x.shape))
        if is_compiling_ahead() or x.numel() == 0:
            gathered.zero_()
        elif self.symmetric is None or not self.symmetric.all_gather(x, gathered):
            flat = x.contiguous().view(-1)
            self._run(lambda group: group._allgather_base(gathered.view(-1), flat))
        return torch.cat(gathered.unbind(), dim=dim)

    def abort(self) -> None:
        """End what waits for other ranks, from another thread, as they will not come: NCCL's kernels return, and so do those that wait for symmetric
        memory, and gloo's connections to other hosts end. What they compute is undefined, and whatever is asked for from now on raises
        `RuntimeError`. Twice is as good as once. Raises nothing."""
        if self.symmetric is not None:
            self.symmetric.release()
        backend, self._backend = self._backend, None
        if backend is not None and self.device.type == "cuda":
            try:
                backend.abort()
                if self.symmetric is not None:
                    _unregister_process_group(GroupName(self._name))
            except RuntimeError as error:
                self.failure = self.failure or error
        self._ended, self._group = True, None
        for number, _ in self._connections & _sockets() if self._connections else ():
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.getpeername()  # raises for the one that listens, which gloo can't do without
                connection.shutdown(socket.SHUT_RDWR)
        if self.failure is not None:  # which may be kept for long, and with it its frames, and with them the connections
            traceback.clear_frames(self.failure.__traceback__)

    def _run(self, start: Callable[[dist.ProcessGroup], Any]) -> None:
        try:
            work = start(self._joined())
            if work is not None:
                work.wait()
        except RuntimeError as error:
            self.failure = self.failure or error
            raise

    def _joined(self) -> dist.ProcessGroup:
        if self._group is None:
            if self._ended:
                raise RuntimeError("the group of ranks was ended")
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

    def _registered(self) -> dist.ProcessGroup:
        """Have torch's operators find the group by its name."""
        group = self._joined()
        _register_process_group(group.group_name, group)
        return group


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
