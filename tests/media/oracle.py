"""The oracle of prompts with images: transformers' whole model, in float32. Its embeddings,
positions, masks and layers are its own.

Two things are ours: the images are encoded one by one, and only the spans that a test names are
placeholders. The same id elsewhere is text, which transformers has no way to say.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from tests.media.checkpoints import reference, settings_of

Tensors = Mapping[str, NDArray[Any]]
COUNTED = ("num_crops", "num_patches", "num_soft_tokens_per_image")  # that no vision model takes
TEXT = 0  # an id that stands for no image
# methods of whole models that find placeholders among their first argument, token ids
_MERGING = ("get_placeholder_mask", "inputs_merger")


def tensors_of(directory: Path, image: Image.Image) -> Tensors:
    """Return what the checkpoint's image processor makes of a picture."""
    processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
    outputs = processor(image, return_tensors="np", **settings_of(directory))
    return {name: np.asarray(value) for name, value in outputs.items() if name not in COUNTED}


def tensors_of_all(directory: Path, images: Sequence[Image.Image]) -> list[Tensors]:
    """Return what the image processor makes of the pictures of one prompt, for each."""
    processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
    if "batch_num_images" not in processor.model_input_names or len(images) == 1:
        return [tensors_of(directory, image) for image in images]
    outputs = processor([[*images]], return_tensors="np") if images else {}
    counts = {"batch_num_images": np.array([len(images)])}
    names = [name for name in outputs if name not in (*COUNTED, *counts)]
    return [
        {name: np.asarray(outputs[name])[place : place + 1] for name in names} | counts
        for place in range(len(images))
    ]


def spelled_out(tensors: Tensors) -> dict[str, NDArray[Any]]:
    """Return tensors whose pixels may be bytes with the numbers that these stand for."""
    numbers = dict(tensors)
    table = numbers.pop("pixel_table", None)
    if table is not None:
        pixels = numbers["pixel_values"]
        size = pixels.shape[-1] // 3 if pixels.ndim == 2 else pixels.shape[-1] * pixels.shape[-2]
        split = pixels.reshape(-1, 3, size)
        numbers["pixel_values"] = table[np.arange(3)[:, None], split].reshape(pixels.shape)
    return numbers


@torch.no_grad()
def rows_of(directory: Path, tensors: Tensors) -> torch.Tensor:
    """Return the rows [levels, rows, hidden] of an image."""
    found = _features(directory, tensors)
    levels = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
    parts = [[level] if isinstance(level, torch.Tensor) else level for level in levels]
    return torch.stack([torch.cat([part.flatten(0, -2) for part in each]) for each in parts])


@dataclass(frozen=True)
class Prompt:
    """A prompt's token ids, in which each image has all of its placeholders."""

    directory: Path
    token_ids: Sequence[int]
    images: Sequence[Tensors] = ()
    typed: int = 0  # the first placeholders of the prompt, which are text

    @torch.no_grad()
    def logits(self, *later: int) -> torch.Tensor:
        """Return the logits [tokens, vocab] of the prompt and the ids after it."""
        model = reference(self.directory)
        base: Any = model.model
        ids = torch.tensor([[*self.token_ids, *later]])
        is_row = self._is_row(ids, model.config.image_token_id)
        spans_only = torch.where(is_row, ids, TEXT)
        name = next(name for name in _MERGING if hasattr(base, name))
        merging = getattr(base, name)

        def of_spans(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("input_ids", None)
            return merging(spans_only, *args[1:], **kwargs)

        with (
            patch.object(base, "get_image_features", lambda *_, **__: self._encoded()),
            patch.object(base, name, of_spans),
        ):
            arguments = self._arguments(base, is_row)
            logits: torch.Tensor = model(input_ids=ids, use_cache=False, **arguments).logits[0]
        return logits

    def greedy(self, count: int) -> list[int]:
        """Return the `count` likeliest next ids, one after the other."""
        later: list[int] = []
        while len(later) < count:
            later.append(int(self.logits(*later)[-1].argmax()))
        return later

    def _is_row(self, ids: torch.Tensor, placeholder: int) -> torch.Tensor:
        """Return which ids [1, tokens] are placeholders of the images."""
        is_row = ids == placeholder
        is_row[:, len(self.token_ids) :] = False
        is_row[0, is_row[0].nonzero()[: self.typed]] = False
        return is_row

    def _arguments(self, base: Any, is_row: torch.Tensor) -> dict[str, Any]:
        """Return arguments of the model, some of which only tell it that there are images."""
        if not self.images:
            return {}
        given: dict[str, Any] = {"pixel_values": torch.zeros(1)}
        known = inspect.signature(base.forward).parameters
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in known:
                given[name] = is_row.long()
        if "image_grid_thw" in known:
            grids = [torch.as_tensor(image["image_grid_thw"]) for image in self.images]
            given["image_grid_thw"] = torch.cat(grids)
        return given

    def _encoded(self) -> SimpleNamespace:
        """Return the images' rows as transformers has them of all at once."""
        found = [_features(self.directory, image) for image in self.images]
        deeper = [getattr(each, "deepstack_features", None) or () for each in found]
        return SimpleNamespace(
            pooler_output=_joined([each.pooler_output for each in found]),
            deepstack_features=[_joined(level) for level in zip(*deeper, strict=True)],
        )


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(list(parts))
    return [piece for part in parts for piece in part]


def _features(directory: Path, tensors: Tensors) -> Any:
    inputs = {name: torch.as_tensor(value) for name, value in tensors.items()}
    base: Any = reference(directory).model
    return type(base).get_image_features(base, **inputs, return_dict=True)  # never replaced
