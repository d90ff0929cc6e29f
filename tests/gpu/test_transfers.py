"""Transfers on a GPU: the checks of the suite; more saves than there is staging for; and nothing
that enqueues them waits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dovetail.api.kv_layout import CachedLayer, plan_layout
from dovetail.api.kv_transfers import Transfer, Transferred, frame_checksum
from dovetail.testing.checks import checks_of
from dovetail.testing.suites.executor import ExecutorSuite
from dovetail_executors.local import LocalExecutor
from dovetail_executors.runtime import transfers
from dovetail_executors.runtime.kv_pool import KVPool
from dovetail_executors.runtime.transfers import SAVE_PIECES, LocalTransfers, PageCopies
from tests.gpu.device import on_a_gpu

pytestmark = on_a_gpu

PAGES = 64
SEED = 11


CHECKS = {
    id: check.attribute
    for id, check in checks_of(ExecutorSuite).items()
    if id.startswith("executor.transfers")
}


@pytest.mark.parametrize("check", CHECKS)
def test_the_executor_keeps_the_contract_of_transfers(check: str) -> None:
    made = {"component": LocalExecutor, "options": {"device": "cuda"}}
    suite = type("OnAGpu", (ExecutorSuite,), made)
    getattr(suite(), CHECKS[check])()
    suite.teardown_class()


def test_more_saves_than_staging_are_whole_and_nothing_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cuda", 0)
    layers = [CachedLayer(layer, None, lambda n: (4096 * n, 8192 * n)) for layer in range(4)]
    pool = KVPool(plan_layout(layers, 16, "none"), device)
    pool.allocate(PAGES)
    monkeypatch.setattr(transfers, "PIECE_BYTES", 3 * pool.page_bytes)
    copies = PageCopies(pool)
    own = LocalTransfers(copies, "test")
    size = PAGES * own.page_bytes
    slabs = [own.allocate(size) for _ in range(3)]
    rng = np.random.default_rng(0)
    contents = [
        torch.from_numpy(rng.integers(0, 256, (PAGES, own.page_bytes), np.uint8)) for _ in range(2)
    ]
    slabs[2].data[:] = contents[0].numpy().tobytes()
    on_device = [content.to(device) for content in contents]
    index = torch.arange(PAGES, device=device)
    own.save(Transfer(0, 0, 0, tuple(range(PAGES)), SEED))  # makes what is made once
    torch.cuda.synchronize()
    assert [each.id for each in own.finished()] == [0]
    capacity = own.save_capacity()
    assert capacity == SAVE_PIECES * 3 * own.page_bytes
    done: list[Transferred] = []
    big = torch.randn(8192, 8192, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        big @ big  # so that the host is ahead
        for number in range(2):
            pool.scatter(index, on_device[number])
            own.save(Transfer(1 + number, number, 0, tuple(range(PAGES)), SEED))
            done += own.finished()
        assert own.save_capacity() < capacity
        own.restore(Transfer(3, 2, 0, tuple(range(PAGES)), SEED))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    sums = [frame_checksum(content.numpy().tobytes(), SEED) for content in contents]
    for slab, content in zip(slabs, contents, strict=False):
        assert bytes(slab.data) == content.numpy().tobytes()
    found = {each.id: each.checksum for each in (*done, *own.finished())}
    assert found == {1: sums[0], 2: sums[1], 3: sums[0]}
    after = torch.empty_like(on_device[0])
    pool.gather(index, after)
    assert torch.equal(after, on_device[0])
    copies.close()
