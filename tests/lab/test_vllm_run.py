"""Measured runs of vLLM: how the engine was set up is read from their own files, and what isn't
simulated is refused by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.lab.vllm_measured import by_data_sheet, engine, experts_chosen, simulated
from bench.lab.vllm_run import VLLMRun

from dovetail.errors import ConfigError
from dovetail_lab.step_time import LinearStepTime
from dovetail_lab.traces import slice_trace
from tests.lab.test_fidelity import DATA

SETTINGS = {
    "model": "meta-llama/Llama-3.1-8B",
    "tensor_parallel_size": 1,
    "data_parallel_size": 1,
    "enable_expert_parallel": False,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "max_model_len": None,
    "dtype": "bfloat16",
    "kv_cache_dtype": "auto",
    "seed": 42,
}


def written(
    folder: Path,
    *,
    sections: dict[str, Any] | None = None,
    instance: dict[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """Write the three files of a run on a GPU of 24 GiB into `folder`, and return it."""
    memory = {"mem_size": 24, "mem_bw": 1000, "mem_util": 0.9}
    described = {
        "model_name": "m",
        "hardware": "G",
        "npu_mem": memory,
        "tp_size": settings.get("tensor_parallel_size", 1),
        "pd_type": None,
    }
    (folder / "G__m__meta.json").write_text(
        json.dumps({"engine_kwargs": {**SETTINGS, **settings}, **(sections or {})})
    )
    (folder / "G__m__config.json").write_text(
        json.dumps({"nodes": [{"instances": [{**described, **(instance or {})}]}]})
    )
    shutil.copy(DATA / "vllm_llama_3.1_8b.jsonl", folder / "G__m__requests.jsonl")
    return folder


def loaded(folder: Path, **changes: Any) -> VLLMRun:
    return VLLMRun.load(written(folder, **changes), "G__m")


@pytest.mark.parametrize(
    "sections",
    [
        {"kv_cache": {"num_gpu_blocks": 2588, "block_size": 32, "enable_prefix_caching": False}},
        {
            "resolved_config": {
                "cache_config": {
                    "num_gpu_blocks": 2588,
                    "block_size": 32,
                    "enable_prefix_caching": False,
                }
            }
        },
    ],
)
def test_the_pool_is_as_large_as_the_run_recorded(tmp_path: Path, sections: dict[str, Any]) -> None:
    run = loaded(tmp_path, sections=sections)
    config = engine(run, {"kind": "linear", "base_s": 1.0})
    assert (config["executor"]["num_pages"], config["block_size"]) == (2587, 32), (
        "vLLM gives its first block to nobody"
    )
    assert not config["kv_cache"]["reuse"]


def test_an_unrecorded_pool_is_what_the_gpu_has_room_for(tmp_path: Path) -> None:
    run = loaded(tmp_path)
    assert not run.pool_is_recorded
    assert "estimated" in str(run)
    assert 2400 < run.num_blocks < 2800, (
        "0.9 x 24 GiB less 16 GB of weights and 1.6 GB, in blocks of 2 MiB"
    )
    assert run.reuse, "as vLLM does unless told otherwise"
    assert loaded(tmp_path, kv_cache_memory_bytes=2**30).num_blocks == 512
    assert loaded(tmp_path, gpu_memory_utilization=0.85).num_blocks < run.num_blocks - 500


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"speculative_config": {"model": "x"}}, "speculative_config"),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill"),
        ({"scheduling_policy": "priority"}, "scheduling_policy is 'priority': expected 'fcfs'"),
        ({"dtype": "float32"}, "dtype is 'float32'"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype is 'int4'"),
        ({"enable_lora": True}, "enable_lora"),
        ({"instance": {"pd_type": "prefill"}}, "pd_type is 'prefill'"),
        ({"instance": {"tp_size": 4}}, "tp_size is 4"),
        ({"sections": {"num_requests": 7}}, "7 requests"),
        ({"model": "somebody/else"}, "num_gpu_blocks.*somebody/else"),
    ],
)
def test_what_is_not_simulated_is_named(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        loaded(tmp_path, **changes)


def test_all_that_is_not_simulated_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, pipeline_parallel_size=2, enable_lora=True)
    assert all(key in str(caught.value) for key in ("pipeline_parallel_size", "enable_lora"))


def test_replicas_of_a_mixture_share_its_experts_and_nothing_else(tmp_path: Path) -> None:
    pool = {"kv_cache": {"num_gpu_blocks": 9000}}
    one, two = (
        loaded(tmp_path, sections=pool, model="Qwen/Qwen3-30B-A3B", data_parallel_size=replicas)
        for replicas in (1, 2)
    )
    sheets = by_data_sheet(one), by_data_sheet(two)
    assert sheets[0]["experts_s"] == pytest.approx(2 * sheets[1]["experts_s"])
    assert sheets[0]["base_s"] == sheets[1]["base_s"]
    assert experts_chosen(one)["expert_share"] == pytest.approx(8 / 128)
    assert experts_chosen(two)["expert_share"] == pytest.approx(1 - (1 - 8 / 128) ** 2)


@pytest.mark.slow("simulates several traces")
def test_replicas_are_simulated(tmp_path: Path) -> None:
    step_time = LinearStepTime(
        base_s=0.01, per_token_s=4e-5, per_context_s=6e-8, per_row_s=4e-5
    ).model_dump()
    pool = {"kv_cache": {"num_gpu_blocks": 30_000}}
    both = (loaded(tmp_path, sections=pool, data_parallel_size=replicas) for replicas in (1, 2))
    one, two = (
        simulated(replace(run, trace=slice_trace(run.trace, ":30")), step_time)["TTFT"].mean()
        for run in both
    )
    assert two < one
