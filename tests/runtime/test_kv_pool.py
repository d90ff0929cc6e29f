"""Layout of K and V in pages, the number of pages in the pool, and the error if there are too
few."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail.api.attention import AttentionContext, LayerSpec
from dovetail.api.component import NoOptions
from dovetail.api.kv_cache import CacheGroup, KVLayout
from dovetail.errors import ConfigError
from dovetail_attention.sdpa import TorchAttention
from dovetail_executors.runtime import kv_pool
from dovetail_executors.runtime.kv_pool import KVPool, kv_layout, pool_pages
from tests.runtime.demo import BLOCK_BYTES, CONFIG

LAYOUT = KVLayout((CacheGroup(tuple(range(6)), 16),), BLOCK_BYTES, "float32")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def blocks_of(
    *,
    num_pages: int | None = None,
    device: torch.device = CPU,
    profile: Callable[[], int] = lambda: pytest.fail("profiled"),
    **config: Any,
) -> int:
    """The pool of the demo model, for sequences of 64 tokens: 4 blocks of 16."""
    return pool_pages(replace(CONFIG, **config), LAYOUT, 64, num_pages, device, profile)


def test_layers_are_grouped_by_how_far_they_look() -> None:
    specs = [
        LayerSpec(0, 8, 4, 32, 0.2),
        LayerSpec(1, 8, 4, 32, 0.2, window=16),
        LayerSpec(2, 8, 4, 32, 0.2),
    ]
    layout = kv_layout(
        TorchAttention(NoOptions(), AttentionContext("cpu", "float32", 8)), specs, "float32"
    ).layout
    assert layout.groups == (
        CacheGroup((0, 2), 8, None, pages_per_block=2),
        CacheGroup((1,), 8, 16),
    )
    assert layout.page_bytes == 2 * 8 * 4 * 32 * 4, "K and V of the smaller group's layer"


def test_the_memory_of_caches_is_zeroed_at_first() -> None:
    specs = [LayerSpec(0, 8, 4, 32, 0.2), LayerSpec(1, 8, 4, 32, 0.2, window=16)]
    backend = TorchAttention(NoOptions(), AttentionContext("cpu", "float32", 8))
    pool = KVPool(kv_layout(backend, specs, "float32"), CPU)
    make = pool.wrap(backend.make_layer)
    layers = [make(spec) for spec in specs]
    for _ in range(2):
        pool.allocate(3)
        memory = [part for layer in layers if layer.cache for part in layer.cache.memory]
        assert [len(part) for part in memory] == [4] * 4, "3 pages and the waste page"
        assert not any(part.any() for part in memory)
        for part in memory:
            part.fill_(7)


def test_num_blocks_decides_and_then_kv_cache_memory() -> None:
    assert blocks_of(num_pages=30, kv_cache_memory=7 * BLOCK_BYTES) == 30
    assert blocks_of(kv_cache_memory=8 * BLOCK_BYTES - 1) == 7
    assert blocks_of(kv_cache_memory=8 * BLOCK_BYTES, device=GPU) == 8


def test_on_a_gpu_the_pool_takes_what_the_biggest_step_leaves_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(total_memory=100 * BLOCK_BYTES),
    )
    assert (
        blocks_of(device=GPU, gpu_memory_utilization=0.5, profile=lambda: 20 * BLOCK_BYTES + 1)
        == 29
    )
    with pytest.raises(
        ConfigError,
        match=r"gpu_memory_utilization: 0\.5 of 9\.4 MiB, less 9\.4 MiB for the model, gives 0\. "
        r"Raise gpu_memory_util",
    ):
        blocks_of(device=GPU, gpu_memory_utilization=0.5, profile=lambda: 100 * BLOCK_BYTES)


@pytest.mark.parametrize(
    ("asked", "there_is", "remedy"),
    [
        ({"num_pages": 3}, "num_pages: 3 gives 3", "raise num_pages to 4"),
        (
            {"kv_cache_memory": 3 * BLOCK_BYTES},
            "kv_cache_memory: 288.0 KiB gives 3",
            "raise kv_cache_memory to 384.0 KiB",
        ),
    ],
)
def test_a_pool_too_small_for_one_sequence_says_what_was_asked_what_there_is_and_what_to_change(
    asked: dict[str, Any], there_is: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        blocks_of(**asked)
    needed = "64 tokens need 4 pages (96.0 KiB each)"
    assert f"{needed}, and {there_is}. Lower max_model_len to 48 or less, or {remedy}." in str(
        caught.value
    )


def test_a_pool_of_no_block_gives_no_advice_to_lower_the_length_to_nothing() -> None:
    with pytest.raises(
        ConfigError, match=r"1000 B gives 0\. Raise kv_cache_memory to 384\.0 KiB\.$"
    ):
        blocks_of(kv_cache_memory=1000)


@pytest.mark.parametrize(
    ("free_bytes", "max_num_seqs", "blocks"),
    [
        (1 << 40, 4, 4),  # plenty: every row a quarter of max_model_len
        (1 << 40, 100, 100),
        (100 * BLOCK_BYTES, 100, 25),  # a quarter of the free RAM
        (8 * BLOCK_BYTES, 100, 4),  # half of it, so that one sequence fits
    ],
)
def test_without_a_size_the_pool_on_the_cpu_takes_a_share_of_the_free_ram(
    free_bytes: int, max_num_seqs: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_pool, "available_ram_bytes", lambda: free_bytes)
    assert blocks_of(max_num_seqs=max_num_seqs) == blocks


def test_a_share_of_the_ram_is_taken_and_twice_that_for_one_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_pool, "available_ram_bytes", lambda: 40 * BLOCK_BYTES)
    shares = (0.25, 0.15, 0.05)
    pages = [blocks_of(cpu_memory_utilization=share, max_num_seqs=99) for share in shares]
    assert pages == [10, 6, 4]


def test_too_little_ram_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool, "available_ram_bytes", lambda: 6 * BLOCK_BYTES)
    with pytest.raises(
        ConfigError,
        match=r"0\.5 of 576.0 KiB free RAM .* gives 3.*set kv_cache_memory to 384.0 KiB",
    ):
        blocks_of()
