"""Pixels that travel as bytes become the very numbers that the image processor returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoImageProcessor

from dovetail.api.json_files import read_json_object
from dovetail.front.media.layouts import layout_of
from dovetail.front.media.worker import prepared
from dovetail.request.media import MediaItem
from dovetail_executors.runtime.towers import find_tower
from tests.media.checkpoints import NAMES, checkpoint, picture
from tests.media.oracle import rows_of, spelled_out
from tests.support import examples

SIDES = st.integers(5, 120)


def layout(directory: Path) -> Any:
    config = read_json_object(directory / "config.json")
    return layout_of(directory, config, lambda token_id: "x")


@pytest.mark.parametrize("name", NAMES)
@given(width=SIDES, height=SIDES)
@examples(quick=8, full=100)
def test_bytes_stand_for_the_numbers_of_the_image_processor(
    name: str, width: int, height: int
) -> None:
    directory = checkpoint(name)
    of_type = layout(directory)
    if not of_type.as_bytes:
        return
    processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
    arguments = of_type.with_options({})
    image = picture(width, height, seed=width)
    expected = prepared(processor, image, arguments)
    found = prepared(processor, image, arguments, as_bytes=True)
    assert found["pixel_values"].dtype == np.uint8
    found = spelled_out(found)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "mistral3", "internvl", "llava"])
def test_a_tower_encodes_bytes_as_it_encodes_numbers(name: str) -> None:
    directory = checkpoint(name)
    of_type = layout(directory)
    processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
    plan = find_tower(directory)
    assert plan is not None
    tower = plan.build(torch.float32, torch.device("cpu"))
    rows = []
    count = 0
    for as_bytes in (False, True):
        tensors = prepared(processor, picture(40, 64), of_type.with_options({}), as_bytes=as_bytes)
        kept = {key: value for key, value in tensors.items() if key != "num_patches"}
        count = count or rows_of(directory, kept).shape[1]
        item = MediaItem(kind="image", digest=b"", runs=((0, count),), tensors=kept)
        rows.append(tower.encode(item))
    assert torch.equal(*rows)
