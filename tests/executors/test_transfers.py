"""Pages that are saved and restored: bytes, checksums, and what a model computes on them."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.api.executor import Executor
from dovetail.api.kv_cache import HOLE
from dovetail.api.kv_layout import CachedLayer, CachedState, plan_layout
from dovetail.api.kv_transfers import Transfer, frame_checksum
from dovetail.errors import DovetailError
from dovetail.testing.suites.executor_bench import Bench
from dovetail.testing.suites.executor_transfers import Frames
from dovetail.testing.suites.footprint import tensor_bytes
from dovetail_executors.local import LocalExecutor
from dovetail_executors.options import LocalOptions, TensorOptions
from dovetail_executors.rank_transfers import PLACES, SharedSlabs, from_words, to_words
from dovetail_executors.runtime import transfers
from dovetail_executors.runtime.kv_pool import KVPool
from dovetail_executors.runtime.transfers import (
    LocalTransfers,
    PageCopies,
    PartOfTransfers,
    device_bytes,
)
from dovetail_executors.tensor import TensorExecutor
from tests.e2e.reference import checkpoint
from tests.executors.rank_threads import ranks_as_threads
from tests.models import hybrids
from tests.models.tiny_configs import tiny
from tests.runtime.demo import context

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
    rng = np.random.default_rng(seed)
    data = torch.from_numpy(rng.integers(0, 256, (len(pages), pool.page_bytes), np.uint8))
    pool.scatter(torch.tensor(pages), data)
    return data


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "PIECE_BYTES", 200)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", sorted({*LAYOUTS} - {"odd"}))
def test_transfers_allocate_no_more_than_is_left_free_for_them(name: str, ranks: int) -> None:
    pool = pool_of(name)
    before = tensor_bytes()
    part = PartOfTransfers(PageCopies(pool), rank=ranks - 1)
    assert 0 < tensor_bytes() - before <= device_bytes(pool.planned.layout, ranks)
    part.copies.close()


@pytest.mark.usefixtures("small_pieces")
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


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("name", LAYOUTS)
def test_transfers_enqueued_together_are_as_one_after_the_other(name: str) -> None:
    pool = pool_of(name)
    own = LocalTransfers(PageCopies(pool), "test")
    everything = [*range(PAGES)]
    data = filled(pool, everything, 1)
    slab = own.allocate(1 << 13)
    sources = [(7,), (2,), (9, 4, 0, 5, 8, 3), (1, 6), (10, 11)]
    targets = [(1,), (HOLE,), (7, 3, HOLE, 8, 0, 2), (9, 5), (11, 4)]

    def transfers_of(pages: list[tuple[int, ...]]) -> list[Transfer]:
        return [
            Transfer(id, slab.number, 16 + 6 * id * own.page_bytes, some, SEED + id)
            for id, some in enumerate(pages)
        ]

    own.save_all(transfers_of(sources))
    before = filled(pool, everything, 2)
    own.restore_all(transfers_of(targets))
    sums = [
        frame_checksum(data[[*some]].numpy().tobytes(), SEED + i) for i, some in enumerate(sources)
    ]
    assert [(each.id, each.checksum) for each in own.finished()] == [*enumerate(sums)] * 2
    for source, target in zip(chain(*sources), chain(*targets), strict=True):
        if target != HOLE:
            before[target] = data[source]
    after = torch.empty_like(before)
    pool.gather(torch.tensor(everything), after)
    assert torch.equal(after, before)


def test_slabs_take_no_more_memory_than_was_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "available_ram_bytes", lambda: 1 << 13)
    own = LocalTransfers(PageCopies(pool_of("plain")), "test")
    own.allocate(1 << 12)
    own.allocate(1 << 12)
    with pytest.raises(DovetailError, match="available"):
        own.allocate(8)


def test_a_transfer_of_several_ranks_survives_its_message() -> None:
    transfer = Transfer(0, 3, (1 << 40) + 8, (7, HOLE, 2), SEED)
    assert from_words(to_words((1 << 33) + 1, transfer)) == ((1 << 33) + 1, transfer)


def test_results_count_once_every_rank_has_written_its_own_whole() -> None:
    fd = SharedSlabs.make(3)
    try:
        ours, theirs = (SharedSlabs(fd, 3) for _ in range(2))
        number = PLACES + 5
        theirs.report(1, number, 1 << 63)
        theirs.report(2, 5, 7)
        assert ours.checksum(number) is None, "the result of an earlier one is in the same place"
        theirs.report(2, number, (1 << 63) + 9)
        assert ours.checksum(number) == 9, "modulo 2^64"
        theirs.results[0, 5, 1] ^= np.uint64(1)
        assert ours.checksum(number) is None
    finally:
        os.close(fd)


def local(**changes: Any) -> LocalExecutor:
    options = LocalOptions(device="cpu", num_pages=200)
    return LocalExecutor(options, context(**{"dtype": "float32", **changes}))


def on_blocks(bench: Bench, prompt: list[int], blocks: list[int]) -> tuple[list[int], list[Any]]:
    """Tokens and log-probabilities of a prompt whose first tokens were computed in `blocks`."""
    shared = len(blocks) * bench.block_size
    bench.add("a", prompt, computed=shared, blocks=[*blocks, *bench.take_blocks(2)], logprobs=3)
    results = [bench.run({"a": count}) for count in (len(prompt) - shared, 1, 1)]
    bench.remove("a")
    values = [each.logprobs.logprobs.tolist() for each in results if each.logprobs is not None]
    return bench.tokens.pop("a"), values


def assert_equal_on_restored_blocks(executor: Executor, count: int = 3) -> None:
    """Save, overwrite and restore elsewhere `count` blocks: what is computed on them is equal to
    the last bit."""
    try:
        bench = Bench(executor, executor.start())
        frames = Frames(bench)
        shared = count * bench.block_size
        prompt = bench.prompt(shared + 3)
        blocks, elsewhere = bench.take_blocks(count), bench.take_blocks(count)
        bench.add("first", prompt[:shared], blocks=blocks)
        bench.prefill("first")
        frames.save([*chain.from_iterable(bench.pages(blocks))])
        saved = bytes(frames.slab.data)
        expected = on_blocks(bench, prompt, [*blocks])
        bench.add("other", bench.prompt(shared, variant=1), blocks=blocks)
        bench.prefill("other")
        assert on_blocks(bench, prompt, [*elsewhere]) != expected, "they hold something else"
        frames.slab.data[:] = saved
        frames.restore([*chain.from_iterable(bench.pages(elsewhere))])
        assert on_blocks(bench, prompt, [*elsewhere]) == expected
    finally:
        executor.stop()


@pytest.mark.slow("makes a checkpoint")
@pytest.mark.parametrize(
    "config",
    [partial(tiny, "gemma3_text"), hybrids.granite, hybrids.qwen3_next],
    ids=["windows", "mamba", "delta net"],
)
def test_what_models_compute_on_restored_pages_is_equal(config: Callable[[], Any]) -> None:
    with checkpoint(config()) as (directory, _):
        executor = local(model=str(directory), max_model_len=96, block_size=8)
        assert_equal_on_restored_blocks(executor)


def test_fp8_is_restored_with_the_scales_that_its_name_has() -> None:
    assert_equal_on_restored_blocks(local(kv_cache_dtype="float8_e4m3fn"), count=2)


@pytest.mark.slow("starts six executors")
def test_names_are_equal_where_bytes_mean_the_same() -> None:
    def name(**changes: Any) -> str:
        executor = local(**changes)
        executor.start()
        own = executor.transfers()
        executor.stop()
        assert own is not None
        return own.name

    fp8 = {"kv_cache_dtype": "float8_e4m3fn"}
    calibrated = {**fp8, "kv_cache_scales": "calibrate"}
    assert name() == name()
    settings: list[dict[str, Any]] = [{}, fp8, calibrated, calibrated]
    assert len({name(**each) for each in settings}) == len(settings)


@pytest.mark.slow("ranks that spin for each other while few processors are free")
def test_what_two_ranks_compute_on_restored_pages_is_equal() -> None:
    with ranks_as_threads():
        options = TensorOptions(size=2, device="cpu", num_pages=30)
        executor = TensorExecutor(options, context(dtype="float32"))
        assert_equal_on_restored_blocks(executor, count=2)


@pytest.mark.slow("ranks that spin for each other while few processors are free")
def test_a_slab_is_refused_when_the_ranks_have_ended() -> None:
    with ranks_as_threads():
        executor = TensorExecutor(TensorOptions(size=2, device="cpu", num_pages=30), context())
        executor.start()
        own = executor.transfers()
        executor.stop()
        assert own is not None
        with pytest.raises(DovetailError):
            own.allocate(1 << 12)
