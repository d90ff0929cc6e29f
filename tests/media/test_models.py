"""Our language models compute logits of text after images as transformers' whole models do: rows in
place of embeddings and after deeper layers, positions on three axes, in chunks of any size."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.api.json_files import read_json_object
from dovetail.api.media import MediaPlace
from dovetail.api.media_types import media_type_of
from dovetail.api.model import ModelInputs
from dovetail.nn.model_files import read_config, text_of
from dovetail.nn.weights import load_weights
from dovetail.testing.suites.model_bench import Bench, Chunk
from dovetail_executors.runtime.media_positions import positions_of
from tests.media.checkpoints import NAMES, PAD, checkpoint, picture
from tests.media.oracle import Prompt, rows_of, tensors_of
from tests.models.oracle import arch_of
from tests.support import FULL

LENGTH = 1024  # tokens that our model's table of positions has
SIZES = ((28, 28), (33, 50), (91, 17), (40, 64), (9, 9))
CASES = 60 if FULL else 1


@cache
def config_of(directory: Path) -> Any:
    """Return the config of our language model."""
    return text_of(read_config(directory), directory)


THROUGH_TRANSFORMERS = ("aya_vision", "exaone4_5", "granite_vision")
SERVED = tuple(name for name in NAMES if name not in THROUGH_TRANSFORMERS)


def our_model(directory: Path) -> Bench:
    """Return our language model, without any tokens."""
    config = config_of(directory)
    arch = arch_of(config)
    assert arch.capabilities.media
    bench = Bench(arch, config, None, max_len=LENGTH)
    load_weights(bench.model, directory)
    return bench


class Drawn:
    """A random prompt: images before, between and after text, and ids of placeholders as text."""

    def __init__(self, name: str, draw: random.Random) -> None:
        self.directory = checkpoint(name)
        raw = read_json_object(self.directory / "config.json")
        kind = media_type_of(raw)
        assert kind is not None
        self.whole = kind.whole(raw)
        self.tokens: list[int] = []
        self.images = []
        self.placeholder = kind.placeholder(raw)
        places: list[MediaPlace] = []
        rows = [torch.zeros(kind.levels(raw), 0, config_of(self.directory).hidden_size)]
        self.is_row: list[bool] = []
        self.spans: list[tuple[int, int]] = []  # of images' tokens
        self._text(draw, draw.randint(0, 9))
        self.typed = draw.choice([0, 2])
        self.tokens += [self.placeholder] * self.typed
        self.is_row += [False] * self.typed
        for _ in range(draw.choice([1, 1, 2, 3, 8])):
            image = tensors_of(
                self.directory, picture(*draw.choice(SIZES), seed=draw.randint(0, 2))
            )
            encoded = rows_of(self.directory, image)
            if kind.axes:
                time, height, width = np.asarray(image["image_grid_thw"])[0].tolist()
                merged = kind.merged(raw)
                grid = (time, height // merged, width // merged)
                places.append(MediaPlace(len(self.tokens), grid))
            self.images.append(image)
            self._put(encoded, rows)
            self._text(draw, draw.randint(1, 9))
        self.rows = torch.cat(rows, dim=1)
        self.axes = positions_of(len(self.tokens), places)[0] if kind.axes else None

    def _text(self, draw: random.Random, count: int) -> None:
        self.tokens += [draw.randrange(PAD) for _ in range(count)]
        self.is_row += [False] * count

    def _put(self, encoded: torch.Tensor, rows: list[torch.Tensor]) -> None:
        count = encoded.shape[1]
        self.spans.append((len(self.tokens), len(self.tokens) + count))
        self.tokens += [self.placeholder] * count
        self.is_row += [True] * count
        rows.append(encoded)

    def chunk_end(self, end: int) -> int:
        """Return where a chunk that would end there does: not within an image that is computed
        whole."""
        if self.whole:
            return next((stop for start, stop in self.spans if start < end < stop), end)
        return end

    @property
    def inputs(self) -> ModelInputs:
        is_row = torch.tensor(self.is_row)
        rows = torch.full((len(self.rows), len(is_row), self.rows.shape[2]), torch.nan)
        rows[:, is_row] = self.rows
        return ModelInputs(
            token_ids=torch.tensor(self.tokens),
            positions=torch.arange(len(is_row)),
            rows=rows,
            is_row=is_row,
            axes=None if self.axes is None else torch.from_numpy(self.axes),
        )

    @torch.no_grad()
    def expected(self) -> torch.Tensor:
        """Return the logits [tokens, vocab] of transformers' whole model."""
        return Prompt(self.directory, self.tokens, self.images, self.typed).logits()


def part(inputs: ModelInputs, start: int, stop: int) -> ModelInputs:
    assert inputs.rows is not None
    assert inputs.is_row is not None
    return ModelInputs(
        token_ids=inputs.token_ids[start:stop],
        positions=inputs.positions[start:stop],
        rows=inputs.rows[:, start:stop],
        is_row=inputs.is_row[start:stop],
        axes=None if inputs.axes is None else inputs.axes[:, start:stop],
    )


@torch.no_grad()
def computed(bench: Bench, prompt: Drawn, chunk: int) -> torch.Tensor:
    """Return our logits [tokens, vocab], computed in chunks of `chunk` tokens, or more if an image
    is computed whole."""
    bench.sequences.spans["a"] = prompt.spans
    hidden = []
    start = 0
    while start < len(prompt.tokens):
        own = part(prompt.inputs, start, prompt.chunk_end(start + chunk))
        bench.plan(Chunk("a", own.token_ids, start))
        hidden.append(bench.model(own))
        start += len(own.token_ids)
    return bench.logits(torch.cat(hidden))


@pytest.mark.slow("transformers' whole models of each type")
@pytest.mark.parametrize("case", range(CASES))
@pytest.mark.parametrize("name", SERVED)
def test_logits_are_those_of_the_whole_model(name: str, case: int) -> None:
    draw = random.Random(f"{name} {case}")
    prompt = Drawn(name, draw)
    expected = prompt.expected()
    chunk = draw.choice([16, len(prompt.tokens)])
    ours = computed(our_model(prompt.directory), prompt, chunk)
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(ours, expected, atol=1e-4 * scale, rtol=1e-4)
