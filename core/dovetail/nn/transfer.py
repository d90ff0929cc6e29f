"""Transfers between host and device: without synchronization on a GPU, and without copies on a CPU.

A GPU reads host memory in its own time, and only where it is pinned. So what goes there is put into
a ring of pinned buffers, which are made once:

      next ─┐
      ┌───┬─▼─┬───┬───┬─ ─┬────┐      a buffer holds the numbers of one copy; each eighth copy records an event behind it, which is waited for
      │ 0 │ 1 │ 2 │ 3 │ … │ 63 │      before the first of those eight buffers is filled again: in vain, unless the host is almost a whole ring
      └───┴───┴───┴───┴─ ─┴────┘      of copies ahead of the device

Results (`HostCopy`) have their own memory, since the host decides when it has read them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.nn.kernels.launch import ALIGNMENT

# more copies than the steps in flight need; one event per group, since recording costs as much as a
# copy
SLOTS = 64
TOGETHER = 8
SLOT_BYTES = 320 << 10  # the inputs of a recorded step of 8,192 tokens and 2,048 rows


class Event(Protocol):
    """Point in the device's queue, like `torch.cuda.Event`."""

    def record(self) -> None:
        """Set the point after everything enqueued so far."""

    def synchronize(self) -> None:
        """Wait until the device has passed it; return at once if it isn't set."""


class PinnedRing:
    """`slots` buffers of `slot_bytes`, used in turn by one thread, whose copies all go to one
    stream, or to others that it then waits for: an event stands for `together` copies.
    `make_buffer(bytes)` makes all buffers, [bytes] uint8."""

    def __init__(
        self,
        slots: int,
        slot_bytes: int,
        make_buffer: Callable[[int], torch.Tensor],
        make_event: Callable[[], Event],
        together: int = TOGETHER,
    ) -> None:
        self._buffers = make_buffer(slots * slot_bytes).view(slots, slot_bytes).unbind()
        self._arrays = [buffer.numpy() for buffer in self._buffers]  # the same memory
        self._together = together
        self._events = [make_event() for _ in range(0, slots, together)]
        self._next = 0

    def send(
        self, arrays: Sequence[NDArray[Any]], starts: Sequence[int], target: torch.Tensor
    ) -> None:
        """Enqueue a copy: in target [bytes] uint8 each of `arrays` begins at its start; what lies
        between them is undefined. The arrays may be changed at once. `target` has `slot_bytes` at
        most."""
        slot = self._next
        self._next = (self._next + 1) % len(self._buffers)
        event = self._events[slot // self._together]
        place = slot % self._together
        if place == 0:
            event.synchronize()
        for array, start in zip(arrays, starts, strict=True):
            self._arrays[slot][start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        target.copy_(self._buffers[slot][: len(target)], non_blocking=True)
        if place == self._together - 1 or self._next == 0:
            event.record()


class _Rings(threading.local):
    """Rings of one thread."""

    def __init__(self) -> None:
        self.of: dict[torch.device, PinnedRing] = {}


_rings = _Rings()


def _ring(device: torch.device) -> PinnedRing:
    """Return this thread's ring for the device, which must be current: events are recorded in the
    current stream."""
    if device not in _rings.of:
        _rings.of[device] = PinnedRing(SLOTS, SLOT_BYTES, _pinned, torch.cuda.Event)
    return _rings.of[device]


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def upload(array: NDArray[Any], target: torch.Tensor) -> None:
    """Enqueue `target` = `array`, of the same dtype and number of elements; `target` is contiguous.
    The array may be modified at once."""
    if target.device.type == "cpu":
        target.copy_(torch.from_numpy(array).reshape(target.shape))
    elif array.nbytes <= SLOT_BYTES:
        _ring(target.device).send([array], [0], target.view(-1).view(torch.uint8))
    else:  # torch keeps the memory until the copy has run
        target.copy_(torch.from_numpy(array).reshape(target.shape).pin_memory(), non_blocking=True)


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return `array` on the device, with its dtype. On the CPU the tensor shares the array's
    memory, so neither may be modified later."""
    array = np.ascontiguousarray(array)
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    target = torch.empty_like(tensor, device=device)
    upload(array, target)
    return target


def all_to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Like `to_device` for several arrays in one copy, which costs the host as much as some 10 KiB.
    On a GPU they are parts of one allocation."""
    *starts, size = _starts(arrays)
    if device.type == "cpu" or size > SLOT_BYTES:
        return [to_device(array, device) for array in arrays]
    target = torch.empty(size, dtype=torch.uint8, device=device)
    _ring(device).send(arrays, starts, target)
    return parts_of(target, arrays, starts)


def _starts(arrays: Sequence[NDArray[Any]]) -> list[int]:
    """Return where each begins, in bytes, if they lie behind each other, aligned as kernels like to
    read them; and where the last ends."""
    return [0, *accumulate(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)]


class Mirror:
    """Host arrays, and tensors of the same shapes and dtypes that are updated from them in one
    copy. Both keep their addresses."""

    def __init__(self, arrays: Sequence[NDArray[Any]], device: torch.device) -> None:
        """Create buffers with the content of `arrays`; tensors are set from the first `send` on."""
        *starts, size = self._starts = _starts(arrays)
        self._host = np.zeros(size, np.uint8)
        self._target = torch.zeros(size, dtype=torch.uint8, device=device)
        self.arrays = [
            self._host[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            for array, start in zip(arrays, starts, strict=True)
        ]
        for own, array in zip(self.arrays, arrays, strict=True):
            own[...] = array
        self.tensors = parts_of(self._target, arrays, starts)

    def send(self, last: int = -1, numbers: int | None = None) -> None:
        """Enqueue the copy, of the array at `last` and all before it; of that one of its first
        `numbers`. The arrays may be changed at once."""
        array = self.arrays[last]
        end = (
            self._starts[last % len(self.arrays)]
            + (array.size if numbers is None else numbers) * array.itemsize
        )
        upload(self._host[:end], self._target[:end])


def parts_of(
    target: torch.Tensor, arrays: Sequence[NDArray[Any]], starts: Sequence[int]
) -> list[torch.Tensor]:
    """Cut target [bytes] uint8, filled as `PinnedRing.send` says, into tensors with the arrays'
    shapes and dtypes."""
    parts = []
    for array, start in zip(arrays, starts, strict=True):
        part = target[start : start + array.nbytes].view(_torch_dtype(array.dtype))
        parts.append(part if array.ndim == 1 else part.view(array.shape))
    return parts


@cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


class HostCopy:
    """A tensor's current value being copied to the host. `value` may be read once the device has
    passed the point of its creation."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._tensor.copy_(tensor, non_blocking=True)

    @property
    def value(self) -> NDArray[Any]:
        return self._tensor.numpy()
