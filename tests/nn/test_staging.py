"""Copies in several threads, with stand-ins for devices that are late: they run nothing before they
are waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import ModelLoadError
from dovetail.nn import staging
from dovetail.nn.staging import Copies
from tests.runtime.test_transfer import LateDevice, LateEvent
from tests.support import examples

current = threading.local()  # `device`, as a thread's current stream


class LateQueue:
    """Queue of the thread that makes it."""

    def __init__(self, opened: list[LateQueue]) -> None:
        self.device = current.device = LateDevice()
        self.buffers = 0
        self.closed = False
        opened.append(self)

    def make_buffer(self, num_bytes: int) -> torch.Tensor:
        self.buffers += 1
        return torch.full((num_bytes,), 0x55, dtype=torch.uint8)

    def make_event(self) -> LateEvent:
        return self.device.event()

    def synchronize(self) -> None:
        self.device.run_until(len(self.device.queue))

    def close(self) -> None:
        assert self.device.done == len(self.device.queue), "memory is freed before it is read"
        self.closed = True


class LateTarget(torch.Tensor):
    """Tensor to which other threads' copies are enqueued, in their current device."""

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> Any:
        own = self.as_subclass(torch.Tensor)
        if not hasattr(current, "device"):
            return own.copy_(source)
        assert non_blocking
        current.device.queue.append(lambda: own.copy_(source))
        return self


@pytest.fixture
def sized(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    def use(piece_bytes: int, least_bytes: int) -> None:
        monkeypatch.setattr(staging, "PIECE_BYTES", piece_bytes)
        monkeypatch.setattr(staging, "LEAST_BYTES", least_bytes)

    return use


def cut(whole: torch.Tensor, way: str) -> torch.Tensor:
    """Return the part of a tensor that a rank or a layer reads this way."""
    return {
        "whole": whole,
        "rows": whole[1:],
        "columns": whole[..., 1:],
        "every second row": whole[::2],
        "every second column": whole[..., ::2],
        "turned": whole.t() if whole.ndim < 3 else whole.transpose(0, 1),
        "repeated": whole[:1].expand(3, *whole.shape[1:]),
    }[way]


WAYS = ["whole", "rows", "columns", "every second row", "every second column", "turned", "repeated"]


@st.composite
def values(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return cut(numbers.to(dtype), draw(st.sampled_from(WAYS)))


@examples(quick=60, full=3000)
@given(
    st.lists(values(), max_size=8),
    st.integers(8, 300),
    st.sampled_from([1, 64]),
    st.integers(1, 3),
    st.integers(0, 8),
)
def test_all_values_are_there_at_the_end_and_whenever_they_are_waited_for(
    copied: list[torch.Tensor], piece_bytes: int, least_bytes: int, threads: int, waiting: int
) -> None:
    queues: list[LateQueue] = []
    targets = [
        torch.full(one.shape, float("nan"), dtype=one.dtype).as_subclass(LateTarget)
        for one in copied
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "PIECE_BYTES", piece_bytes)
        patch.setattr(staging, "LEAST_BYTES", least_bytes)
        with Copies(lambda: LateQueue(queues), threads) as copies:
            for number, (target, one) in enumerate(zip(targets, copied, strict=True)):
                copies.copy(target, one)
                if number == waiting:
                    copies.wait()
                    assert_equal(targets[: number + 1], copied[: number + 1])
    assert_equal(targets, copied)
    assert len(queues) <= threads
    assert all(queue.closed for queue in queues)


def assert_equal(targets: list[torch.Tensor], copied: list[torch.Tensor]) -> None:
    for target, one in zip(targets, copied, strict=False):
        assert torch.equal(target.as_subclass(torch.Tensor), one)


@pytest.mark.parametrize("way", ["whole", "columns"])
def test_large_tensors_go_through_buffers_that_are_used_again(
    way: str, sized: Callable[[int, int], None]
) -> None:
    """The tensor has ten pieces, and a buffer has room for two."""
    sized(64, 64)
    one = cut(torch.randn(40, 5), way)[:, :4]
    target = torch.zeros(one.shape).as_subclass(LateTarget)
    queues: list[LateQueue] = []
    with Copies(lambda: LateQueue(queues), 1) as copies:
        copies.copy(target, one)
        copies.wait()
        (queue,) = queues
        assert (len(queue.device.queue), queue.buffers) == (10, 1)
    assert_equal([target], [one])


def test_other_shapes_and_dtypes_are_copied_as_torch_does(
    sized: Callable[[int, int], None],
) -> None:
    sized(64, 1)
    made: list[LateQueue] = []
    wide = torch.zeros(3, 4)
    with Copies(lambda: LateQueue(made), 1) as copies:
        copies.copy(wide, torch.ones(3, 4, dtype=torch.bfloat16))
        copies.copy(wide[:, 1:3], torch.full((3, 2), 2.0))
        copies.copy(wide[0], torch.tensor(3.0))
        with pytest.raises(RuntimeError, match="must match"):
            copies.copy(wide, torch.ones(3, 5))
    assert wide.tolist() == [[3, 3, 3, 3], [1, 2, 2, 1], [1, 2, 2, 1]]
    assert made == []


def test_what_a_thread_raises_is_raised_at_the_end_and_memory_is_freed(
    sized: Callable[[int, int], None],
) -> None:
    sized(64, 1)
    made: list[LateQueue] = []

    class Unpinned(LateQueue):
        def make_buffer(self, num_bytes: int) -> torch.Tensor:
            raise ModelLoadError("can't be pinned")

    with (
        pytest.raises(ModelLoadError, match="can't be pinned"),
        Copies(lambda: Unpinned(made), 2) as copies,
    ):
        copies.copy(torch.zeros(4), torch.ones(4))
    assert [queue.closed for queue in made] == [True]


def test_memory_is_freed_after_the_copies_when_something_else_fails(
    sized: Callable[[int, int], None],
) -> None:
    sized(64, 1)
    made: list[LateQueue] = []
    target = torch.zeros(64).as_subclass(LateTarget)

    def fail_halfway() -> None:
        with Copies(lambda: LateQueue(made), 2) as copies:
            copies.copy(target, torch.ones(64))
            raise KeyError

    with pytest.raises(KeyError):
        fail_halfway()
    assert all(queue.closed for queue in made)
