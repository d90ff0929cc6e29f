"""Models whose images have positions on three axes, in engines with several ranks, samples and
drafts: their greedy tokens are those of transformers' whole model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, Qwen3Config

from dovetail import LLM, RequestOutput, SamplingParams
from tests.media.checkpoints import TEXT, checkpoint, picture, written
from tests.media.oracle import Prompt, tensors_of_all

pytestmark = pytest.mark.usefixtures("shared_image_processes")
NEW = 6


def prompts(name: str) -> list[tuple[str, list[Image.Image]]]:
    """Images before, between and after text, beside text alone; one picture twice."""
    image = written(name)
    one = (f"abc {image} d", [picture(40, 64)])
    return [one, ("xyz", []), (f"{image}ef{image}", [picture(91, 17, 1), picture(28, 28)]), one]


def check(name: str, samples: int = 1, new: int = NEW, **settings: Any) -> list[RequestOutput]:
    """Compare the tokens of an engine with these settings, and return its outputs."""
    directory = checkpoint(name)
    asked = prompts(name) * 2
    given = [
        {"prompt": text, **({"multi_modal_data": {"image": images}} if images else {})}
        for text, images in asked
    ]
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, n=samples)
    settings = {"max_model_len": 256, "max_num_batched_tokens": 16, **settings}
    with LLM(str(directory), dtype="float32", **settings) as llm:
        outputs = llm.generate(given, sampling, use_tqdm=False)
    for output, (_, images) in zip(outputs, asked, strict=True):
        assert output.prompt_token_ids is not None
        tensors = tensors_of_all(directory, images)
        expected = Prompt(directory, output.prompt_token_ids, tensors).greedy(new)
        assert [list(sample.token_ids) for sample in output.outputs] == [expected] * samples
    return outputs


@pytest.mark.full  # `test_in_engine.py` has two ranks compute with such positions
def test_two_ranks_compute_what_one_does() -> None:
    check("qwen3_vl", tensor_parallel_size=2)


@pytest.mark.slow("an engine")
def test_samples_share_the_positions_of_their_prompt() -> None:
    check("qwen2_5_vl", samples=3)


@pytest.mark.slow("an engine")
def test_rows_that_are_preempted_get_their_positions_again() -> None:
    memory = {"name": "local", "num_pages": 12}
    outputs = check("qwen2_vl", new=30, max_model_len=160, executor=memory)
    assert any(output.metrics.preemptions for output in outputs if output.metrics)


@pytest.mark.slow("an engine with a draft model")
def test_drafts_of_a_text_model_change_no_token(tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(**TEXT)).save_pretrained(tmp_path)
    for file in checkpoint("qwen3_vl").glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    drafter = {"name": "model", "model": str(tmp_path)}
    check("qwen3_vl", speculation={"drafter": drafter, "max_drafts": 3})
