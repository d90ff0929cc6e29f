"""Copies between host and device, with a stand-in for a device that is late: it runs nothing before
it is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.nn import transfer
from dovetail.nn.transfer import (
    ALIGNMENT,
    HostCopy,
    Mirror,
    PinnedRing,
    all_to_device,
    parts_of,
    to_device,
    upload,
)
from tests.support import examples

CPU = torch.device("cpu")
DTYPES = [np.int32, np.int64, np.float32, np.bool_]


class LateDevice:
    """Runs what is enqueued, in order, as late as it may."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.done = 0  # of the queue

    def run_until(self, end: int) -> None:
        while self.done < end:
            self.queue[self.done]()
            self.done += 1

    def event(self) -> LateEvent:
        return LateEvent(self)

    def tensor(self, num_bytes: int) -> Any:
        return LateTensor(self, num_bytes)


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self.device, self.point = device, 0

    def record(self) -> None:
        self.point = len(self.device.queue)

    def synchronize(self) -> None:
        self.device.run_until(self.point)


class LateTensor:
    """Target of a ring, to which copies are enqueued."""

    def __init__(self, device: LateDevice, num_bytes: int) -> None:
        self.device, self.values = device, torch.zeros(num_bytes, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.values)

    def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self.device.queue.append(lambda: self._copy(source))

    def _copy(self, source: torch.Tensor) -> None:
        """Copy the source's contents at the time of execution."""
        self.values[: len(source)] = source


def ring_of(
    device: LateDevice, slots: int = 3, slot_bytes: int = 64, together: int = 1
) -> PinnedRing:
    return PinnedRing(
        slots,
        slot_bytes,
        lambda count: torch.zeros(count, dtype=torch.uint8),
        device.event,
        together,
    )


@st.composite
def some_arrays(draw: st.DrawFn) -> list[np.ndarray]:
    """Up to three, that fit a slot of 64 bytes."""
    shapes = draw(st.lists(st.sampled_from([(0,), (1,), (2,), (1, 2)]), min_size=1, max_size=3))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    return [rng.integers(0, 2, shape).astype(draw(st.sampled_from(DTYPES))) for shape in shapes]


@examples(quick=100, full=3000)
@given(st.lists(some_arrays(), max_size=12), st.integers(1, 5), st.integers(1, 5))
def test_sent_values_arrive_even_if_the_device_is_late_and_arrays_change(
    sent: list[list[np.ndarray]], slots: int, together: int
) -> None:
    device, arrived = LateDevice(), []
    ring = ring_of(device, slots, together=together)
    for arrays in sent:
        starts = [ALIGNMENT * index for index in range(len(arrays))]
        target, expected = device.tensor(64), [array.copy() for array in arrays]
        ring.send(arrays, starts, target)
        for array in arrays:
            array[:] = 1 - array.astype(np.int64)
        arrived.append((target, expected, starts))
    device.run_until(len(device.queue))
    for target, expected, starts in arrived:
        for part, array in zip(parts_of(target.values, expected, starts), expected, strict=True):
            assert part.numpy().dtype == array.dtype
            np.testing.assert_array_equal(part.numpy(), array)


@pytest.mark.parametrize("together", [1, 2, 3])
def test_the_host_waits_for_nothing_until_it_is_a_whole_ring_ahead(together: int) -> None:
    device = LateDevice()
    ring, array = ring_of(device, slots=6, together=together), np.ones(4, np.int32)
    for _ in range(6):
        ring.send([array], [0], device.tensor(16))
    assert device.done == 0
    for _ in range(together):
        ring.send([array], [0], device.tensor(16))
        assert device.done == together, (
            "for the copies whose event stands for the one whose buffer it needs"
        )


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_arrays_sent_together_keep_their_shapes_and_dtypes(
    device_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For "cuda", with memory of the CPU instead of both the GPU's and the pinned."""
    arrays = [
        np.arange(3),
        np.zeros(0, np.int64),
        np.array([[1, 2], [3, 4]], np.int32).T,
        np.array([True]),
        np.arange(5, dtype=np.float32),
    ]
    device, late = CPU, LateDevice()
    if device_type == "cuda":
        device, empty = torch.device("cuda:0"), torch.empty
        monkeypatch.setattr(transfer, "_ring", lambda device: ring_of(late, slot_bytes=256))
        monkeypatch.setattr(
            transfer.torch, "empty", lambda *size, device, **other: empty(*size, **other)
        )
    sent = all_to_device(arrays, device)
    assert [tensor.dtype for tensor in sent] == [
        torch.int64,
        torch.int64,
        torch.int32,
        torch.bool,
        torch.float32,
    ]
    for tensor, array in zip(sent, arrays, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
    if device_type == "cuda":
        assert [tensor.storage_offset() * tensor.itemsize % ALIGNMENT for tensor in sent] == [
            0
        ] * len(sent)


def test_a_mirror_sends_what_its_arrays_hold_and_keeps_its_addresses() -> None:
    mirror = Mirror([np.full(3, 7), np.zeros((2, 2), np.int32), np.zeros(0), np.array([True])], CPU)
    at = [tensor.data_ptr() for tensor in mirror.tensors]
    assert [place % ALIGNMENT for place in at] == [at[0] % ALIGNMENT] * 4
    mirror.send()
    assert [tensor.tolist() for tensor in mirror.tensors] == [
        [7, 7, 7],
        [[0, 0], [0, 0]],
        [],
        [True],
    ]
    mirror.arrays[0][1], mirror.arrays[1][1] = 5, 6
    mirror.arrays[3][0] = False
    assert mirror.tensors[0].tolist() == [7, 7, 7], "until it is sent"
    mirror.send()
    mirror.arrays[0][:] = 0
    assert [tensor.tolist() for tensor in mirror.tensors] == [
        [7, 5, 7],
        [[0, 0], [6, 6]],
        [],
        [False],
    ]
    assert [tensor.data_ptr() for tensor in mirror.tensors] == at
    assert [tensor.dtype for tensor in mirror.tensors] == [
        torch.int64,
        torch.int32,
        torch.float64,
        torch.bool,
    ]


@pytest.mark.parametrize(
    ("last", "numbers", "expected"),
    [
        (-1, None, [9] * 6),
        (-1, 1, [9] * 5 + [0]),
        (2, 0, [9] * 4 + [0] * 2),
        (0, 1, [9] + [0] * 5),
        (1, None, [9] * 4 + [0] * 2),
    ],
)
def test_of_a_mirror_as_much_is_sent_as_is_said(
    last: int, numbers: int | None, expected: list[int]
) -> None:
    mirror = Mirror([np.zeros(3), np.zeros(1, np.int32), np.zeros(2, np.int64)], CPU)
    for array in mirror.arrays:
        array[:] = 9
    mirror.send(last, numbers)
    assert torch.cat([tensor.long() for tensor in mirror.tensors]).tolist() == expected


def test_on_the_cpu_nothing_is_copied() -> None:
    array = np.arange(4)
    assert to_device(array, CPU).data_ptr() == array.ctypes.data


def test_an_upload_fills_its_target_and_lets_the_array_go() -> None:
    array, target = np.arange(6, dtype=np.int32).reshape(2, 3), torch.zeros(6, dtype=torch.int32)
    upload(array, target)
    array[:] = 9
    assert target.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_copy_keeps_its_value_when_the_tensor_is_overwritten() -> None:
    tensor = torch.tensor([1, 2, 3])
    copy = HostCopy(tensor)
    tensor.fill_(9)
    assert copy.value.tolist() == [1, 2, 3]
