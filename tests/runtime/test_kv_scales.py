"""Scales of K and V in FP8: where they come from, what is said of them, and that they stay once a
request's K and V are stored."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.api.attention import AttentionContext, AttentionLayer, KVScales, LayerSpec
from dovetail.api.component import NoOptions
from dovetail.errors import ConfigError, ModelLoadError, UnsupportedError
from dovetail.nn.parallel import SINGLE
from dovetail_attention.sdpa import TorchAttention
from dovetail_executors.runtime.kv_scales import LARGEST, ROOM, CacheScales, is_kv_scale
from dovetail_executors.runtime.recording import LayerSplitter
from dovetail_executors.runtime.worker import Worker
from tests.runtime.demo import BLOCK_BYTES, DEMO, context, decode, prefill

CPU = torch.device("cpu")
FP8: dict[str, Any] = {"kv_cache_dtype": "float8_e4m3fn"}
LAYERS = 6
PROMPTS = [[5, 17, 200, 31, 8, 90, 12, 44, 7, 7, 301], [9, 12], [400, 3, 77]]
PUBLISHED = [  # what writes such names, and how it names the scales of K and V of a layer
    pytest.param("self_attn.{}_scale", id="compressed-tensors"),
    pytest.param("self_attn.{0}_proj.{0}_scale", id="modelopt"),
    pytest.param("self_attn.attn.{}_scale", id="vllm"),
]


def loaded(**changes: Any) -> tuple[Worker, Any]:
    rank = Worker(context(**changes), SINGLE, "ours")
    capacity = rank.load(CPU, 30)
    rank.allocate(capacity.num_pages)
    return rank, capacity


def scales_of(rank: Worker) -> list[tuple[float, float]]:
    assert rank.runner is not None
    layers: list[Any] = rank.runner.backend._layers  # type: ignore[attr-defined]
    scales: list[KVScales] = [layer.kv_scales for layer in layers]
    return [(float(scale.k), float(scale.v)) for scale in scales]


@pytest.mark.parametrize("calibrate", [False, True])
def test_a_layer_that_shares_a_cache_has_the_scales_of_the_layer_that_writes_it(
    calibrate: bool,
) -> None:
    backend = TorchAttention(NoOptions(), AttentionContext("cpu", "float32", 16, "float8_e4m3fn"))
    scales = CacheScales(CPU, calibrate=calibrate)
    make = scales.wrap(backend.make_layer)
    first, second, shared = (
        make(LayerSpec(index, 1, 1, 8, 1.0, shares=shares))
        for index, shares in enumerate([None, None, 0])
    )
    assert shared.kv_scales is first.kv_scales
    assert shared.kv_scales is not second.kv_scales


@pytest.fixture
def checkpoint(tmp_path: Path) -> Any:
    """Makes a copy of the demo model that holds some tensors more."""

    def make(tensors: dict[str, torch.Tensor]) -> str:
        shutil.copytree(DEMO, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(
            load_file(Path(DEMO) / "model.safetensors") | tensors,
            tmp_path / "model" / "model.safetensors",
        )
        return str(tmp_path / "model")

    return make


@pytest.mark.parametrize("name", PUBLISHED)
def test_scales_of_a_checkpoint_are_taken_by_layer_whoever_wrote_it(
    name: str, checkpoint: Any
) -> None:
    tensors = {
        f"model.layers.{layer}.{name.format(of)}": torch.tensor(
            [base + layer], dtype=torch.bfloat16
        )
        for layer in range(LAYERS)
        for of, base in (("k", 1.0), ("v", 16.0))
    }
    rank, capacity = loaded(model=checkpoint(tensors), **FP8)
    assert scales_of(rank) == [(1.0 + layer, 16.0 + layer) for layer in range(LAYERS)]
    assert capacity.details["kv_cache"] == "float8_e4m3fn, scales the checkpoint's"
    assert capacity.layout.dtype == "float8_e4m3fn"


def test_one_scale_for_k_and_v_is_taken_for_both(checkpoint: Any) -> None:
    rank, _ = loaded(
        model=checkpoint(
            {
                f"model.layers.{layer}.self_attn.kv_scale": torch.tensor(0.5)
                for layer in range(LAYERS)
            }
        ),
        **FP8,
    )
    assert scales_of(rank) == [(0.5, 0.5)] * LAYERS


def test_a_checkpoint_with_scales_is_served_as_well_without_fp8(checkpoint: Any) -> None:
    rank, capacity = loaded(
        model=checkpoint({"model.layers.0.self_attn.k_scale": torch.tensor(0.5)})
    )
    assert "kv_cache" not in capacity.details
    rank.stop()


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        (
            {"model.layers.0.self_attn.k_scale": torch.tensor(0.5)},
            "lacks v_scale of layer 0; set kv_cache_scales: calibrate",
        ),
        (
            {"model.layers.3.self_attn.v_scale": torch.tensor(-1.0)},
            "layers.3.self_attn.v_scale: expected one positive number for the whole layer",
        ),
        (
            {"model.layers.3.self_attn.v_scale": torch.tensor(torch.nan)},
            "layers.3.self_attn.v_scale: expected one positive number",
        ),
        (
            {"model.layers.3.self_attn.k_scale": torch.ones(4000)},
            r"expected one positive number .*, got \[1\.0.{73}\.\.\.$",
        ),
        (
            {"model.layers.3.self_attn.k_scale": torch.ones(4)},
            "layers.3.self_attn.k_scale: expected one positive number",
        ),
    ],
)
def test_scales_that_can_not_be_used_are_refused_by_name(
    tensors: dict[str, torch.Tensor], told: str, checkpoint: Any
) -> None:
    with pytest.raises(ModelLoadError, match=told):
        loaded(model=checkpoint(tensors), **FP8)


def test_other_scales_of_a_checkpoint_are_not_taken_for_those_of_k_and_v() -> None:
    assert not any(
        map(
            is_kv_scale,
            (
                "model.layers.0.self_attn.k_proj.weight_scale",
                "model.layers.0.mlp.k_scale",
                "model.layers.0.self_attn.q_scale",
            ),
        )
    )


def test_without_any_the_scales_are_one_and_that_is_said() -> None:
    rank, capacity = loaded(**FP8)
    assert scales_of(rank) == [(1.0, 1.0)] * LAYERS
    assert capacity.details["kv_cache"] == "float8_e4m3fn, scales 1"


def test_the_first_prompts_calibrate_and_nothing_after_them_does() -> None:
    seen: list[tuple[float, float]] = []
    rank, capacity = loaded(**FP8, kv_cache_scales="calibrate")
    assert capacity.details["kv_cache"] == "float8_e4m3fn, scales calibrated on the first prompts"
    assert rank.runner is not None
    for layer in rank.runner.backend._layers:  # type: ignore[attr-defined]
        write = layer.write

        def spy(k: torch.Tensor, v: torch.Tensor, write: Any = write) -> None:
            seen.append((float(k.abs().max()), float(v.abs().max())))
            write(k, v)

        layer.write = spy
    rank.collect(rank.submit(prefill(capacity, PROMPTS)))
    calibrated = scales_of(rank)
    assert len(calibrated) == LAYERS
    for scales, largest in zip(calibrated, seen, strict=True):
        for scale, number in zip(scales, largest, strict=True):
            assert LARGEST / 2 < ROOM * number / scale <= LARGEST
            assert math.log2(scale).is_integer()
    rank.collect(rank.submit(decode(3, 1)))
    assert len(seen) == 2 * LAYERS
    assert scales_of(rank) == calibrated


def test_the_step_that_calibrates_is_launched_kernel_by_kernel() -> None:
    rank, capacity = loaded(**FP8, kv_cache_scales="calibrate")
    runner = rank.runner
    assert runner is not None
    graphs = runner.graphs = object()  # type: ignore[assignment]
    rank.collect(rank.submit(prefill(capacity, PROMPTS)))
    assert runner.graphs is graphs


def test_sinks_reach_a_layer_that_is_calibrated_and_recorded_in_pieces() -> None:
    made: list[AttentionLayer] = []

    def make_layer(spec: LayerSpec) -> AttentionLayer:
        made.append(
            TorchAttention(
                NoOptions(), AttentionContext("cpu", "float32", 16, "float8_e4m3fn")
            ).make_layer(spec)
        )
        return made[-1]

    wrapped = LayerSplitter().wrap(CacheScales(CPU, calibrate=True).wrap(make_layer))
    wrapped(LayerSpec(0, 4, 2, 8, 1.0, sinks=True)).bind_sinks(sinks := torch.ones(4))
    assert made[0].sinks is sinks


def test_only_fp8_is_calibrated() -> None:
    with pytest.raises(
        ConfigError, match="kv_cache_scales: calibrate: only K and V in fp8 have scales"
    ):
        loaded(kv_cache_scales="calibrate")


def test_the_pool_holds_as_many_more_tokens_as_fp8_is_smaller() -> None:
    for dtype, times in (("float32", 4), ("bfloat16", 2)):
        blocks = [
            Worker(
                context(dtype=dtype, kv_cache_memory=20 * BLOCK_BYTES, kv_cache_dtype=name),
                SINGLE,
                "ours",
            )
            .load(CPU)
            .num_pages
            for name in ("auto", "float8_e4m3fn")
        ]
        assert blocks[1] == times * blocks[0]


def test_a_cache_dtype_that_no_backend_keeps_is_refused_with_each_ones_reason() -> None:
    with pytest.raises(UnsupportedError) as error:
        loaded(kv_cache_dtype="bfloat16")
    assert (
        "no attention backend can serve this model on cpu in float32 with K and V in bfloat16"
        in str(error.value)
    )
    assert "dovetail:torch: the KV cache can't be bfloat16, only in float8_e4m3fn" in str(
        error.value
    )
    assert "dovetail:flash_attn: the KV cache can't be bfloat16\n" in str(error.value) + "\n"
