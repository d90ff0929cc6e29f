"""Requests with images in an engine: their greedy tokens are those of transformers' language model
over the same rows, whatever happens to a request.

The rows come from transformers' whole model (`tests/media/test_towers.py` compares those of ours),
and replace embeddings where the engine's prompt has an image: also where the placeholder's id is
written, or generated, as text, for which transformers' whole model fails.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor

from dovetail import LLM, RequestOutput, SamplingParams
from dovetail.api.json_files import read_json_object
from dovetail.api.media_types import media_type_of
from tests.e2e.reference import TIE
from tests.media.checkpoints import PATCH, checkpoint, picture, reference, written
from tests.media.test_towers import COUNTED, expected_of
from tests.support import FULL

ROWS_ONLY = ("llava", "mistral3", "internvl", "smolvlm", "llava_onevision")
MERGING = ("mistral3", "lighton_ocr")
NEW = 6
CASES = 60 if FULL else 1
SIZES = ((28, 28), (33, 50), (91, 17), (40, 64))
SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 16, "max_num_seqs": 4},
    {"kv_cache.reuse": False, "max_num_seqs": 2},
    {"media.cache_rows": 200, "media.step_rows": 1},
    {"speculation": {"drafter": "ngram", "max_drafts": 3}},
]


def a_prompt(name: str, draw: random.Random) -> dict[str, Any]:
    """Text with images before, between and after it."""
    pieces = []
    images: list[Image.Image] = []
    for _ in range(draw.choice([1, 1, 2, 4])):
        pieces.append("".join(draw.choices("abc ", k=draw.randint(0, 9))))
        if draw.random() < 0.8:
            pieces.append(written(name))
            images.append(picture(*draw.choice(SIZES), seed=draw.randint(0, 2)))
    pieces.append(draw.choice(["?", ""]) if images else "?")
    prompt: dict[str, Any] = {"prompt": "".join(pieces)}
    if images:
        prompt["multi_modal_data"] = {"image": images}
    return prompt


class Oracle:
    """transformers' language model of a checkpoint, and rows of its whole model."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.whole = reference(directory)
        self.processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
        config = read_json_object(directory / "config.json")
        self.arguments: dict[str, Any] = {}
        if "spatial_merge_size" in config and config["model_type"] in MERGING:
            # as their whole processors, which need torchvision, tell the image processor
            self.arguments["patch_size"] = PATCH * config["spatial_merge_size"]
        media_type = media_type_of(config)
        assert media_type is not None
        self.row_id = media_type.placeholder(config)

    @torch.no_grad()
    def rows(self, image: Image.Image) -> torch.Tensor:
        """Return [rows, hidden]."""
        outputs = self.processor(image, return_tensors="np", **self.arguments)
        tensors = {key: value for key, value in outputs.items() if key not in COUNTED}
        return expected_of(self.directory, tensors)[0]

    @torch.no_grad()
    def check(self, output: RequestOutput, images: Sequence[Image.Image]) -> None:
        """Compare the first sample's tokens; all others have to be the same."""
        prompt = torch.tensor(output.prompt_token_ids)
        tokens = list(output.outputs[0].token_ids)
        assert len(tokens) == NEW
        assert all([*sample.token_ids] == tokens for sample in output.outputs)
        ids = torch.cat([prompt, torch.tensor(tokens)])
        embeddings = self.whole.get_input_embeddings()(ids).clone()
        rows = [self.rows(image) for image in images]
        if rows:
            places = (prompt == self.row_id).nonzero()[:, 0]
            joined = torch.cat(rows)
            assert len(places) == len(joined)
            embeddings[places] = joined
        language_model = getattr(self.whole.model, "language_model", None)
        if language_model is None:
            language_model = self.whole.model.text_model
        states = language_model(inputs_embeds=embeddings[None])
        logits = self.whole.lm_head(states.last_hidden_state[0, len(prompt) - 1 : -1])
        for token, scores in zip(tokens, logits, strict=True):
            best = int(scores.argmax())
            if token != best:
                assert scores[best] - scores[token] <= TIE
                return


def run(directory: Path, prompts: Sequence[dict[str, Any]], n: int, **settings: Any) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, n=n)
    with LLM(
        str(directory),
        dtype="float32",
        generation_config="none",
        max_model_len=700,
        block_size=8,
        **settings,
    ) as llm:
        first = llm.generate(list(prompts), params, use_tqdm=False)
        again = llm.generate(list(prompts), params, use_tqdm=False)  # from the prefix cache
    return [*first, *again]


@pytest.mark.parametrize("case", range(CASES))
@pytest.mark.parametrize("name", ROWS_ONLY)
@pytest.mark.slow("makes an engine, and transformers' whole model")
def test_greedy_tokens_are_those_of_transformers(name: str, case: int) -> None:
    draw = random.Random(f"{name} {case}")
    directory = checkpoint(name)
    oracle = Oracle(directory)
    prompts = [a_prompt(name, draw) for _ in range(draw.randint(1, 4))]
    prompts.append(prompts[0])
    settings = draw.choice(SETTINGS)
    outputs = run(directory, prompts, draw.choice([1, 1, 3]), **settings)
    for prompt, output in zip([*prompts, *prompts], outputs, strict=True):
        oracle.check(output, prompt.get("multi_modal_data", {}).get("image", []))


@pytest.mark.parametrize("name", ROWS_ONLY)
@pytest.mark.slow("makes an engine, and transformers' whole model")
def test_the_placeholder_as_text_is_text(name: str) -> None:
    directory = checkpoint(name)
    oracle = Oracle(directory)
    image = picture(33, 50)
    parts = [
        {"type": "text", "text": f"typed {written(name)} here"},
        {"type": "image", "image": image},
        {"type": "text", "text": written(name)},
    ]
    with LLM(str(directory), dtype="float32", generation_config="none", max_model_len=700) as llm:
        params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
        [output] = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    rows = oracle.rows(image)
    prompt = np.array(output.prompt_token_ids)
    assert (prompt == oracle.row_id).sum() > len(rows)
