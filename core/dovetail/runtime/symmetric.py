"""Sums over GPUs through symmetric memory: a buffer on each GPU that all ranks of one host can read, so that a small sum costs one kernel instead of
NCCL's protocol. A group makes one where the GPUs can reach each other's memory (`groups.TorchGroup.reserve`).

The kernels are torch's own (`torch.distributed._symmetric_memory`); multicast (`multimem_*`) isn't used. They can be recorded in CUDA graphs, as long
as the buffer was made before. Run so far between two processes that share one H200, with torch 2.11; not yet between two GPUs, and not measured.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

ONE_SHOT_BYTES = 512 << 10  # up to so many every rank reads all; above, each sums a share, and the sums are read: less traffic, one more wait
MOST_BYTES = 8 << 20  # of a buffer: what is larger moves for long enough to be NCCL's
ALIGNED_BYTES = 16  # what the kernels read at once
RELEASE_S = 3.0  # how long kernels that wait for a dead rank are given what they wait for
RELEASE_POLL_S = 0.001


class SymmetricBuffer:
    """A buffer on each GPU of a group, [numbers] of one dtype. Used by one stream at a time; `release` may be called by another thread."""

    def __init__(self, buffer: torch.Tensor, handle: Any, group_name: str) -> None:
        """`handle` is what torch's rendezvous returned for the buffer."""
        self._buffer, self._handle, self._group_name = buffer, handle, group_name
        self.most_bytes = buffer.nbytes
        rank, size = handle.rank, handle.world_size
        # A signal pad has a number for each pair of a block of a kernel and a rank that signals to it: 1 until the signal is taken.
        count = handle.signal_pad_size // 4 // size * size
        pads = [handle.get_signal_pad(each, (count,), torch.int32).view(-1, size) for each in range(size)]
        self._to_me = [part for part in (pads[rank][:, :rank], pads[rank][:, rank + 1 :]) if part.numel()]
        self._from_me = [pad[:, rank] for each, pad in enumerate(pads) if each != rank]
        # What `release` needs is made now: no kernel can be loaded while another runs for ever. Nobody signals yet, so the numbers are 0.
        self._aside, self._passed = torch.cuda.Stream(buffer.device), torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._aside):
            for part in (*self._to_me, *self._from_me):
                part.fill_(0)
        self._aside.synchronize()

    def all_reduce(self, x: torch.Tensor) -> bool:
        """Sum x over the ranks, in place. Returns False, having done nothing, if x is too large, or of another dtype or alignment: then all ranks
        return False."""
        if not self._takes(x):
            return False
        mine = self._buffer[: x.numel()].view(x.shape)
        mine.copy_(x)
        if x.nbytes <= ONE_SHOT_BYTES:
            torch.ops.symm_mem.one_shot_all_reduce_out(mine, "sum", self._group_name, x)
        else:
            torch.ops.symm_mem.two_shot_all_reduce_out(mine, "sum", self._group_name, x)
        return True

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> bool:
        """Write the ranks' tensors to out [size, *x.shape]. Returns False as `all_reduce` does."""
        if not self._takes(x):
            return False
        self._buffer[: x.numel()].copy_(x.view(-1))
        self._handle.barrier(channel=0)
        for rank in range(self._handle.world_size):
            out[rank].copy_(self._handle.get_buffer(rank, x.shape, x.dtype))
        self._handle.barrier(channel=0)  # nobody overwrites what another still reads
        return True

    def also_release(self, flags: torch.Tensor) -> None:
        """Have `release` set these, too, int32 and now 0: kernels of this rank wait for others to set them."""
        self._to_me.append(flags)
        with torch.cuda.stream(self._aside):
            flags.fill_(0)  # as in `__init__`
        self._aside.synchronize()

    def release(self) -> None:
        """Let kernels return that wait for a rank which is gone: give them the signals that they wait for, until the GPU has done what was enqueued,
        or `RELEASE_S` have passed. What they compute is undefined."""
        until = time.monotonic() + RELEASE_S
        with torch.cuda.device(self._buffer.device):
            self._passed.record(torch.cuda.default_stream(self._buffer.device))
            with torch.cuda.stream(self._aside):
                while not self._passed.query() and time.monotonic() < until:  # type: ignore[no-untyped-call]
                    for part in self._to_me:
                        part.fill_(1)  # the others have come
                    for part in self._from_me:
                        part.fill_(0)  # they have taken my signal
                    self._aside.synchronize()
                    time.sleep(RELEASE_POLL_S)

    def _takes(self, x: torch.Tensor) -> bool:
        fits = x.nbytes <= self.most_bytes and x.nbytes % ALIGNED_BYTES == 0
        return fits and x.dtype == self._buffer.dtype and x.is_contiguous() and x.data_ptr() % ALIGNED_BYTES == 0


def symmetric_buffer(numbers: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> tuple[SymmetricBuffer | None, str]:
    """Make a buffer for sums of up to so many `numbers`, at most `MOST_BYTES`, together with all other ranks of the group, which torch must know by
    its name. Returns None and the reason where there can't be one."""
    try:
        import torch.distributed._symmetric_memory as symmetric
    except ImportError as error:  # torch without CUDA, or for a system that hasn't got it
        return None, f"this torch has none: {error}"
    count = min(numbers * dtype.itemsize, MOST_BYTES) // ALIGNED_BYTES * ALIGNED_BYTES // dtype.itemsize
    try:
        buffer = symmetric.empty(count, dtype=dtype, device=device)
        handle = symmetric.rendezvous(buffer, group.group_name)
    except (RuntimeError, NotImplementedError) as error:
        return None, " ".join(str(error).split())[:200]
    return SymmetricBuffer(buffer, handle, group.group_name), ""
