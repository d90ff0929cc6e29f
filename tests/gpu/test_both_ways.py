"""Images whose tokens attend in both directions, on a GPU: in float32 the tokens of transformers, with
and without graphs; in bfloat16 tokens that are nearly as likely."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dovetail import SamplingParams
from tests.gpu.device import on_a_gpu, settings_for
from tests.media.checkpoints import checkpoint, picture, written
from tests.media.oracle import Prompt, tensors_of
from tests.media.test_in_engine import NEW, check, engine

pytestmark = [*on_a_gpu, pytest.mark.usefixtures("shared_image_processes")]

NAMES = ["gemma3", "gemma4"]
NEAR = 0.05  # of the largest logit
PARAMS = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)


def prompts_of(name: str) -> list[dict[str, Any]]:
    """One and two pictures before, between and after text, one of them twice, and text alone."""
    one, other = picture(33, 50), picture(40, 64, seed=1)
    image = written(name)
    return [
        {"prompt": f"a {image} b {image}", "multi_modal_data": {"image": [one, other]}},
        {"prompt": f"{image} c {image} d", "multi_modal_data": {"image": [other, other]}},
        {"prompt": "hello"},
    ]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_transformers(
    name: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    directory = checkpoint(name)
    prompts = prompts_of(name)
    settings = settings_for("triton", cuda_graphs=graphs, max_num_batched_tokens=96)
    with engine(directory, **settings) as llm:
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        outputs += llm.generate(prompts, PARAMS, use_tqdm=False)  # from the prefix cache
    for prompt, output in zip([*prompts, *prompts], outputs, strict=True):
        check(directory, output, prompt.get("multi_modal_data", {}).get("image", []))


@pytest.mark.parametrize("name", NAMES)
def test_tokens_in_bfloat16_are_nearly_the_likeliest(name: str) -> None:
    directory = checkpoint(name)
    prompts = prompts_of(name)
    settings = {**settings_for("triton"), "dtype": "bfloat16"}
    with engine(directory, **settings) as llm:
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        images = prompt.get("multi_modal_data", {}).get("image", [])
        assert output.prompt_token_ids is not None
        tokens = list(output.outputs[0].token_ids)
        tensors = [tensors_of(directory, image) for image in images]
        logits = Prompt(directory, output.prompt_token_ids, tensors).logits(*tokens)
        for token, scores in zip(tokens, logits[-NEW - 1 : -1], strict=True):
            assert scores.max() - scores[token] <= NEAR * scores.abs().max()
