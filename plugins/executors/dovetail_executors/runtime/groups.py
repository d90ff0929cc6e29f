"""Groups of rank processes over `torch.distributed`: gloo between CPUs, NCCL between GPUs. The
parallel layers of `dovetail.nn` reduce and gather through a group, also within CUDA graphs. An
executor with several ranks creates one in each process.

torch's default group isn't used, so that several engines, and programs with their own group, can
share a process.

Between GPUs of a host most sums go through memory that all of them can read (`rank_shares`); the
rest goes through NCCL.
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
from torch._C._distributed_c10d import (
    FileStore,
    Store,
    TCPStore,
    _register_process_group,
    _unregister_process_group,
)
from torch.distributed.distributed_c10d import GroupName

from dovetail.errors import DovetailError
from dovetail.nn.kernels.available import has_triton
from dovetail.nn.kernels.launch import KernelUnavailable, is_compiling_ahead
from dovetail_executors.runtime import rank_shares
from dovetail_executors.runtime.rank_shares import ExchangeKeys, RankShares, make_rank_shares

log = logging.getLogger("dovetail")

JOIN_S = 60.0  # for ranks to connect to each other, once all are ready to
POLL_S = 0.002
ABORT_S = 5.0  # for NCCL to release its memory
LOOPBACK = "127.0.0.1"
ENVIRONMENT = {  # of all ranks, unless set already
    "NCCL_NVLS_ENABLE": "0",  # no multicast, here …
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",  # … and there
    # would end the engine's own process; the executor watches the ranks
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # likewise
}


class TorchGroup:
    """One rank of a group of processes, a `dovetail.api.model.ParallelGroup`. It joins the others
    in `join`, or in its first collective, so that a rank may load its weights while others are
    still starting.

    While kernels are only compiled ahead of time nothing is sent: results are undefined anyway, and
    a rank may abort.
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
        """`name`: unique on this host. `store`: rendezvous, the same for all ranks: an initially
        empty file, or "tcp://HOST:PORT", where rank 0 listens with the socket `store_fd`. `address`
        is that at which the other ranks reach this host, between CPUs. `timeout_s`: timeout of
        collectives on CPUs; on GPUs the executor has to abort them. `before_join`: called right
        before this rank joins, and by rank 0 repeatedly while it waits for the others; it may raise
        the error that they died of."""
        self.rank = rank
        self.size = size
        self.device = device
        self.failure: BaseException | None = None  # error of the first failed collective
        self._shares: RankShares | None = None
        self.why_not_symmetric = (
            "the ranks are on CPUs" if device.type == "cpu" else "it wasn't requested"
        )
        self._name = name
        self._store = store
        self._timeout_s = timeout_s
        self._before_join = before_join
        self._store_fd = store_fd
        self._address = address
        self._group: dist.ProcessGroup | None = None
        self._keys: ExchangeKeys | None = None
        self._votes = torch.empty(0)  # made by joining: memory may be short later
        self._backend: Any = None
        self._aborting: threading.Thread | None = None
        self._ended = False
        # made by joining; losing a host doesn't end them
        self._connections: set[tuple[int, str]] = set()
        self._synchronous = dist.AllreduceOptions()
        self._synchronous.asyncOp = False

    @property
    def transport(self) -> str:
        """The library that connects the ranks: "gloo" or "nccl"."""
        return "nccl" if self.device.type == "cuda" else "gloo"

    @property
    def _over_hosts(self) -> bool:
        """Return whether gloo has connections to other hosts. Those of a dead local process are
        closed by the kernel."""
        return self.device.type == "cpu" and "://" in self._store

    def __str__(self) -> str:
        """Description of how sums are computed."""
        if self._shares is None:
            return self.transport
        fused = self._shares.numbers * self._shares.dtype.itemsize
        return (
            f"with the norm, up to {fused >> 20} MiB; otherwise symmetric memory up to "
            f"{self._shares.most_exchanged >> 20} MiB, then {self.transport}"
        )

    @property
    def shares(self) -> RankShares | None:
        """Memory shared by the ranks: connected, unless kernels are only compiled. Raises like
        `join`."""
        if self._shares is not None and not is_compiling_ahead():
            self.join()
        return self._shares

    def join(self) -> None:
        """Connect to the other ranks, unless done already. Raises `DovetailError` if they don't
        join in time, `RuntimeError` after `abort`, also one that comes while this rank waits for
        rank 0."""
        if self._group is not None:
            return
        self._check_not_ended()
        self._before_join()
        store = self._open_store()
        store.set_timeout(timedelta(seconds=JOIN_S))
        if self.rank == 0:
            self._wait_for_others(store)
        store.set(_presence(self.rank), "")
        while not store.check(
            [_presence(0)]
        ):  # rank 0 may load and compile for longer than the timeout
            self._check_not_ended()
            time.sleep(POLL_S)
        before = _sockets() if self._over_hosts else set()
        try:
            if self.rank == 0 and self.device.type == "cuda":
                self._while_others_live(lambda: self._connect(store))
            else:
                self._connect(store)
        except RuntimeError as error:
            self.failure = error
            raise DovetailError(
                f"rank {self.rank} can't connect to the other ranks: {error}"
            ) from error
        if self._over_hosts:
            self._connections = _sockets() - before

    def reserve(self, share_numbers: int, part_numbers: int, dtype: torch.dtype) -> None:
        """Make memory for sums of up to `share_numbers` that are added to a residual stream, and
        for other sums and gatherings of up to as many or `part_numbers` of each rank's, on every
        rank and before it joins. Where GPUs can't share memory, `why_not_symmetric` says why, once
        the rank has joined, and all sums go through NCCL."""
        if self.device.type != "cuda" or self._shares is not None:
            return
        self.why_not_symmetric = "" if has_triton() else "Triton isn't installed"
        if has_triton():
            try:
                self._shares = make_rank_shares(
                    share_numbers, part_numbers, dtype, self.device, self.rank, self.size
                )
            except (
                ImportError,
                RuntimeError,
                NotImplementedError,
            ) as error:  # ImportError: a build of torch without it
                self.why_not_symmetric = _in_short(error)

    def _connect(self, store: Store) -> None:
        """Create the group, and exchange the addresses of the ranks' memory."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread
        with torch.inference_mode(False):  # a rank may join in a step, and vote between steps
            self._votes = torch.empty(1, device=self.device)
        if self._shares is not None:
            self._keys = ExchangeKeys(store)  # torch keeps no reference to Python's object
        keys = store if self._keys is None else self._keys
        group = dist.ProcessGroup(keys, self.rank, self.size)
        kind, backend = self._make_backend(store)
        group._set_default_backend(kind)
        group._register_backend(self.device, kind, backend)
        group._set_group_name(GroupName(self._name))
        self._backend = backend
        if not self._agree(group, self._shares is not None) or self._shares is None:
            if self._shares is not None:
                self.why_not_symmetric = "another rank can't allocate it"
            self._shares = None
        else:
            self._connect_shares(group, self._shares)
        self._group = group

    def _connect_shares(self, group: dist.ProcessGroup, shares: RankShares) -> None:
        """Connect the ranks' memory, which none uses yet."""
        _register_process_group(group.group_name, group)  # torch finds it by its name
        acts: list[Callable[[], None]] = [
            partial(rank_shares.connect, shares, group),
            partial(rank_shares.check, shares, self.device),
        ]
        for act in acts:
            why = ""
            try:
                act()
            except (RuntimeError, NotImplementedError, KernelUnavailable) as error:
                why = _in_short(error)
            if not self._agree(group, not why):
                self._shares = None
                self.why_not_symmetric = why or "another rank can't allocate it"
                return

    def _agree(self, group: dist.ProcessGroup, fine: bool) -> bool:
        """Do as `agree`, while this rank joins `group`."""
        if (work := self._vote(group, fine)) is not None:
            work.wait()
        return self._all_voted

    def _vote(self, group: dist.ProcessGroup, fine: bool) -> Any:
        """Begin to count the ranks that vote for something."""
        return group.allreduce([self._votes.fill_(fine)], self._synchronous)

    @property
    def _all_voted(self) -> bool:
        """True if all ranks were for it; waits for the device."""
        return int(self._votes.item()) == self.size

    def _while_others_live(self, act: Callable[[], None]) -> None:
        """Call `act` in a thread and wait for it, unless a rank dies: some of torch's calls wait
        for another rank forever, and can't be interrupted. Raises its error, or that of
        `before_join`."""
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
        """Sum x over the ranks in place and return it. Raises errors of the transport."""
        shares = self.shares
        if x.numel() == 0 or (shares is not None and shares.all_reduce(x)) or is_compiling_ahead():
            return x
        self._run(lambda group: group.allreduce([x], self._synchronous))
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' tensors along `dim`, in the order of ranks. Raises errors of the
        transport."""
        shares = self.shares
        last = dim in (-1, x.dim() - 1)
        if shares is not None and last and (whole := shares.all_gather(x)) is not None:
            return whole
        gathered = x.new_empty((self.size, *x.shape))
        if is_compiling_ahead() or x.numel() == 0:
            gathered.zero_()
        else:
            flat = x.contiguous().view(-1)
            self._run(lambda group: group._allgather_base(gathered.view(-1), flat))
        return torch.cat(gathered.unbind(), dim=dim)

    def agree(self, fine: bool) -> bool:
        """Return True if all ranks call it with True; waits for all. Raises errors of the
        transport."""
        self.join()
        self._run(partial(self._vote, fine=fine))
        if self._shares is not None:
            self._shares.restart()
        return self._all_voted

    def abort(self) -> None:
        """Abort everything that waits for other ranks, from any thread: kernels return, and gloo's
        connections to other hosts are closed. Their results are undefined, and later calls raise
        `RuntimeError`. Idempotent. Doesn't block or raise.
        """
        if self._shares is not None:
            self._shares.release()
        backend = self._backend
        self._backend = None
        self._ended = True
        self._group = None
        self._keys = None
        if backend is not None and self.device.type == "cuda":
            self._aborting = threading.Thread(
                target=self._abort, args=(backend,), name="dovetail-aborts", daemon=True
            )
            self._aborting.start()
        for number, _ in self._connections & _sockets() if self._connections else ():
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.getpeername()  # raises for the listening socket, which gloo needs
                connection.shutdown(socket.SHUT_RDWR)
        if (
            self.failure is not None
        ):  # which may be kept for long, and with it its frames, and with them the connections
            traceback.clear_frames(self.failure.__traceback__)

    def close(self) -> None:
        """Abort, and release all memory, which no kernel or CUDA graph may use any more. Waits up
        to `ABORT_S` for NCCL."""
        self.abort()
        self._shares = None
        if self._aborting is not None:
            self._aborting.join(ABORT_S)
            if self._aborting.is_alive():
                log.error(
                    "NCCL hasn't released its memory after %g s; this process will on exit", ABORT_S
                )

    def _abort(self, backend: Any) -> None:
        """NCCL's kernels return at once. The call returns when no CUDA graph is left in which some
        are recorded."""
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
            if self._shares is not None:
                self._shares.begin_again()
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
        # the store closes its own
        listening = None if self._store_fd is None else os.dup(self._store_fd)
        return TCPStore(
            host,
            int(port),
            self.size,
            True,
            limit,
            wait_for_workers=False,
            master_listen_fd=listening,
        )

    def _check_not_ended(self) -> None:
        if self._ended:
            raise RuntimeError("the group of ranks was ended")

    def _wait_for_others(self, store: Store) -> None:
        """Wait until every other rank has registered in the store, so that this rank doesn't block
        in an uninterruptible call if one dies."""
        until = time.monotonic() + JOIN_S
        while missing := [
            rank for rank in range(1, self.size) if not store.check([_presence(rank)])
        ]:
            self._before_join()
            if time.monotonic() > until:
                others = self.size - 1
                raise DovetailError(
                    f"of {others} other ranks {others - len(missing)} have come within {JOIN_S:g} s"
                )
            time.sleep(POLL_S)

    def _make_backend(self, store: Store) -> tuple[Any, Any]:
        kinds = dist.ProcessGroup.BackendType
        timeout = timedelta(seconds=self._timeout_s)
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
    """Key of the store that registers a rank."""
    return f"rank {rank} is here"


def _sockets() -> set[tuple[int, str]]:
    """Return the open sockets of this process: (number, name)."""
    found = set()
    with suppress(OSError):  # a system without this folder
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # it was closed meanwhile
                name = os.readlink(f"/proc/self/fd/{number}")
                if name.startswith("socket:"):
                    found.add((int(number), name))
    return found
