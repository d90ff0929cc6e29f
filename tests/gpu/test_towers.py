"""Towers on a GPU compute the rows that transformers' whole models compute on a CPU, those of grids
without a wait for the device."""

from __future__ import annotations

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail_executors.runtime.towers import find_tower
from tests.gpu.device import on_a_gpu
from tests.media.checkpoints import NAMES, checkpoint, picture
from tests.media.oracle import rows_of, tensors_of
from tests.media.test_towers import SIZES, item_of

pytestmark = on_a_gpu


@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)], ids=str
)
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_the_whole_model(
    name: str, dtype: torch.dtype, allowed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    directory = checkpoint(name)
    plan = find_tower(directory)
    assert plan is not None
    tower = plan.build(dtype, torch.device("cuda"))
    for size in SIZES:
        tensors = tensors_of(directory, picture(*size))
        expected = rows_of(directory, tensors)
        rows = tower.encode(item_of(tensors, expected.shape[1]))
        assert rows.dtype == dtype
        error = (rows.float().cpu() - expected).abs().max() / expected.abs().max()
        assert error < allowed


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_answer_as_one() -> None:
    directory = str(checkpoint("qwen3_vl"))
    chats = [
        [{"role": "user", "content": [image, {"type": "text", "text": f"What is {count}?"}]}]
        for count in range(12)
        for image in [{"type": "image_pil", "image_pil": picture(60 + 13 * count, 90 - 3 * count)}]
    ]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    answers = []
    for settings in ({}, {"tensor_parallel_size": 2}):
        with LLM(directory, dtype="float32", max_model_len=1024, **settings) as llm:
            outputs = llm.chat(chats, params, use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "name", ["exaone4_5", "glm4v", "glm_ocr", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"]
)
def test_encoding_waits_for_nothing(name: str) -> None:
    directory = checkpoint(name)
    plan = find_tower(directory)
    assert plan is not None
    tower = plan.build(torch.bfloat16, torch.device("cuda"))
    items = []
    for size in SIZES:
        tensors = tensors_of(directory, picture(*size))
        items.append(item_of(tensors, rows_of(directory, tensors).shape[1]))
    tower.encode(items[0])  # compiling kernels may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        for item in items:
            tower.encode(item)
    finally:
        torch.cuda.set_sync_debug_mode("default")
