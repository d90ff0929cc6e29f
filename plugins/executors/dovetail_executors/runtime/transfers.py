"""Copies of pages between the pool of one device and host memory.

A copy goes through staging buffers on the device, piece by piece. A save gathers pages on the
stream of the steps, so that it reads what the steps before it wrote, and later steps may write;
a restore scatters on a stream of its own, after the steps submitted so far:

    save      steps' stream ── step ── gather, checksum ─┐
              copy stream                                └─ to the host ── event
    restore   copy stream   ── from the host ─┐
              its own stream                  └─ scatter, checksum ── event

On a CPU there are no streams, and both happen at once.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib import metadata
from itertools import count, groupby
from typing import Any

import numpy as np
import torch

from dovetail.api.kv_cache import KVLayout
from dovetail.api.kv_layout import PlannedLayout
from dovetail.api.kv_transfers import (
    WORD,
    KVTransfers,
    Slab,
    Transfer,
    Transferred,
    frame_multipliers,
)
from dovetail.errors import DISTRIBUTION, DovetailError
from dovetail.nn.transfer import HostCopy, to_device
from dovetail_executors.runtime.kv_pool import KVPool
from dovetail_executors.runtime.memory import available_ram_bytes, readable_bytes

PIECE_BYTES = 32 << 20  # of a staging buffer; a page may be larger
SAVE_PIECES = 4  # staging buffers of saves: later ones delay the steps until one is free
RESTORE_PIECES = 2  # … and of restores: one is filled while the other is emptied
MODULUS = 1 << 64
FRAME_TOKENS = 256  # of the core's frames; larger ones take a moment longer, once


def device_bytes(layout: KVLayout, ranks: int = 1) -> int:
    """Return the most memory that the transfers of one of `ranks` GPUs take there, in bytes: the
    staging buffers, and the multipliers of a frame's words."""
    pages = max(1, PIECE_BYTES // layout.page_bytes)
    staging = (SAVE_PIECES + RESTORE_PIECES) * pages * layout.page_bytes
    return staging + ranks * _frame_bytes(layout)


def _frame_bytes(layout: KVLayout) -> int:
    """Return the bytes of a rank's part of the core's largest frame."""
    tokens = max(FRAME_TOKENS, layout.hit_tokens)
    pages = max(group.blocks(tokens) * group.pages_per_block for group in layout.groups)
    return pages * layout.page_bytes


class _Queue:
    """A stream of the device. On a CPU, where everything runs at once, it does nothing."""

    def __init__(self, device: torch.device, *, of_steps: bool = False) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.current_stream(device) if of_steps else _new_stream(device)

    def use(self) -> AbstractContextManager[object]:
        """Enqueue what follows in this stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """Return an event after everything enqueued so far."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let what follows wait for `event`."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def finish(self) -> None:
        """Wait on the host until all is done."""
        if self._stream is not None:
            self._stream.synchronize()


def _passed(event: torch.cuda.Event | None) -> bool:
    return event is None or bool(event.query())  # type: ignore[no-untyped-call]


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@dataclass
class _Piece:
    """A staging buffer: `data` [pages, page_bytes] uint8 on the device, used again after `free`."""

    data: torch.Tensor
    free: torch.cuda.Event | None = None


class _Staging:
    """Buffers that are used in turn."""

    def __init__(self, pieces: int, pages: int, page_bytes: int, device: torch.device) -> None:
        memory = torch.empty((pieces, pages, page_bytes), dtype=torch.uint8, device=device)
        self.pieces = [_Piece(data) for data in memory.unbind()]
        self._next = 0

    def next(self) -> _Piece:
        piece = self.pieces[self._next]
        self._next = (self._next + 1) % len(self.pieces)
        return piece


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a transfer that one device copies, between its `pages` and host memory: `of_host`
    [n * page_bytes] uint8, which `PageCopies.register` has pinned."""

    pages: Sequence[int]
    of_host: torch.Tensor
    first: int  # number in its frame of the first word of `of_host`
    seed: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Pages that go through a staging buffer together: `pages` of each of `parts`."""

    parts: Sequence[Part]
    pages: slice
    start: int  # number of the first of them among the pages of all parts

    @property
    def all(self) -> slice:
        """The places of its pages among those of all parts."""
        return slice(self.start, self.start + len(self.parts) * self.each)

    @property
    def each(self) -> int:
        """The number of pages of each part."""
        return int(self.pages.stop - self.pages.start)


@dataclass(frozen=True, slots=True)
class Copying:
    """Copies that were enqueued together."""

    event: torch.cuda.Event | None
    sums: HostCopy  # [2, pages of all parts] int64, see `PageCopies`
    parts: Sequence[tuple[int, int]]  # pages and seed of each
    used: tuple[torch.Tensor, ...]  # by streams that don't own them, until the event

    @property
    def done(self) -> bool:
        return _passed(self.event)

    @property
    def checksums(self) -> list[int]:
        """The checksum of each part; only once it is done."""
        found = []
        sums = self.sums.value.view(np.uint64)
        start = 0
        for pages, seed in self.parts:
            weighted, plain = sums[:, start : start + pages].sum(axis=1).tolist()
            found.append((weighted + 2 * seed * plain) % MODULUS)
            start += pages
        return found


class PageCopies:
    """Copies pages of one pool. Several parts are enqueued together, since each operation that the
    host enqueues takes its time, in which no step can be planned: small parts share a staging
    buffer, and all share the upload of page numbers and the download of checksums.

    The device computes two sums over the words of each page, and `Copying.checksums` combines them
    with the seed: sum of word * (multiplier + 2 seed) = sum of word * multiplier + 2 seed * sum of
    word.
    """

    def __init__(
        self, pool: KVPool, saving: int = SAVE_PIECES, restoring: int = RESTORE_PIECES
    ) -> None:
        """`pool` is allocated, and has pages whose bytes are a multiple of `WORD`. The current
        stream is that of the steps. `saving` and `restoring`: numbers of staging buffers."""
        device = pool.device
        self.pool = pool
        self.page_bytes = pool.page_bytes
        # of a piece
        self._pages = min(max(1, PIECE_BYTES // pool.page_bytes), pool.waste_page)
        self._steps = _Queue(device, of_steps=True)
        self._to_host = _Queue(device)
        self._from_host = _Queue(device)
        self._scattering = _Queue(device)
        self._saving = _Staging(saving, self._pages, self.page_bytes, device)
        self._restoring = _Staging(restoring, self._pages, self.page_bytes, device)
        self._multipliers = torch.empty(0, dtype=torch.int64, device=device)
        self.slabs: dict[int, torch.Tensor] = {}  # [bytes] uint8, by number
        self._registered: list[int] = []  # addresses

    def register(self, memory: torch.Tensor) -> None:
        """Pin host memory, so that the device copies from and to it by itself. Called by any
        thread. Raises `DovetailError` if that can't be done."""
        if self.pool.device.type != "cuda":
            return
        with torch.cuda.device(self.pool.device):
            runtime = _cuda()
            code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if code:
            raise DovetailError(
                f"{memory.nbytes >> 20} MiB of host memory can't be pinned: CUDA error {code}"
            )
        self._registered.append(memory.data_ptr())

    @torch.inference_mode()
    def save(self, parts: Sequence[Part]) -> Copying:
        """Enqueue: `of_host` of each part = the bytes of its pages, as of the steps submitted so
        far."""
        index = self._on_device(parts)
        sums = self._new_sums(len(index))
        for run in self._runs(parts):
            piece = self._saving.next()
            data = piece.data[: run.each * len(run.parts)]
            self._steps.wait(piece.free)
            self.pool.gather(index[run.all], data)
            self._sum(data, run, sums)
            self._to_host.wait(self._steps.mark())
            with self._to_host.use():
                for host, rows in self._rows(run, data):
                    host.copy_(rows, non_blocking=True)
            piece.free = self._to_host.mark()
        result = HostCopy(sums)
        self._to_host.wait(self._steps.mark())
        return self._copying(self._to_host, result, parts, index)

    @torch.inference_mode()
    def restore(self, parts: Sequence[Part]) -> Copying:
        """Enqueue: the bytes of each part's pages = its `of_host`, after the steps submitted so
        far. Those of a page -1 are written nowhere, but summed."""
        index = self._on_device(parts)
        self._scattering.wait(self._steps.mark())
        with self._scattering.use():
            sums = self._new_sums(len(index))
        for run in self._runs(parts):
            piece = self._restoring.next()
            data = piece.data[: run.each * len(run.parts)]
            self._from_host.wait(piece.free)
            with self._from_host.use():
                for host, rows in self._rows(run, data):
                    rows.copy_(host, non_blocking=True)
            self._scattering.wait(self._from_host.mark())
            with self._scattering.use():
                self.pool.scatter(index[run.all], data)
                self._sum(data, run, sums)
            piece.free = self._scattering.mark()
        with self._scattering.use():
            result = HostCopy(sums)
        return self._copying(self._scattering, result, parts, index)

    def save_capacity(self) -> int:
        """Return how many bytes of saves fit into free staging buffers; on a CPU, any number."""
        if self.pool.device.type == "cpu":
            return 1 << 62
        free = sum(_passed(piece.free) for piece in self._saving.pieces)
        return free * self._pages * self.page_bytes

    def close(self) -> None:
        """Wait for what was enqueued, and free the memory of the device and the host, since others
        may hold this object for longer. Nothing can be copied afterwards. Idempotent."""
        for queue in (self._to_host, self._from_host, self._scattering):
            queue.finish()
        while self._registered:
            with suppress(RuntimeError):  # of a device that has failed
                _cuda().cudaHostUnregister(self._registered.pop())
        self.slabs.clear()
        for name in ("pool", "_saving", "_restoring", "_multipliers"):
            vars(self).pop(name, None)

    def prepare(self, words: int) -> None:
        """Make the multipliers of a frame's first `words` words, on the stream of the steps."""
        if words > len(self._multipliers):
            multipliers = frame_multipliers(words).view(np.int64)
            self._multipliers = to_device(multipliers, self.pool.device)

    def _copying(
        self, last: _Queue, sums: HostCopy, parts: Sequence[Part], index: torch.Tensor
    ) -> Copying:
        """Return what was enqueued, which ends in the queue `last`."""
        told = [(len(part.pages), part.seed) for part in parts]
        return Copying(last.mark(), sums, told, (index, self._multipliers))

    def _on_device(self, parts: Sequence[Part]) -> torch.Tensor:
        """Return the pages of all parts [n] int64 on the device, where the multipliers of their
        words are then, too, by the stream of the steps."""
        numbers = np.array([page for part in parts for page in part.pages], np.int64)
        numbers[numbers < 0] = self.pool.waste_page
        self.prepare(max(part.first + part.of_host.nbytes // WORD for part in parts))
        return to_device(numbers, self.pool.device)

    def _runs(self, parts: Sequence[Part]) -> Iterator[_Run]:
        """Divide the pages of all parts, in order, into runs that fit into a staging buffer: of
        several parts with equally many pages, or of a part that is too large."""
        start = 0
        for (pages, _), alike in groupby(parts, lambda part: (len(part.pages), part.first)):
            same = [*alike]
            together = max(1, self._pages // pages)
            for at in range(0, len(same), together):
                some = same[at : at + together]
                for begin in range(0, pages, self._pages):
                    run = _Run(some, slice(begin, min(begin + self._pages, pages)), start)
                    start = run.all.stop
                    yield run

    def _rows(self, run: _Run, data: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the host memory of each part of a run, and its rows of `data`, the run's pages."""
        for part, rows in zip(run.parts, data.view(len(run.parts), run.each, -1), strict=True):
            yield part.of_host.view(-1, self.page_bytes)[run.pages], rows

    def _new_sums(self, pages: int) -> torch.Tensor:
        return torch.empty((2, pages), dtype=torch.int64, device=self.pool.device)

    def _sum(self, data: torch.Tensor, run: _Run, sums: torch.Tensor) -> None:
        """Write the two sums over the words of each page of a run, which are in `data`."""
        size = self.page_bytes // WORD
        words = data.view(torch.int64).view(len(run.parts), run.each, size)
        begin = run.parts[0].first + run.pages.start * size
        multipliers = self._multipliers[begin : begin + run.each * size].view(run.each, size)
        weighted, plain = sums[:, run.all].view(2, len(run.parts), run.each).unbind()
        torch.sum(words * multipliers, 2, out=weighted)
        torch.sum(words, 2, out=plain)


def name_of_bytes(
    attention: str, planned: PlannedLayout, ranks: int, scales: str, device: torch.device
) -> str:
    """Return the name of all that decides the bytes of a page and what they mean: versions of
    Dovetail, torch and the `attention` backend (a qualified name), the kind of `device`, the places
    of layers, and `scales`."""
    layout = repr((planned.places, planned.slot_bytes, planned.states, planned.layout))
    distribution = attention.partition(":")[0]
    return ", ".join(
        (
            f"{DISTRIBUTION} {_version(DISTRIBUTION)}",
            f"{attention} {_version(distribution)}".rstrip(),
            f"torch {torch.__version__} on {_kind_of(device)}",
            f"layout {sha256(layout.encode()).hexdigest()[:16]}",
            f"ranks {ranks}",
            f"scales {scales}",
        )
    )


def _kind_of(device: torch.device) -> str:
    """Return what decides the order of additions on a device."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


class PartOfTransfers:
    """The part of one rank in transfers: in each, its bytes of all pages lie together, after those
    of the ranks before it. `add` may be called by another thread than `start`."""

    def __init__(self, copies: PageCopies, rank: int = 0) -> None:
        self.copies = copies
        self._rank = rank
        copies.prepare((rank + 1) * _frame_bytes(copies.pool.planned.layout) // WORD)
        self._most = 0  # bytes that slabs may have together

    def require_room(self, size: int) -> None:
        """Raise `DovetailError` unless the slabs and `size` more bytes fit into the memory that was
        available before the first. The system gives more, and ends the process once it is used."""
        if not self.copies.slabs:
            self._most = available_ram_bytes()
        if sum(slab.nbytes for slab in self.copies.slabs.values()) + size > self._most:
            raise DovetailError(f"{readable_bytes(self._most)} of memory were available")

    def add(self, number: int, memory: mmap.mmap) -> None:
        """Use `memory` as a slab. Raises `DovetailError` if the device can't."""
        slab = torch.frombuffer(memory, dtype=torch.uint8)
        self.copies.register(slab)
        self.copies.slabs[number] = slab

    def start(self, transfers: Sequence[Transfer], *, saves: bool) -> Copying:
        """Enqueue this rank's parts of saves or restores."""
        act = self.copies.save if saves else self.copies.restore
        return act([self._part(transfer) for transfer in transfers])

    def _part(self, transfer: Transfer) -> Part:
        size = len(transfer.pages) * self.copies.page_bytes
        before = self._rank * size
        start = transfer.offset + before
        memory = self.copies.slabs[transfer.slab][start : start + size]
        return Part(transfer.pages, memory, before // WORD, transfer.seed)


class LocalTransfers(KVTransfers):
    """The transfers of one device."""

    def __init__(self, copies: PageCopies, name: str) -> None:
        self.name = name
        self.page_bytes = copies.page_bytes
        self._own = PartOfTransfers(copies)
        self._numbers = count()
        self._pending: list[tuple[list[int], Copying]] = []  # with their ids

    def allocate(self, size: int) -> Slab:
        self._own.require_room(size)
        try:
            memory = mmap.mmap(-1, size)
        except (OSError, ValueError, OverflowError) as error:
            raise DovetailError(f"{size} bytes of host memory can't be had: {error}") from error
        slab = Slab(next(self._numbers), memoryview(memory))
        self._own.add(slab.number, memory)
        return slab

    def save(self, transfer: Transfer) -> None:
        self.save_all([transfer])

    def restore(self, transfer: Transfer) -> None:
        self.restore_all([transfer])

    def save_all(self, transfers: Sequence[Transfer]) -> None:
        self._start(transfers, saves=True)

    def restore_all(self, transfers: Sequence[Transfer]) -> None:
        self._start(transfers, saves=False)

    def finished(self) -> Sequence[Transferred]:
        pending = self._pending
        self._pending = []
        done: list[Transferred] = []
        for ids, copying in pending:
            if copying.done:
                done += map(Transferred, ids, copying.checksums)
            else:
                self._pending.append((ids, copying))
        return done

    def save_capacity(self) -> int:
        return self._own.copies.save_capacity()

    def _start(self, transfers: Sequence[Transfer], *, saves: bool) -> None:
        ids = [transfer.id for transfer in transfers]
        self._pending.append((ids, self._own.start(transfers, saves=saves)))
