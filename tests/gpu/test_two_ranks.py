"""Two ranks on two GPUs: deterministic requests have the same bits in each of two engines, and
frames of K and V are found by engines with as many ranks, and only these."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from dovetail import LLM, LLMEngine, RequestOutput, SamplingParams
from dovetail.engine.tiers.feature import TierFeature
from dovetail.engine.tiers.prospect import Pace
from tests.gpu.device import on_a_gpu, save

pytestmark = [
    *on_a_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

PROMPT = [3 + number * number % 57 for number in range(700)]
Bits = list[tuple[tuple[int, ...], list[bytes]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = Qwen3Config(
        vocab_size=61,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    save(config, torch.float32, folder)
    return folder


def executor(ranks: int) -> dict[str, Any]:
    return {"name": "local"} if ranks == 1 else {"name": "tensor", "size": ranks}


def deterministic(llm: LLM, prompts: Sequence[list[int]]) -> Bits:
    """Return the tokens of deterministic requests, and the bits of their log-probabilities."""
    params = [
        SamplingParams(
            max_tokens=70,
            temperature=0.8,
            seed=index,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
            deterministic=True,
        )
        for index in range(len(prompts))
    ]
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        [sample] = output.outputs
        assert sample.logprobs is not None
        numbers = [next(iter(each.values())).logprob for each in sample.logprobs]
        found.append((tuple(sample.token_ids), [float(one).hex().encode() for one in numbers]))
    return found


def test_deterministic_requests_repeat_on_two_ranks(model: Path) -> None:
    prompts = [PROMPT[start : start + 40 + 31 * start] for start in range(12)]
    config = {"dtype": "bfloat16", "max_model_len": 1024, "kv_cache_memory": "256MiB"}
    runs = []
    for finished in (False, True):
        with LLM(str(model), executor=executor(2), max_num_seqs=16, **config) as llm:
            assert "otherwise symmetric memory" in llm.engine.capacity.details["all_reduce"]
            while finished and llm.engine.core.executor.finish_start():
                pass
            runs.append(deterministic(llm, prompts))
            alone = []
            for index in (0, 5, 11):  # their seeds are their places
                llm.engine.reset_prefix_cache()
                alone.append(deterministic(llm, prompts[: index + 1])[index])
            assert alone == [runs[-1][index] for index in (0, 5, 11)]
    assert runs[0] == runs[1]


def restored(model: Path, ranks: int, frames: Path) -> tuple[list[int], int]:
    """Serve a prompt in a new engine with a disk tier. Returns its tokens, and how many of the
    prompt's tokens were restored."""
    config = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 1024,
        "kv_cache_memory": "256MiB",
        "kv_host_memory": "64MiB",  # which is there at once
        "kv_tiers": [{"name": "disk", "path": str(frames), "size": "1GiB"}],
        "executor": executor(ranks),
    }
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    found = None
    with LLMEngine.from_config(config) as engine:
        for feature in engine.core.features:
            if isinstance(feature, TierFeature):
                feature.wait_until_open()
        engine.add_request("one", PROMPT, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                found = output
        while engine.core.idle():  # saves and stores end
            pass
    assert isinstance(found, RequestOutput)
    assert found.metrics is not None
    return [*found.outputs[0].token_ids], found.metrics.restored_tokens


@pytest.mark.parametrize(("first", "other"), [(1, 2), (2, 1)])
def test_frames_are_found_by_as_many_ranks(
    model: Path, tmp_path: Path, first: int, other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pace, "loading_s", lambda *_: 0.0)  # loads are tried, however fast
    monkeypatch.setattr(Pace, "patience_s", lambda *_: 30.0)  # computing is
    monkeypatch.setattr("dovetail.engine.tiers.feature.FIND_S", 30.0)
    tokens, count = restored(model, first, tmp_path / "frames")
    assert count == 0
    assert restored(model, other, tmp_path / "frames") == (tokens, 0)
    again, count = restored(model, first, tmp_path / "frames")
    assert again == tokens
    assert count >= 512
