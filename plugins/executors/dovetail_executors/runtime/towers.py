"""Towers: the image encoders of checkpoints.

A tower is transformers' own code, the whole model of the checkpoint without its language model, so
that the rows of an image are those that transformers computes: vision model, projector, the order
of tiles and the rows at the ends of lines. Every rank has the whole tower.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dovetail.api.json_files import read_json_object
from dovetail.api.media_types import MediaType, media_type_of
from dovetail.errors import DovetailError, ModelLoadError
from dovetail.nn.model_files import first_lines, read_config
from dovetail.nn.skeletons import ONE_AT_A_TIME, skeleton
from dovetail.nn.transfer import to_device
from dovetail.nn.weights import (
    COMPUTED,
    PLAIN,
    Header,
    check_differences,
    other_parts,
    random_numbers,
    some_of,
    tensors_named,
)
from dovetail.request.media import MediaItem
from dovetail_executors.runtime.tower_grids import Grids
from dovetail_executors.runtime.tower_masks import without_mask

log = logging.getLogger("dovetail")

# modules of a whole model that encode no images
_OTHER_MODULES = ("language_model", "text_model", "audio_tower", "embed_audio")
# tensors of a checkpoint that belong to neither the language model nor the tower
_OTHER_TENSORS = re.compile(r"(model\.)?(audio\w*|embed_audio|mtp)(\.|$)")
# beginnings of names that only some releases of transformers, and some checkpoints, have
_BEFORE = re.compile(r"^(?:model\.)?(?:(vision_tower\.)vision_model\.)?")
# arguments that the code of towers only reads on the host: on a device, that would wait for it
_ON_HOST = ("batch_num_images", "image_sizes")
# sides of pictures, in pixels, for the largest one; processors make them smaller
_LARGEST_SIDES = (4096, 2048, 1024, 512, 256, 64)


@dataclass(frozen=True)
class TowerPlan:
    """Properties of an image encoder, known before its weights are read."""

    directory: Path
    media_type: MediaType
    levels: int  # rows for each placeholder: see `MediaType.levels`
    whole: bool  # see `MediaType.whole`
    hidden_size: int  # of a row
    config: Any  # transformers' PretrainedConfig of the whole model
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)  # of its tensors
    # names in the checkpoint -> those in `shapes`; None: its weights will be random
    sources: Mapping[str, str] | None = field(repr=False)

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the size of its weights in `dtype`."""
        return dtype.itemsize * sum(math.prod(shape) for shape in self.shapes.values())

    def build(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tower:
        """Load the weights from the checkpoint, in `dtype`; random ones have a `seed`, and are the
        same on all ranks. Raises `ModelLoadError` naming the file and the tensor if one can't be
        read."""
        if self.sources is None:
            tensors = _random(self.shapes, device, dtype, seed)
        else:
            tensors = {
                self.sources[source]: tensor.to(device, dtype)
                for source, tensor in tensors_named(self.directory, self.sources.__contains__)
            }
        model = _without_parameters(deepcopy(self.config), dtype)  # which towers change
        model.load_state_dict(tensors, assign=True)
        model.requires_grad_(False)
        without_mask(model)
        return Tower(self, model.to(device), dtype, device)


class Tower:
    """An encoder of images, loaded."""

    def __init__(
        self, plan: TowerPlan, model: Any, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.plan = plan
        self._model = model
        self._dtype = dtype
        self._device = device
        self._grids = Grids.of(model, device)

    @torch.inference_mode()
    def encode(self, item: MediaItem) -> torch.Tensor:
        """Return rows [levels, item.rows, hidden_size] in the model's dtype.

        One item a call: in a batch with others, the last bits of some types' rows would depend on
        these. Raises `DovetailError` if its tensors don't fit, or give another number of rows.
        """
        rows = self._levels(item.tensors)
        plan = self.plan
        expected = (item.rows, plan.hidden_size)
        if len(rows) != plan.levels or any(level.shape != expected for level in rows):
            raise DovetailError(
                f"the encoder made {[list(level.shape) for level in rows]} of an image, which has "
                f"{plan.levels} levels of {item.rows} rows of {plan.hidden_size} numbers"
            )
        return torch.stack(rows)

    @torch.inference_mode()
    def encode_largest(self, most_rows: int) -> int:
        """Encode a picture of noise, the largest of a few sizes that has at most `most_rows` rows,
        and return their number; 0 if all have more, or if the checkpoint's image processor can't be
        used, which is logged: requests with images are refused then, and text is served. Raises
        `DovetailError` if a picture can't be encoded."""
        from PIL import Image
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        directory = self.plan.directory
        try:
            processor = AutoImageProcessor.from_pretrained(
                directory, backend="pil", local_files_only=True, trust_remote_code=False
            )
            for side in _LARGEST_SIDES:
                noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
                outputs = processor(Image.fromarray(noise), return_tensors="np")
                tensors = {
                    name: np.asarray(value)
                    for name, value in outputs.items()
                    if name in inspect.signature(self._model.get_image_features).parameters
                }
                rows = torch.stack(self._levels(tensors)).shape[1]
                if self._grids is not None:
                    self._grids.forget()
                if rows <= most_rows:
                    return rows
        except DovetailError:
            raise
        except Exception as error:  # transformers raises any exception
            log.warning("%s: its image processor can't be used: %s", directory, first_lines(error))
        return 0

    def _levels(self, tensors: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the rows [any, hidden] of each level."""
        placed = {name: self._placed(name, array) for name, array in tensors.items()}
        if (table := placed.pop("pixel_table", None)) is not None:
            placed["pixel_values"] = _looked_up(placed["pixel_values"], table)
        if self._grids is not None:
            placed |= self._grids.arguments(tensors["image_grid_thw"])
        try:
            found = self._model.get_image_features(**placed, return_dict=True)
        except Exception as error:  # transformers raises any exception
            raise DovetailError(f"this image can't be encoded: {first_lines(error)}") from error
        levels = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        return [_joined(level) for level in levels]

    def _placed(self, name: str, array: Any) -> torch.Tensor:
        """Return a tensor of an item on the device, numbers in the model's dtype."""
        own = np.require(array, requirements="W")  # torch has no tensors that can't be written
        if name in _ON_HOST or (name == "image_grid_thw" and self._grids is not None):
            return torch.from_numpy(own)
        tensor = to_device(own, self._device)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def _looked_up(pixels: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return what bytes of pixels stand for, of the same shape: table[channel, byte]. `pixels`
    [..., channels, height, width], or [patches, channels * any]; `table` [channels, 256]."""
    channels = table.shape[0]
    dims = [len(pixels), channels, -1]
    if pixels.ndim > 2:
        dims = [-1, channels, pixels.shape[-2] * pixels.shape[-1]]
    firsts = torch.arange(0, table.numel(), table.shape[1], dtype=torch.int32, device=table.device)
    places = pixels.reshape(dims).int() + firsts[:, None]
    return table.flatten()[places].view(pixels.shape)


def find_tower(model_dir: str | Path, *, dummy: bool = False) -> TowerPlan | None:
    """Return the tower of a checkpoint, or None if images of it can't be served: it has no vision
    model, its type is refused, it has no weights of it, or quantized ones. Logs which.

    `dummy`: weights will be random, and the directory may hold none. Raises `ModelLoadError` if its
    files are malformed, or lack tensors of the tower, or have others or of other shapes.
    """
    directory = Path(model_dir)
    raw = read_json_object(directory / "config.json")
    media_type = media_type_of(raw)
    if media_type is None:
        return None
    stored = {} if dummy or media_type.refused else _vision_tensors(directory)
    refused = media_type.refused or ("" if dummy else _unusable(stored))
    if refused:
        name = media_type.model_type
        log.warning("%s: images aren't served, only text: %s: %s", directory, name, refused)
        return None
    config = read_config(directory)
    shapes = _shapes(directory, config)
    return TowerPlan(
        directory,
        media_type,
        media_type.levels(raw),
        media_type.whole(raw),
        int(config.get_text_config(decoder=True).hidden_size),
        config,
        shapes,
        None if dummy else _sources(directory, shapes, stored),
    )


def _vision_tensors(directory: Path) -> dict[str, Header]:
    """Return the names of a checkpoint's tensors that the tower may have -> their headers."""
    return {
        name: header
        for name, header in other_parts(directory).items()
        if not _OTHER_TENSORS.match(name) and not name.endswith(COMPUTED)
    }


def _unusable(stored: Mapping[str, Header]) -> str:
    """Return why a tower of these tensors can't be served, as a clause; empty: it can."""
    if not stored:
        return "the checkpoint has no weights of the vision model that its config names"
    quantized = [name for name, header in stored.items() if header.dtype not in PLAIN]
    if quantized:
        return f"weights of its vision model are quantized ({some_of(quantized, 3)})"
    return ""


def _shapes(directory: Path, config: Any) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tower's tensors, without memory for any. Raises
    `ModelLoadError` if transformers can't build it."""
    try:
        with torch.device("meta"):
            model = _of_config(config, torch.float32)
    except Exception as error:  # transformers raises any exception
        raise ModelLoadError(
            f"{directory / 'config.json'}: transformers can't build the vision model: "
            f"{first_lines(error)}"
        ) from error
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _sources(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, Header]
) -> dict[str, str]:
    """Return names in the checkpoint -> those in `shapes`. Raises `ModelLoadError` if they differ,
    or the shapes do."""
    missing = {_BEFORE.sub(r"\1", name): name for name in shapes}
    found: dict[str, str] = {}
    unknown: list[str] = []
    for source in stored:
        name = missing.pop(_BEFORE.sub(r"\1", source), None)
        if name is None:
            unknown.append(source)
        else:
            found[source] = name
    try:
        check_differences(directory, sorted(missing.values()), unknown)
        for source, name in found.items():
            if stored[source].shape != shapes[name]:
                raise ModelLoadError(
                    f"{directory}: tensor {source}: expected shape {list(shapes[name])}, found "
                    f"{list(stored[source].shape)}"
                )
    except ModelLoadError as error:
        raise ModelLoadError(
            f"{error}; its text is served without its vision model if media: {{images: false}}"
        ) from None
    return found


def _of_config(config: Any, dtype: torch.dtype) -> nn.Module:
    """Return transformers' whole model without its language model."""
    from transformers import AutoModel

    with ONE_AT_A_TIME:
        model: nn.Module = AutoModel.from_config(config, dtype=dtype)
    for name in _OTHER_MODULES:
        if getattr(model, name, None) is not None:
            setattr(model, name, None)
    return model.eval()


def _without_parameters(config: Any, dtype: torch.dtype) -> nn.Module:
    """Return the model with parameters on the meta device, and buffers as transformers computes
    them."""
    return skeleton(partial(_of_config, config, dtype))


def _random(
    shapes: Mapping[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype, seed: int
) -> dict[str, torch.Tensor]:
    """Return random numbers like `dummy_weights`: around 1 for the weights of norms."""
    made: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        scale = len(shape) == 1 and name.endswith("weight")
        numbers = random_numbers(shape, name, seed, device) + int(scale)
        made[name] = numbers.to(dtype)
    return made


def _joined(level: Any) -> torch.Tensor:
    """Return rows [n, hidden] of one image, which may come in parts."""
    parts = [level] if isinstance(level, torch.Tensor) else list(level)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
