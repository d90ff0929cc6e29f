"""Pages that are saved and restored: bytes, checksums, and what a model computes on them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dovetail.api.kv_cache import HOLE
from dovetail.api.kv_layout import CachedLayer, CachedState, plan_layout
from dovetail.api.kv_transfers import Transfer, frame_checksum
from dovetail_executors.runtime import transfers
from dovetail_executors.runtime.kv_pool import KVPool
from dovetail_executors.runtime.transfers import LocalTransfers, PageCopies

CPU = torch.device("cpu")
PAGES = 12
SEED = 0xFEDCBA9876543210
# layers and states whose pages have slots of one size, of several, and of a size that isn't a whole
# number of words
LAYOUTS: dict[str, tuple[tuple[CachedLayer, ...], tuple[CachedState, ...]]] = {
    "plain": (tuple(CachedLayer(i, None, lambda n: (8 * n, 8 * n)) for i in range(3)), ()),
    "of two sizes": (tuple(CachedLayer(i, None, lambda n: (8 * n, 24 * n)) for i in range(2)), ()),
    "odd": ((CachedLayer(0, None, lambda n: (3 * n, 5 * n)),), ()),
    "with states": (
        (CachedLayer(0, None, lambda n: (8 * n, 8 * n)),),
        (CachedState(1, ((7, 16),)),),
    ),
}


def pool_of(name: str) -> KVPool:
    layers, states = LAYOUTS[name]
    pool = KVPool(plan_layout(layers, 4, "none", states=states), CPU)
    pool.allocate(PAGES)
    return pool


def filled(pool: KVPool, pages: list[int], seed: int) -> torch.Tensor:
    """Write random bytes to `pages`, and return them."""
    data = torch.from_numpy(
        np.random.default_rng(seed).integers(0, 256, (len(pages), pool.page_bytes), np.uint8)
    )
    pool.scatter(torch.tensor(pages), data)
    return data


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "PIECE_BYTES", 200)


@pytest.mark.parametrize("name", LAYOUTS)
def test_pages_come_back_to_other_pages_and_no_others_change(name: str) -> None:
    pool = pool_of(name)
    own = LocalTransfers(PageCopies(pool), "test")
    everything = [*range(PAGES)]
    data = filled(pool, everything, 1)
    slab = own.allocate(1 << 12)
    saved, targets = [7, 2, 9, 4, 0], [3, HOLE, 1, 4, 8]
    own.save(Transfer(5, slab.number, 16, tuple(saved), SEED))
    before = filled(pool, everything, 2)
    own.restore(Transfer(6, slab.number, 16, tuple(targets), SEED))
    size = len(saved) * own.page_bytes
    expected = frame_checksum(slab.data[16 : 16 + size], SEED)
    assert bytes(slab.data[16 : 16 + size]) == data[saved].numpy().tobytes()
    assert not any(slab.data[:16]), "what lies before the frame"
    assert not any(slab.data[16 + size :]), "what lies behind it"
    assert [(each.id, each.checksum) for each in own.finished()] == [(5, expected), (6, expected)]
    assert not own.finished()
    for source, target in zip(saved, targets, strict=True):
        if target != HOLE:
            before[target] = data[source]
    after = torch.empty_like(before)
    pool.gather(torch.tensor(everything), after)
    assert torch.equal(after, before)


def test_a_flipped_bit_changes_the_checksum_of_what_is_restored() -> None:
    own = LocalTransfers(PageCopies(pool_of("plain")), "test")
    slab = own.allocate(4 * own.page_bytes)
    pages = (0, 1, 2, 3)
    rng = np.random.default_rng(0)
    slab.data[:] = rng.integers(0, 256, len(slab.data), np.uint8).tobytes()

    def checksum() -> int:
        own.restore(Transfer(0, slab.number, 0, pages, SEED))
        (done,) = own.finished()
        return done.checksum

    right = checksum()
    for bit in rng.integers(0, 8 * len(slab.data), 50).tolist():
        slab.data[bit // 8] ^= 1 << bit % 8
        assert checksum() != right
        slab.data[bit // 8] ^= 1 << bit % 8
    assert checksum() == right
