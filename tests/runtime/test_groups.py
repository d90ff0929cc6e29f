"""Groups of ranks over torch.distributed, here threads of one process that talk through gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import pytest
import torch

from dovetail.errors import DovetailError
from dovetail.nn.kernels.launch import compiling_ahead
from dovetail_executors.runtime import groups
from dovetail_executors.runtime.groups import TorchGroup

CPU = torch.device("cpu")
LIMIT_S = 60
_folder, _numbers = TemporaryDirectory(), count()


@contextmanager
def store() -> Iterator[str]:
    """A file that outlasts the test: torch opens it once more when it frees its store, perhaps much
    later, and ends the process if it can't."""
    yield f"{_folder.name}/{next(_numbers)}"


def on_ranks(size: int, act: Callable[[TorchGroup], Any]) -> list[Any]:
    with store() as path, ThreadPoolExecutor(size) as pool:
        ranks = [TorchGroup(rank, size, CPU, "test", path, 30.0) for rank in range(size)]
        return [future.result(LIMIT_S) for future in [pool.submit(act, rank) for rank in ranks]]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_over_all_ranks_in_place_and_the_same_on_each(
    size: int, dtype: torch.dtype
) -> None:
    def act(group: TorchGroup) -> tuple[torch.Tensor, bool]:
        mine = torch.arange(12, dtype=dtype).view(3, 4) * (group.rank + 1)
        return mine, group.all_reduce(mine) is mine

    expected = torch.arange(12, dtype=dtype).view(3, 4) * sum(range(1, size + 1))
    for total, in_place in on_ranks(size, act):
        assert in_place
        assert torch.equal(total, expected)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_what_is_gathered_lies_in_the_order_of_ranks(dim: int) -> None:
    parts = [torch.full((2, 3), float(rank)) for rank in range(3)]
    for gathered in on_ranks(
        3, lambda group: group.all_gather(parts[group.rank].t().contiguous().t(), dim)
    ):
        assert torch.equal(gathered, torch.cat(parts, dim))


def test_ranks_agree_if_all_do() -> None:
    def act(group: TorchGroup) -> list[bool]:
        with torch.inference_mode():  # they join in a step
            group.all_reduce(torch.ones(1))
        return [group.agree(True), group.agree(group.rank > 0), group.agree(False)]

    assert on_ranks(3, act) == [[True, False, False]] * 3


def test_ranks_join_when_something_is_summed_and_need_not_be_told() -> None:
    assert on_ranks(2, lambda group: float(group.all_reduce(torch.ones(1)))) == [2.0, 2.0]


def test_nothing_is_sent_where_there_is_nothing_to_sum() -> None:
    with store() as path:
        alone = TorchGroup(0, 2, CPU, "test", path, 1.0)
        assert alone.all_reduce(torch.empty(0, 4)).shape == (0, 4)
        assert alone.all_gather(torch.empty(0, 4)).shape == (0, 8)


def test_nothing_is_sent_while_kernels_are_only_compiled() -> None:
    """A rank may break off there, and the others would wait for it."""
    with store() as path, compiling_ahead(CPU, 1):
        alone = TorchGroup(0, 2, CPU, "test", path, 1.0)
        assert alone.all_reduce(torch.ones(2)).shape == (2,)
        assert alone.all_gather(torch.ones(2, 3)).shape == (2, 6)


def test_ranks_that_do_not_come_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "JOIN_S", 0.05)
    with (
        store() as path,
        pytest.raises(DovetailError, match=r"^of 2 other ranks 0 have come within 0.05 s$"),
    ):
        TorchGroup(0, 3, CPU, "test", path, 1.0).join()


def test_waiting_for_the_others_ends_with_what_they_died_of() -> None:
    def before_join() -> None:
        raise DovetailError("rank 1 was killed")

    with store() as path, pytest.raises(DovetailError, match="rank 1 was killed"):
        TorchGroup(0, 2, CPU, "test", path, 1.0, before_join).join()


def test_on_cpus_there_is_no_symmetric_memory_and_it_is_said_why() -> None:
    def act(group: TorchGroup) -> tuple[str, str]:
        group.reserve(1024, 1024, torch.float32)
        return str(group), group.why_not_symmetric

    assert on_ranks(2, act) == [("gloo", "the ranks are on CPUs")] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it can be had")
def test_if_symmetric_memory_is_unavailable_the_reason_is_reported() -> None:
    group = TorchGroup(0, 2, torch.device("cuda", 0), "test", "nowhere", 1.0)
    group.reserve(1024, 1024, torch.float32)
    assert group.shares is None
    assert group.why_not_symmetric


def test_a_group_that_was_ended_is_not_joined_again() -> None:
    with store() as path:
        ended = TorchGroup(0, 2, CPU, "test", path, 1.0)
        ended.abort()
        with pytest.raises(RuntimeError, match="was ended"):
            ended.all_reduce(torch.ones(1))


def test_an_abort_ends_the_wait_for_the_first_rank() -> None:
    waits = Event()
    with store() as path, ThreadPoolExecutor(1) as pool:
        second = TorchGroup(1, 2, CPU, "test", path, 30.0, before_join=waits.set)
        joining = pool.submit(second.join)
        assert waits.wait(LIMIT_S)
        second.abort()
        with pytest.raises(RuntimeError, match="was ended"):
            joining.result(LIMIT_S)


def test_a_group_remembers_that_a_sum_failed() -> None:
    def act(group: TorchGroup) -> TorchGroup:
        group.join()
        if group.rank == 0:
            with pytest.raises(RuntimeError):
                group.all_reduce(torch.ones(1))
        return group

    with store() as path, ThreadPoolExecutor(2) as pool:
        ranks = [TorchGroup(rank, 2, CPU, "test", path, 0.2) for rank in range(2)]
        first, second = (
            future.result(LIMIT_S) for future in [pool.submit(act, rank) for rank in ranks]
        )
    assert first.failure is not None
    assert second.failure is None
