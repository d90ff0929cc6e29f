"""Prompts with images have the tokens and the tensors that transformers' whole processors make."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dovetail.config.limits import Limits
from dovetail.front.media.facts import MediaFacts
from dovetail.front.media.prompts import ImagePrompts, MediaPrompt
from dovetail.front.media.sources import images_of_data
from tests.front.media.checkpoints import KINDS, own_tokenizer, whole_processor, write


def images_of(name: str, directory: Path, **facts: Any) -> ImagePrompts:
    config = write(directory, name)
    tokenizer = own_tokenizer(name)
    made = {"cache_rows": 10_000, "step_tokens": 10_000} | facts
    return ImagePrompts(
        MediaFacts(model_dir=str(directory), config=config, **made), Limits(), lambda: tokenizer
    )


def picture(rng: random.Random, most: int = 90) -> Image.Image:
    size = rng.randint(1, most), rng.randint(1, most)
    pixels = np.frombuffer(rng.randbytes(size[0] * size[1] * 3), np.uint8)
    return Image.fromarray(pixels.reshape(size[1], size[0], 3))


def prepared(images: ImagePrompts, name: str, text: str, pictures: list[Any]) -> MediaPrompt:
    ids = own_tokenizer(name).encode(text)
    return images.prepared(images.unprepared(text, ids, images_of_data({"image": pictures}), {}))


@pytest.mark.parametrize("name", KINDS)
def test_tokens_and_tensors_are_those_of_the_whole_processor(name: str, tmp_path: Path) -> None:
    images = images_of(name, tmp_path)
    whole = whole_processor(name)
    rng = random.Random(name)
    for _ in range(20):
        one = picture(rng)
        text = f"Look:\n{KINDS[name].image_token}\nwhat?"
        got = prepared(images, name, text, [one])
        expected = whole(images=[one], text=[text], return_tensors="np")
        assert list(got.token_ids) == expected["input_ids"][0].tolist(), one.size
        for key, value in got.media[0].tensors.items():
            if key in expected:
                np.testing.assert_array_equal(value, np.asarray(expected[key]), err_msg=key)
    images.close()
