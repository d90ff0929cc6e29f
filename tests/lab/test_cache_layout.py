"""The simulated KV pool of models with sliding windows: that of the engine, and what a simulation
holds in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.attention import AttentionContext, LayerSpec
from dovetail.api.component import NoOptions
from dovetail.api.kv_cache import CacheGroup, KVLayout
from dovetail.errors import ConfigError, UnsupportedError
from dovetail_lab.cache_layout import layout_of, measured_groups, pool_tokens, windows_of
from dovetail_lab.model_sizes import ModelSizes
from dovetail_lab.step_profile import StepTimeProfile
from dovetail_lab.step_time import StepShape
from tests.lab.runs import LINEAR, request, run
from tests.lab.windowed import GEMMA_3_27B, GPT_OSS_20B, MISTRAL_7B, WINDOWED
from tests.support import examples

BLOCK = 16
H200 = {"kind": "roofline", "device": "h200"}


def of_transformers(config: dict[str, Any]) -> Any:
    """Return the text model's config as transformers completes it."""
    transformers = pytest.importorskip("transformers", reason="the lab runs without it")
    text = config.get("text_config", config)
    values = {key: value for key, value in text.items() if key != "model_type"}
    return transformers.AutoConfig.for_model(text["model_type"], **values)


def windows_by_transformers(config: dict[str, Any]) -> list[int | None]:
    full = of_transformers(config)
    kinds = getattr(full, "layer_types", None) or ["sliding_attention"] * full.num_hidden_layers
    return [full.sliding_window if kind == "sliding_attention" else None for kind in kinds]


def engine_layout(config: dict[str, Any], max_len: int | None = None) -> KVLayout:
    """Return the layout that the engine makes of such layers, of 16-bit numbers."""
    pytest.importorskip("torch", reason="the lab runs without it")
    from dovetail_attention.sdpa import TorchAttention
    from dovetail_executors.runtime.kv_pool import kv_layout

    full = of_transformers(config)
    windows = [
        None if window is None or (max_len is not None and window >= max_len) else window
        for window in windows_by_transformers(config)
    ]
    size = getattr(full, "head_dim", None) or full.hidden_size // full.num_attention_heads
    specs = [
        LayerSpec(index, full.num_attention_heads, full.num_key_value_heads, size, 1.0, window)
        for index, window in enumerate(windows)
    ]
    return kv_layout(
        TorchAttention(NoOptions(), AttentionContext("cpu", "bfloat16", BLOCK)), specs, "bfloat16"
    ).layout


@pytest.mark.parametrize("config", WINDOWED.values(), ids=WINDOWED)
def test_windows_are_those_of_transformers(config: dict[str, Any]) -> None:
    sizes = ModelSizes.of(config)
    assert list(sizes.windows or (None,) * sizes.layers) == windows_by_transformers(config)


@pytest.mark.parametrize("max_len", [None, 4096, 1_000_000])
@pytest.mark.parametrize("config", WINDOWED.values(), ids=WINDOWED)
def test_the_pool_is_laid_out_as_the_engine_s(config: dict[str, Any], max_len: int | None) -> None:
    ours, engines = (
        ModelSizes.of(config).cache_layout(BLOCK, max_len=max_len).layout,
        engine_layout(config, max_len),
    )
    assert (ours.groups, ours.page_bytes) == (engines.groups, engines.page_bytes)


def test_a_layer_s_largest_tensor_s_share_is_a_slot() -> None:
    [gpt_oss, gemma] = (
        ModelSizes.of(config).cache_layout(BLOCK).layout for config in (GPT_OSS_20B, GEMMA_3_27B)
    )
    assert [
        (len(group.layers), group.window, group.pages_per_block) for group in gpt_oss.groups
    ] == [(12, None, 1), (12, 128, 1)]
    assert [(len(group.layers), group.window, group.pages_per_block) for group in gemma.groups] == [
        (10, None, 1),
        (52, 1024, 6),
    ]
    assert gemma.page_bytes == 10 * 2 * 16 * 128 * 2 * BLOCK


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sliding_window": 0}, "sliding_window as a positive integer, got 0"),
        ({"layer_types": ["full_attention"]}, "layer_types as a list of 24"),
        (
            {"layer_types": ["full_attention", "linear_attention"] * 12},
            "linear_attention.*not supported",
        ),
        ({"sliding_window": None}, "sliding_attention, but sliding_window is null"),
        ({"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"attention_chunk_size": 8192}, "chunked attention"),
        ({"num_kv_shared_layers": 20}, "shared between layers"),
        ({"global_head_dim": 512}, "different head sizes"),
    ],
)
def test_windows_that_do_not_add_up_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ModelSizes.of({**GPT_OSS_20B, **changes})


@examples(quick=100, full=2000)
@given(
    rows=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 300)), min_size=1, max_size=6),
    windows=st.lists(
        st.tuples(st.one_of(st.none(), st.integers(1, 80)), st.integers(1, 5)),
        min_size=1,
        max_size=3,
    ),
)
def test_a_shape_counts_what_layers_with_windows_see(
    rows: list[tuple[int, int]], windows: list[tuple[int | None, int]]
) -> None:
    def seen(position: int, window: int | None) -> int:
        return position + 1 if window is None else min(position + 1, window)

    def read(new: int, had: int, window: int | None) -> int:
        return new - 1 + seen(had, window)

    layers = sum(count for _, count in windows)
    keys = sum(count * read(new, had, window) for window, count in windows for new, had in rows)
    pairs = sum(
        count * seen(had + i, window)
        for window, count in windows
        for new, had in rows
        if new > 1
        for i in range(new)
    )
    new, had = np.array(rows, np.int64).T
    shape = StepShape.of(new, had, windows)
    assert (shape.context_tokens, shape.prefill_pairs) == (keys // layers, pairs // layers)


def test_full_attention_in_all_layers_is_as_without_windows() -> None:
    new, had = np.array([[1, 100], [30, 7]], np.int64).T
    assert StepShape.of(new, had, [(None, 7)]) == StepShape.of(new, had)


@pytest.mark.parametrize(
    ("config", "within"),
    [(GPT_OSS_20B, 1.01), (GEMMA_3_27B, 1.05)],
    ids=["gpt-oss-20b", "Gemma-3-27b"],
)
def test_a_long_request_holds_what_its_layers_see(config: dict[str, Any], within: float) -> None:
    executor = {"step_time": {**H200, "model": config}, "num_pages": None}
    sizes = {"max_num_batched_tokens": 8192, "max_model_len": 40_000, "block_size": BLOCK}
    result = run([request(0, prompt=32_000, output=40)], executor=executor, **sizes)
    layout = ModelSizes.of(config).cache_layout(BLOCK, max_len=40_000).layout
    token_bytes = layout.page_bytes / BLOCK / len(layout.groups[0].layers)  # of a layer
    seen = sum(
        len(group.layers) * token_bytes * (32_030 if group.window is None else group.window)
        for group in layout.groups
    )
    assert 0.99 < result.timeline.kv_held[-10] * layout.page_bytes / seen < within
    assert result.settings["cache_groups"] == [group.name for group in layout.groups]


def test_a_windowed_model_decodes_faster_than_one_that_reads_all() -> None:
    def decode_s(model: dict[str, Any]) -> float:
        [record] = run(
            [request(0, prompt=30_000, output=3)],
            executor={"step_time": {**H200, "model": model}, "num_pages": None},
            **long,
        )
        return float(np.diff(record.token_times_s).mean())

    long = {"max_num_batched_tokens": 40_000, "max_model_len": 40_000}
    windowed, full = decode_s(MISTRAL_7B), decode_s({**MISTRAL_7B, "sliding_window": None})
    read = ModelSizes.of(MISTRAL_7B).kv_numbers * 2 * (30_000 - 4096)  # bytes that a window spares
    assert full - windowed == pytest.approx(read / (4800e9 * 0.78), rel=0.05)


def test_a_pool_that_would_be_short_without_windows_suffices_with_them() -> None:
    requests = [request(index, prompt=60, output=100) for index in range(6)]
    config = {
        **GPT_OSS_20B,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
    }
    pages = {"num_pages": 6 * (160 // 4 + 16 // 4 + 2)}
    sliding, full = (
        run(requests, executor={**pages, "model": config}),
        run(requests, executor={**pages, "model": {**config, "sliding_window": 512}}),
    )
    assert sum(record.preemptions for record in sliding.requests) == 0
    assert "cache_groups" not in full.settings, "a window of max_model_len is none"
    twice = run(
        requests, executor={"num_pages": 6 * 80 - 20, "model": {**config, "sliding_window": 500}}
    )
    assert sum(record.preemptions for record in twice.requests) > 0


def test_a_profile_keeps_the_groups_of_the_measured_engine() -> None:
    layout = ModelSizes.of(GEMMA_3_27B).cache_layout(32).layout
    groups = measured_groups(layout)
    profile = StepTimeProfile.load(
        {
            "name": "measured",
            "step_time": LINEAR,
            "kv_tokens": 64_000,
            "cache_groups": [one.model_dump() for one in groups],
        }
    )
    assert profile.cache_groups == groups
    again = layout_of(groups, 32)
    assert [
        (group.block_tokens, group.window, group.pages_per_block) for group in again.groups
    ] == [(32, None, 1), (32, 1024, 6)]
    assert windows_of(again) == windows_of(layout) == [(None, 10), (1024, 52)]
    result = run(
        [request(0)],
        executor={"step_time": profile.model_dump(mode="json"), "num_pages": None},
        block_size=16,
        max_model_len=2000,
    )
    assert (result.settings["num_pages"], result.settings["cache_groups"]) == (
        4000,
        ["full", "window 1024"],
    )


def test_one_full_group_is_not_written_into_a_profile() -> None:
    assert measured_groups(KVLayout((CacheGroup((0, 1), 16),), 100, "float32")) == ()


@pytest.mark.parametrize(
    ("executor", "error", "says"),
    [
        (
            {"model": MISTRAL_7B, "step_time": {**H200, "model": MISTRAL_7B}},
            ConfigError,
            "leave executor.model out",
        ),
        (
            {"model": MISTRAL_7B, "step_time": "h200-llama-3.1-8b", "num_pages": None},
            UnsupportedError,
            "this model's KV pool",
        ),
        ({"model": {"num_hidden_layers": 2}}, ConfigError, "hidden_size"),
        ({"model": "nowhere.json"}, ConfigError, "nowhere.json"),
    ],
)
def test_a_wrong_model_says_what_is_wrong(
    executor: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        run([request(0)], executor=executor)


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.one_of(st.none(), st.integers(1, 50)), st.integers(1, 6)),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 500),
)
@examples(quick=50, full=500)
def test_a_pool_has_room_for_the_tokens_that_it_is_said_to_hold(
    groups: list[tuple[int, int | None, int]], pages: int
) -> None:
    layout = KVLayout(
        tuple(
            CacheGroup((index,), 4 * blocks, window, own)
            for index, (blocks, window, own) in enumerate(groups)
        ),
        1,
        "none",
    )
    tokens = pool_tokens(layout, pages)
    assert layout.pages(tokens) <= pages < layout.pages(tokens + layout.hit_tokens)
