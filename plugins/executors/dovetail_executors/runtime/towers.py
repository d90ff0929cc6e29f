"""Towers: the image encoders of checkpoints.

A tower is transformers' own code, the whole model of the checkpoint without its language model, so
that the rows of an image are those that transformers computes: vision model, projector, the order
of tiles and the rows at the ends of lines. Every rank has the whole tower.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from dovetail.api.json_files import read_json_object
from dovetail.api.media_types import MediaType, media_type_of
from dovetail.errors import DovetailError, ModelLoadError
from dovetail.nn.model_files import first_lines, read_config
from dovetail.nn.weights import (
    COMPUTED,
    PLAIN,
    check_differences,
    other_parts,
    random_numbers,
    some_of,
    tensors_named,
)
from dovetail.request.media import MediaItem

log = logging.getLogger("dovetail")

# modules of a whole model that encode no images
_OTHER_MODULES = ("language_model", "text_model", "audio_tower", "embed_audio")
# tensors of a checkpoint that belong to neither the language model nor the tower
_OTHER_TENSORS = re.compile(r"(model\.)?(audio\w*|embed_audio|mtp)(\.|$)")
# parts of names that only some releases of transformers, and some checkpoints, have
_PREFIX = re.compile(r"^(model\.)?(vision_tower\.vision_model(?=\.))?")
# arguments that the code of towers reads on the host: on a device, each would wait for it
_ON_HOST = ("batch_num_images", "image_grid_thw", "image_sizes")


@dataclass(frozen=True)
class TowerPlan:
    """What is known of a tower before its weights are read."""

    directory: Path
    media_type: MediaType
    levels: int  # rows for each placeholder: see `MediaType.levels`
    hidden_size: int  # of a row
    dummy: bool  # its weights will be random, and the directory may hold none

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the size of its weights in `dtype`. Raises `ModelLoadError` if transformers can't
        build it."""
        tensors = self._empty(dtype).state_dict().values()
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def build(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tower:
        """Load the weights from the checkpoint, in `dtype`; random ones of `seed`, the same on all
        ranks, if they are `dummy`.

        Raises `ModelLoadError` naming the file and the tensors: missing, unknown, or of another
        shape than the config says.
        """
        model = self._empty(dtype)
        wanted = model.state_dict()
        if self.dummy:
            tensors = _random(wanted, device, dtype, seed)
        else:
            tensors = self._stored(wanted, device, dtype)
        model.load_state_dict(tensors, assign=True)
        model.requires_grad_(False)
        return Tower(self, model.to(device), dtype, device)

    def _empty(self, dtype: torch.dtype) -> nn.Module:
        """Return the model with parameters on the meta device."""
        config = read_config(self.directory)
        try:
            return _empty_model(config, dtype)
        except Exception as error:  # transformers raises any exception
            raise ModelLoadError(
                f"{self.directory / 'config.json'}: transformers can't build the vision model: "
                f"{first_lines(error)}"
            ) from error

    def _stored(
        self, wanted: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Return the tensors that the model wants, by its names for them."""
        found = _sources(wanted, _vision_tensors(self.directory), self.directory)
        tensors: dict[str, torch.Tensor] = {}
        for source, tensor in tensors_named(self.directory, found.__contains__):
            name = found[source]
            if tensor.shape != wanted[name].shape:
                raise ModelLoadError(
                    f"{self.directory}: tensor {source}: expected shape "
                    f"{list(wanted[name].shape)}, found {list(tensor.shape)}"
                )
            tensors[name] = tensor.to(device, dtype)
        return tensors


class Tower:
    """An encoder of images, loaded."""

    def __init__(
        self, plan: TowerPlan, model: Any, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.plan = plan
        self._model = model
        self._dtype = dtype
        self._device = device

    @torch.inference_mode()
    def encode(self, item: MediaItem) -> torch.Tensor:
        """Return rows [levels, item.rows, hidden_size] in the model's dtype.

        One item a call: in a batch with others, the last bits of some types' rows would depend on
        these. Raises `DovetailError` if its tensors don't fit, or give another number of rows.
        """
        tensors = {name: self._placed(name, array) for name, array in item.tensors.items()}
        try:
            found = self._model.get_image_features(**tensors, return_dict=True)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise DovetailError(f"this image can't be encoded: {first_lines(error)}") from error
        levels = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        rows = [_joined(level) for level in levels]
        plan = self.plan
        expected = (item.rows, plan.hidden_size)
        if len(rows) != plan.levels or any(level.shape != expected for level in rows):
            raise DovetailError(
                f"the encoder made {[list(level.shape) for level in rows]} of an image, which has "
                f"{plan.levels} levels of {item.rows} rows of {plan.hidden_size} numbers"
            )
        return torch.stack(rows)

    def _placed(self, name: str, array: Any) -> torch.Tensor:
        """Return a tensor of an item on the device, numbers in the model's dtype."""
        tensor = torch.as_tensor(array)
        if name in _ON_HOST:
            return tensor
        dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(self._device, dtype)


def find_tower(model_dir: str | Path, *, dummy: bool = False) -> TowerPlan | None:
    """Return the tower of a checkpoint, or None if images of it can't be served: it has no vision
    model, its type is refused, it has no weights of it, or quantized ones. Logs which.

    `dummy`: weights will be random. Raises `ModelLoadError` if its files are malformed.
    """
    directory = Path(model_dir)
    config = read_json_object(directory / "config.json")
    media_type = media_type_of(config)
    if media_type is None:
        return None
    refused = media_type.refused or ("" if dummy else _unusable(directory))
    if refused:
        name = media_type.model_type
        log.warning("%s: images aren't served, only text: %s: %s", directory, name, refused)
        return None
    text = read_config(directory).get_text_config(decoder=True)
    levels = media_type.levels(config)
    return TowerPlan(directory, media_type, levels, int(text.hidden_size), dummy)


def _unusable(directory: Path) -> str:
    """Return why the weights of a checkpoint's tower can't be served, as a clause, or ""."""
    tensors = _vision_tensors(directory)
    if not tensors:
        return "the checkpoint has no weights of the vision model that its config names"
    quantized = [name for name, dtype in tensors.items() if dtype not in PLAIN]
    if quantized:
        return f"weights of its vision model are quantized ({some_of(quantized, 3)})"
    return ""


def _vision_tensors(directory: Path) -> dict[str, str]:
    """Return names of a checkpoint's tensors that the tower may have -> their dtypes."""
    return {
        name: dtype
        for name, dtype in other_parts(directory).items()
        if not _OTHER_TENSORS.match(name) and not name.endswith(COMPUTED)
    }


def _sources(wanted: Collection[str], stored: Iterable[str], directory: Path) -> dict[str, str]:
    """Return the checkpoint's names -> the model's. Raises `ModelLoadError` if the two differ."""
    names = {_PREFIX.sub(_without, name): name for name in wanted}
    found: dict[str, str] = {}
    unknown: list[str] = []
    for source in stored:
        name = names.pop(_PREFIX.sub(_without, source), None)
        if name is None:
            unknown.append(source)
        else:
            found[source] = name
    try:
        check_differences(directory, sorted(names.values()), unknown)
    except ModelLoadError as error:
        raise ModelLoadError(
            f"{error}, for its images; with media: {{images: false}} its text is served"
        ) from None
    return found


def _without(prefix: re.Match[str]) -> str:
    return "vision_tower" if prefix[2] else ""


def _empty_model(config: Any, dtype: torch.dtype) -> nn.Module:
    """Return transformers' whole model without its language model: parameters on the meta device,
    buffers as transformers computes them."""
    from transformers import AutoModel

    def without_memory(
        _: nn.Module, __: str, parameter: nn.Parameter | None
    ) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=False)

    handle = register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type] # torch's annotation lacks the result
    try:
        model: nn.Module = AutoModel.from_config(config, dtype=dtype)
    finally:
        handle.remove()
    for name in _OTHER_MODULES:
        if getattr(model, name, None) is not None:
            setattr(model, name, None)
    return model.eval()


def _random(
    wanted: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype, seed: int
) -> dict[str, torch.Tensor]:
    """Return random numbers like `dummy_weights`: around 1 for the weights of norms."""
    made: dict[str, torch.Tensor] = {}
    for name, tensor in wanted.items():
        numbers = random_numbers(tensor.shape, name, seed, device)
        scale = tensor.ndim == 1 and name.endswith("weight")
        made[name] = (numbers + int(scale)).to(dtype)
    return made


def _joined(level: Any) -> torch.Tensor:
    """Return rows [n, hidden] of one image, which may come in parts."""
    parts = [level] if isinstance(level, torch.Tensor) else list(level)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
