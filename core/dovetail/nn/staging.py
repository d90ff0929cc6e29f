"""Copies weights from mapped files to a GPU in several threads, through pinned memory.

One thread that copies from a mapped file waits in turn for the pages and for the device. Here
large tensors are cut into pieces, and each thread has two buffers and a stream:

      file      │ piece │ piece │ piece │ piece │ …            any free thread takes the next piece
      thread    buffer 0 ◀─ piece      buffer 1 ◀─ piece       … once the device has read the buffer
      stream                 buffer 0 ─▶ device    buffer 1 ─▶ device

On a CPU weights are copied by the calling thread: torch copies a tensor with all cores, which
leaves its memory near those that will read it.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from dovetail.errors import ModelLoadError
from dovetail.nn.transfer import Event, PinnedRing

# Larger pieces pin more memory; for smaller ones threads wait more often for Python's lock, while
# kernels are compiled.
PIECE_BYTES = 32 << 20
LEAST_BYTES = 1 << 20  # smaller tensors take longer to hand over than to copy
MOST_THREADS = 8


class Queue(Protocol):
    """Copies to a device in their order, and the memory that they read. Made and used by one
    thread, except for `synchronize` and `close`."""

    def make_buffer(self, num_bytes: int) -> torch.Tensor:
        """Return memory [num_bytes] uint8 of the host, which the device can read."""

    def make_event(self) -> Event:
        """Return an event that isn't set. It is recorded behind copies of this queue."""

    def synchronize(self) -> None:
        """Wait until all copies are done."""

    def close(self) -> None:
        """Free the memory of a queue without copies."""


class GpuQueue:
    """A stream, which is the thread's current one from now on. Its copies come after `before`."""

    def __init__(self, device: torch.device, before: torch.cuda.Event) -> None:
        self._device = device
        torch.cuda.set_device(device)  # of this thread
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_event(before)
        torch.cuda.set_stream(self._stream)
        self._pinned: list[torch.Tensor] = []

    def make_buffer(self, num_bytes: int) -> torch.Tensor:
        """Raises `ModelLoadError` if the memory can't be pinned."""
        # Torch's own pinned memory would stay in its cache. Pages of its own, since no page can be
        # pinned twice.
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        if code := int(_cuda().cudaHostRegister(memory.data_ptr(), num_bytes, 0)):
            raise ModelLoadError(
                f"{num_bytes >> 20} MiB of host memory can't be pinned: CUDA error {code}"
            )
        self._pinned.append(memory)
        return memory

    def make_event(self) -> Event:
        event: Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        return event

    def synchronize(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        with torch.cuda.device(self._device):
            while self._pinned:
                _cuda().cudaHostUnregister(self._pinned.pop().data_ptr())


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class Copies:
    """Copies to parameters, in the order of calls or any other. All are done at the end of this
    context. Used by one thread, whose own work on the device isn't waited for."""

    def __init__(self, make_queue: Callable[[], Queue] | None, threads: int) -> None:
        """`make_queue` is called by each of up to `threads` threads. None: each copy is done when
        its call returns."""
        self._make_queue = make_queue
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="dovetail-copies")
        self._most_pending = 2 * threads
        self._pending = deque[Future[None]]()
        self._queues: list[Queue] = []
        self._own = threading.local()  # `ring` of each thread

    @classmethod
    def to(cls, device: torch.device, ranks: int) -> Copies:
        """Return copies to a device of one of `ranks` processes that share the host's CPUs. On a
        GPU they come after the work on the current stream."""
        threads = min(MOST_THREADS, max(1, _usable_cpus() // ranks))
        if device.type != "cuda":
            return cls(None, threads)
        before = torch.cuda.current_stream(device).record_event()
        return cls(lambda: GpuQueue(device, before), threads)

    def copy(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Copy values, of the CPU, to a target of the same shape, now or until `wait` returns: they
        mustn't change before. Raises what earlier copies raised."""
        if self._make_queue is None or not _is_large_and_plain(target, values):
            target.copy_(values)
            return
        for piece, source in _pieces(target, values):
            if len(self._pending) == self._most_pending:
                self._pending.popleft().result()
            self._pending.append(self._threads.submit(self._send, piece, source))

    def wait(self) -> None:
        """Wait for all copies. Raises what they raised."""
        while self._pending:
            self._pending.popleft().result()
        for queue in self._queues:
            queue.synchronize()

    def _send(self, target: torch.Tensor, source: NDArray[Any]) -> None:
        ring: PinnedRing | None = getattr(self._own, "ring", None)
        if ring is None:
            assert self._make_queue is not None
            queue = self._make_queue()
            self._queues.append(queue)
            ring = PinnedRing(2, PIECE_BYTES, queue.make_buffer, queue.make_event, together=1)
            self._own.ring = ring
        ring.send([source], [0], target)

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self._threads.shutdown(wait=True, cancel_futures=True)
            for queue in self._queues:
                queue.synchronize()
                queue.close()


def _is_large_and_plain(target: torch.Tensor, values: torch.Tensor) -> bool:
    """Return True if values can be copied as bytes, in pieces, and are worth it."""
    return (
        target.nbytes >= LEAST_BYTES
        and (target.shape, target.dtype) == (values.shape, values.dtype)
        and target.is_contiguous()
        and (
            values.is_contiguous()
            or (values.stride(-1) == 1 and target[0].nbytes <= PIECE_BYTES)  # whole rows
        )
    )


def _pieces(
    target: torch.Tensor, values: torch.Tensor
) -> Iterator[tuple[torch.Tensor, NDArray[Any]]]:
    """Yield parts of up to `PIECE_BYTES` that together are all: of the target, [bytes] uint8, and
    of the values, uint8."""
    flat = target.view(-1).view(torch.uint8)
    rows = (values.view(-1) if values.is_contiguous() else values).view(torch.uint8).numpy()
    row_bytes = target.nbytes // len(rows)
    at_once = PIECE_BYTES // row_bytes
    for first in range(0, len(rows), at_once):
        some = rows[first : first + at_once]
        yield flat[first * row_bytes : (first + len(some)) * row_bytes], some


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
