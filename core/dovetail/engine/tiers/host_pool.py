"""`HostPool`: frames in host memory, with least-recently-used eviction."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dovetail.api.kv_transfers import Slab
from dovetail.engine.tiers.keys import HEADER_BYTES, FrameName
from dovetail.errors import ConfigError, DovetailError

logger = logging.getLogger("dovetail")

SLAB_BYTES = 256 << 20  # allocated at a time; pinning as much takes some 50 ms
AT_ONCE_BYTES = 64 << 20  # up to this size, a pool is allocated in the constructor


@dataclass(slots=True, eq=False)
class HostFrame:
    """A frame in the pool. While `users` isn't 0, it is neither evicted nor reused."""

    slab: int
    offset: int  # of the header in the slab
    data: memoryview = field(repr=False)  # header and pages
    name: FrameName | None = None  # key of `find`; None: not published
    seed: int = 0
    checksum: int = 0  # of the pages
    users: int = 0

    @property
    def pages_at(self) -> int:
        """Offset of the first page in the slab."""
        return self.offset + HEADER_BYTES

    @property
    def bytes(self) -> int:
        """Bytes of the pages."""
        return len(self.data) - HEADER_BYTES


class HostPool:
    """Memory for frames of a few sizes: each slab is divided into frames of one size. The engine's
    thread calls it; a thread of its own allocates the slabs.

    A frame is taken, filled, and published under its name. Users hold a frame while they use it.
    """

    def __init__(self, allocate: Callable[[int], Slab], limit: int, sizes: Iterable[int]) -> None:
        """`limit`: bytes. `sizes`: bytes of the frames' pages. Raises `ConfigError` if `limit` is
        too small."""
        slots = {HEADER_BYTES + size for size in sizes}
        largest = max(slots)
        count = max(limit // SLAB_BYTES, len(slots) + 1)
        self._slab_bytes = max(limit // count // 8 * 8, largest)
        self._left = limit // self._slab_bytes  # slabs to allocate
        if self._left < len(slots):
            raise ConfigError(
                f"kv_host_memory is {limit} bytes, and a frame of K and V has {largest} with this "
                f"model: give it at least {largest * len(slots)}, or leave it out"
            )
        self.limit = self._left * self._slab_bytes
        self._allocate = allocate
        self._slabs: deque[Slab] = deque()  # allocated, and not divided yet
        self._divided: dict[int, tuple[Slab, list[HostFrame]]] = {}  # by number, with its frames
        self._free: dict[int, list[HostFrame]] = {size: [] for size in slots}
        # published frames without users, by size; the least recently used first
        self._unused: dict[int, dict[HostFrame, None]] = {size: {} for size in slots}
        self._named: dict[FrameName, HostFrame] = {}
        self.bytes = 0  # of the published frames
        self._closed = False
        self._thread: threading.Thread | None = None
        if self.limit <= AT_ONCE_BYTES:
            self._grow()
        else:
            self._thread = threading.Thread(
                target=self._grow, name="dovetail-host-pool", daemon=True
            )
            self._thread.start()

    def _grow(self) -> None:
        while self._left and not self._closed:
            try:
                self._slabs.append(self._allocate(self._slab_bytes))
            except (DovetailError, MemoryError) as error:
                logger.warning(
                    "kv_host_memory: %d bytes less than set, as no more can be had: %s",
                    self._left * self._slab_bytes,
                    error,
                )
                return
            self._left -= 1

    def take(self, size: int, *, evicts: bool = True) -> HostFrame | None:
        """Return an unnamed frame for `size` bytes of pages, held once; None if there is none.
        `evicts`: another frame may be evicted for it."""
        slot = HEADER_BYTES + size
        if not self._free[slot]:
            self._divide(slot)
        if not self._free[slot] and evicts:
            self._evict(slot)
        if not self._free[slot]:
            return None
        frame = self._free[slot].pop()
        frame.users = 1
        return frame

    def _divide(self, slot: int) -> None:
        """Divide an undivided slab, if there is one, into frames."""
        if self._slabs:
            slab = self._slabs.popleft()
            starts = range(0, len(slab.data) - slot + 1, -(-slot // 8) * 8)
            frames = [
                HostFrame(slab.number, start, slab.data[start : start + slot]) for start in starts
            ]
            self._divided[slab.number] = slab, frames
            self._free[slot] += reversed(frames)

    def _evict(self, slot: int) -> None:
        """Free the least recently used frame of a size. A size without any slab takes one from
        another size whose frames are all unused."""
        if self._unused[slot]:
            self._forget(next(iter(self._unused[slot])))
            return
        if any(len(frames[0].data) == slot for _, frames in self._divided.values()):
            return
        for slab, frames in self._divided.values():
            if not any(frame.users for frame in frames):
                self._empty(slab, frames)
                self._divide(slot)
                return

    def _empty(self, slab: Slab, frames: list[HostFrame]) -> None:
        """Take a slab without used frames from its size."""
        for frame in frames:
            if frame.name is not None:
                self._forget(frame)
        size = len(frames[0].data)
        taken = {*frames}
        self._free[size] = [frame for frame in self._free[size] if frame not in taken]
        del self._divided[slab.number]
        self._slabs.appendleft(slab)

    def _forget(self, frame: HostFrame) -> None:
        """Free an unused frame."""
        size = len(frame.data)
        del self._unused[size][frame]
        self._unname(frame)
        self._free[size].append(frame)

    def _unname(self, frame: HostFrame) -> None:
        assert frame.name is not None
        del self._named[frame.name]
        frame.name = None
        self.bytes -= frame.bytes

    def publish(self, frame: HostFrame, name: FrameName) -> bool:
        """Publish a filled frame under `name`. Return False if the name is taken."""
        if name in self._named:
            return False
        frame.name = name
        self._named[name] = frame
        self.bytes += frame.bytes
        return True

    def find(self, name: FrameName) -> HostFrame | None:
        """Return the frame of that name, or None, and mark it as the most recently used."""
        frame = self._named.get(name)
        if frame is not None and not frame.users:
            unused = self._unused[len(frame.data)]
            del unused[frame]
            unused[frame] = None
        return frame

    def __contains__(self, name: FrameName) -> bool:
        return name in self._named

    def hold(self, frame: HostFrame) -> None:
        """Add a use of a named frame."""
        if not frame.users:
            del self._unused[len(frame.data)][frame]
        frame.users += 1

    def release(self, frame: HostFrame) -> None:
        """End one use. An unnamed frame without users becomes free."""
        frame.users -= 1
        if frame.users:
            return
        if frame.name is None:
            self._free[len(frame.data)].append(frame)
        else:
            self._unused[len(frame.data)][frame] = None

    def drop(self, name: FrameName) -> None:
        """Forget the frame of that name, if there is one; its memory is freed once it has no
        users."""
        frame = self._named.get(name)
        if frame is None:
            return
        if not frame.users:
            self._forget(frame)
        else:
            self._unname(frame)

    def clear(self) -> None:
        """Forget all frames."""
        for name in [*self._named]:
            self.drop(name)

    @property
    def names(self) -> tuple[FrameName, ...]:
        """The names of all published frames."""
        return tuple(self._named)

    @property
    def frames(self) -> int:
        """Number of published frames."""
        return len(self._named)

    def close(self) -> None:
        """End the thread and let go of the memory, since a closed engine may be held for longer.
        Frames in use may still be released. Idempotent."""
        self._closed = True
        if self._thread is not None:
            self._thread.join()
        self._slabs.clear()
        self._divided.clear()
        self._named.clear()
        self.bytes = 0
        for size, free in self._free.items():
            free.clear()
            self._unused[size].clear()

    def check_integrity(self) -> None:
        """Raise `DovetailError` unless each frame is in exactly one state: free, unused or used.
        For tests."""
        for size, free in self._free.items():
            unused = self._unused[size]
            mine = [f for _, fs in self._divided.values() for f in fs if len(f.data) == size]
            if {*free} & {*unused} or len({*free}) != len(free):
                raise DovetailError("host pool: a frame is free twice")
            for frame in mine:
                states = (frame in free, frame in unused, frame.users > 0)
                if sum(states) != 1:
                    raise DovetailError(f"host pool: {frame} is in {sum(states)} states")
        for name, frame in self._named.items():
            if frame.name != name or (
                not frame.users and frame not in self._unused[len(frame.data)]
            ):
                raise DovetailError(f"host pool: {name} is lost")
