"""Text after images is that of transformers' whole models: prompts are read, prepared, encoded and
computed by the engine, from files of pictures to token ids."""

from __future__ import annotations

import random
from typing import Any

import pytest
from PIL import Image

from dovetail import LLM, SamplingParams
from dovetail.api.media_types import MEDIA_TYPES
from tests.media.checkpoints import NAMES, checkpoint, picture, written
from tests.media.oracle import Prompt, tensors_of

SLOW = pytest.mark.slow("an engine and processes for pictures, for each type")
# types whose language model needs nothing but rows
OF_ROWS = tuple(
    name for name in NAMES if not MEDIA_TYPES[name].axes and MEDIA_TYPES[name].both_ways == "none"
)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def letters(rng: random.Random, most: int) -> str:
    return "".join(rng.choices("abcdefgh ", k=rng.randint(0, most)))


def random_prompt(rng: random.Random, name: str) -> tuple[str, list[Image.Image]]:
    """Return a prompt with up to three pictures of any sizes, some the same, and text around and
    between them, or none."""
    pictures = [
        picture(*rng.choice([(28, 28), (33, 50), (61, 17), (9, 9)]), seed=rng.randint(0, 2))
        for _ in range(rng.choice([0, 1, 1, 2, 3]))
    ]
    text = letters(rng, 20) + "".join(written(name) + letters(rng, 20) for _ in pictures)
    return text or "a", pictures


def as_prompt(text: str, pictures: list[Image.Image]) -> dict[str, Any]:
    images = {"multi_modal_data": {"image": pictures}} if pictures else {}
    return {"prompt": text, **images}


def engine(name: str, **settings: Any) -> LLM:
    settings = {"max_model_len": 512, "max_num_batched_tokens": 64, **settings}
    return LLM(str(checkpoint(name)), dtype="float32", **settings)


def check(name: str, output: Any, pictures: list[Image.Image]) -> None:
    """Compare an output with the oracle."""
    directory = checkpoint(name)
    tensors = [tensors_of(directory, each) for each in pictures]
    expected = Prompt(directory, output.prompt_token_ids, tensors)
    for sample in output.outputs:
        assert list(sample.token_ids) == expected.greedy(len(sample.token_ids))


@SLOW
@pytest.mark.parametrize("tokens", [16, 300])
@pytest.mark.parametrize("name", OF_ROWS)
def test_greedy_tokens_are_those_of_the_whole_model(name: str, tokens: int) -> None:
    """In chunks of 16 tokens, most images are in several steps."""
    rng = random.Random(f"{name} {tokens}")
    cases = [random_prompt(rng, name) for _ in range(10)]
    with engine(name, max_num_batched_tokens=tokens) as llm:
        prompts = [as_prompt(*case) for case in cases]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for output, (_, pictures) in zip(outputs, cases, strict=True):
        check(name, output, pictures)


@SLOW
@pytest.mark.parametrize("name", ["llava", "mistral3"])
def test_a_picture_hits_the_prefix_cache_and_another_does_not(name: str) -> None:
    text = "b" * 40 + written(name) + "c" * 40
    one, other = picture(40, 30), picture(40, 30, seed=1)
    with engine(name, enable_prefix_caching=True) as llm:
        outputs = [
            llm.generate(as_prompt(text, [each]), GREEDY, use_tqdm=False)[0]
            for each in (one, one, other, one)
        ]
    for output, each in zip(outputs, (one, one, other, one), strict=True):
        check(name, output, [each])
    first, again, changed, last = (output.num_cached_tokens for output in outputs)
    assert first == 0
    assert again == last > 64
    assert 0 < changed <= 48


@SLOW
def test_samples_of_a_prompt_share_its_images() -> None:
    params = SamplingParams(n=3, temperature=0, max_tokens=4, ignore_eos=True)
    pictures = [picture(40, 30), picture(30, 40)]
    with engine("smolvlm") as llm:
        prompt = as_prompt(written("smolvlm").join(("a", "b", "c")), pictures)
        [output] = llm.generate(prompt, params, use_tqdm=False)
    assert len(output.outputs) == 3
    check("smolvlm", output, pictures)
