"""Prompts with images have the tokens and the tensors that transformers' whole processors make."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.errors import RequestError
from dovetail.front.media.prompts import ImagePrompts, MediaPrompt
from dovetail.front.media.sources import images_of_data
from tests.front.media.checkpoints import image_prompts, own_tokenizer, whole_processor
from tests.front.media.files import picture
from tests.media.checkpoints import KINDS
from tests.media.oracle import spelled_out


def prepared(images: ImagePrompts, name: str, text: str, pictures: list[Any]) -> MediaPrompt:
    ids = own_tokenizer(name).encode(text)
    return images.prepared(images.unprepared(text, ids, images_of_data({"image": pictures}), {}))


def for_whole(name: str, text: str) -> str:
    """Return a prompt as the whole processor reads it."""
    kind = KINDS[name]
    return text.replace(kind.prompt_token, kind.in_template or kind.prompt_token)


def refuses(whole: Any, **inputs: Any) -> bool:
    try:
        whole(**inputs)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("name", KINDS)
def test_tokens_and_tensors_are_those_of_the_whole_processor(name: str, tmp_path: Path) -> None:
    images = image_prompts(name, tmp_path)
    whole = whole_processor(name)
    rng = random.Random(name)
    compared = 0
    for _ in range(20):
        one = picture(rng.randint(1, 90), rng.randint(1, 90), rng.randrange(10**6))
        text = f"Look:\n{KINDS[name].prompt_token}\nwhat?"
        try:
            got = prepared(images, name, text, [one])
        except RequestError:
            assert refuses(whole, images=[one], text=[for_whole(name, text)]), one.size
            continue
        expected = whole(images=[one], text=[for_whole(name, text)], return_tensors="np")
        assert list(got.token_ids) == expected["input_ids"][0].tolist(), one.size
        for key, value in spelled_out(got.media[0].tensors).items():
            if key in expected:
                np.testing.assert_array_equal(value, np.asarray(expected[key]), err_msg=key)
        compared += 1
    assert compared > 10


@pytest.mark.parametrize("name", KINDS)
def test_several_images_have_the_tokens_of_the_whole_processor(name: str, tmp_path: Path) -> None:
    images = image_prompts(name, tmp_path)
    whole = whole_processor(name)
    rng = random.Random(name)
    token = KINDS[name].prompt_token
    for count in (2, 3, 8):
        pictures = [
            picture(rng.randint(9, 90), rng.randint(9, 90), rng.randrange(10**6))
            for _ in range(count)
        ]
        text = (
            "".join(
                f"{' and' * rng.randint(0, 2)}{chr(10) * rng.randint(0, 3)}{token}"
                for _ in range(count)
            )
            + "\n\n?"
        )
        got = prepared(images, name, text, pictures)
        expected = whole(images=[pictures], text=[for_whole(name, text)])["input_ids"][0]
        assert list(got.token_ids) == list(expected)
        row_id = own_tokenizer(name).encode(KINDS[name].tokens["image_token"])[0]
        ends = [0]
        for item in got.media:
            assert item.span.start >= ends[-1]
            ends.append(item.span.stop)
            for start, rows in item.runs:
                assert set(got.token_ids[start : start + rows]) == {row_id}
        rows = sum(item.rows for item in got.media)
        assert rows == list(got.token_ids).count(row_id)


@pytest.mark.parametrize("name", [name for name in KINDS if name.startswith("qwen")])
def test_grids_are_those_of_the_rows(name: str, tmp_path: Path) -> None:
    images = image_prompts(name, tmp_path)
    [item] = prepared(images, name, KINDS[name].prompt_token, [picture(30, 60)]).media
    [[time, height, width]] = item.tensors["image_grid_thw"].tolist()
    assert item.grid == (time, height // 2, width // 2)
    assert item.runs == ((0, time * (height // 2) * (width // 2)),)
