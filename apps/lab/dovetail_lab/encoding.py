"""Times of an engine's image encoder, for `calibrate`.

A prompt whose image is encoded takes longer than one with other text and the same image, whose rows
are kept: by what a step takes for the image.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from dovetail import LLMEngine
from dovetail.api.json_files import read_json_object
from dovetail.api.media_types import media_type_of
from dovetail.errors import RequestError
from dovetail.serving import MediaPrompt
from dovetail_lab.rig import Rig, TimeIsUpError

SIDES = (448, 1024, 224, 672)  # of pictures, in pixels
QUICK_SIDES = (28, 224)
REPEATS = 4  # of each; the first only warms up
TEXT_TOKENS = 8


class Encoded(NamedTuple):
    """An image that a step encoded."""

    rows: int
    seconds: float  # by which that prolonged the step


def pictures(engine: LLMEngine, *, quick: bool = False) -> list[list[MediaPrompt]]:
    """Return prompts of an image each, prepared, by size; none if the engine has no encoder. Sizes
    that don't fit are left out."""
    token_id = _placeholder(engine)
    found = []
    for side in QUICK_SIDES if quick else SIDES:
        if token_id is not None:
            with suppress(RequestError):  # it has too many rows
                found.append(_of_side(engine, side, token_id))
    return found


def encoded_images(
    rig: Rig, prompts: Sequence[Sequence[MediaPrompt]], seconds: float
) -> list[Encoded]:
    """Measure `pictures` for at most `seconds`, and each size at least once."""
    found: list[Encoded] = []
    until = time.monotonic() + seconds
    with suppress(TimeIsUpError):
        for of_side in prompts:
            for index, prompt in enumerate(of_side):
                seconds = rig.time_of(prompt) - rig.time_of(_with_other_text(prompt))
                if index:
                    found.append(Encoded(sum(item.rows for item in prompt.media), seconds))
                if index and time.monotonic() > until:
                    break
    return found


def _with_other_text(prompt: MediaPrompt) -> MediaPrompt:
    """Return a prompt that isn't in the prefix cache, with the same image."""
    first, *others = prompt.token_ids
    return replace(prompt, token_ids=[first + 1, *others])


def _placeholder(engine: LLMEngine) -> int | None:
    """Return the token that stands for an image in a prompt; None if the engine encodes none."""
    if engine.capacity.media is None:
        return None
    directory = engine.get_model_config().directory
    config = read_json_object(directory / "config.json", missing_ok=True)
    media_type = media_type_of(config)
    return None if media_type is None else media_type.unexpanded(config)


def _of_side(engine: LLMEngine, side: int, token_id: int) -> list[MediaPrompt]:
    """Return prompts with different images, all with this many pixels on a side."""
    from PIL import Image

    random = np.random.default_rng(side)
    text = [number for number in range(1, 200) if number != token_id]
    prompts = []
    for _ in range(REPEATS):
        pixels = random.integers(0, 256, (side, side, 3), np.uint8)
        given: Any = {
            "prompt_token_ids": [*random.choice(text, TEXT_TOKENS).tolist(), token_id],
            "multi_modal_data": {"image": Image.fromarray(pixels)},
        }
        prepared: Any = engine.tokenized(given)
        prompts.append(prepared)
    return prompts
