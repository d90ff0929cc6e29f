"""Types of models that read images: what differs between them, by the `model_type` of the config
of the whole model. The front and the executors read this table; nothing else knows a type's name.

A checkpoint's config is given as parsed JSON. This module needs neither torch nor transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dovetail.errors import ModelLoadError, shown

# the id's key in config.json; transformers knows both names of it
_PLACEHOLDER = ("image_token_id", "image_token_index")
_NEEDS_TORCHVISION = "transformers' processor for it needs torchvision"
# names of tensors of vision and audio models and of what joins them to the text model
OTHER_PARTS = re.compile(
    r"(model\.)?(visual|vision\w*|audio\w*|embed_vision|embed_audio"
    r"|multi_modal_projector|mm_projector|connector|qformer|query_tokens|language_projection"
    r"|image_newline)(\.|$)"
)
_MOST = 2**31 - 1  # token ids are int32
_TEXT_ISNT_SERVED = "its language model isn't served"


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaType:
    """A type of model that reads images.

    Later versions may add fields with defaults.
    """

    model_type: str
    axes: bool = False  # an image's positions are on three axes: time, height, width
    # the vision model gives rows for deeper layers, too: "deepstack_visual_indexes" of its config
    deepstack: bool = False
    # Layers in which the tokens of an image attend to each other in both directions: none, all, or
    # those with a window, if the config says so.
    both_ways: Literal["none", "all", "window"] = "none"
    # The tokens of an image among those of a prompt, by the names of `dovetail.front.media.layouts`.
    layout: str = ""
    least_rows: int = 1  # an image with fewer is too small for the vision model
    in_prompt: tuple[str, ...] = ()  # keys of the id that stands for an image that isn't expanded
    written: str = ""  # how chat templates write an image; empty: as the text of that id
    refused: str = ""  # why its images aren't served, as a clause; empty: they are

    def placeholder(self, config: Mapping[str, Any]) -> int:
        """Return the token id that stands for one row of an image. Raises `ModelLoadError` if the
        config lacks it."""
        found = [config[key] for key in _PLACEHOLDER if config.get(key) is not None]
        if not found:
            raise ModelLoadError(f"config.json: no {_PLACEHOLDER[0]}, which images' tokens have")
        return _number(_PLACEHOLDER[0], found[0])

    def unexpanded(self, config: Mapping[str, Any]) -> int:
        """Return the token id that stands for an image in a prompt that isn't expanded: that of
        `placeholder`, but for a few types. Raises `ModelLoadError` if the config lacks it."""
        found = [config[key] for key in self.in_prompt if config.get(key) is not None]
        return _number(self.in_prompt[0], found[0]) if found else self.placeholder(config)

    def levels(self, config: Mapping[str, Any]) -> int:
        """Return the number of rows for each placeholder: one that replaces its embedding, and one
        for each deeper layer that has rows of its own. Raises `ModelLoadError` if the config is
        malformed."""
        if not self.deepstack:
            return 1
        key = "deepstack_visual_indexes"
        layers = _vision(config).get(key)
        if not isinstance(layers, list):
            raise ModelLoadError(f"config.json: vision_config.{key}: expected a list of layers")
        return 1 + len(layers)

    def merged(self, config: Mapping[str, Any]) -> int:
        """Return how many patches, along height and width, make one row, for the layout "grid".
        Raises `ModelLoadError` if the config is malformed."""
        key = "spatial_merge_size"
        return max(1, _number(f"vision_config.{key}", _vision(config).get(key, 2)))

    def whole(self, config: Mapping[str, Any]) -> bool:
        """Return True if the tokens of an image attend to each other in both directions in any
        layer."""
        if self.both_ways != "window":
            return self.both_ways == "all"
        text = config.get("text_config")
        return isinstance(text, Mapping) and text.get("use_bidirectional_attention") == "vision"


def media_type_of(config: Mapping[str, Any]) -> MediaType | None:
    """Return the type of a model that reads images, or None for another. Its images may be
    refused."""
    if not isinstance(config.get("vision_config"), Mapping):
        return None
    name = config.get("model_type")
    if not isinstance(name, str):
        return None
    return MEDIA_TYPES.get(name) or MediaType(model_type=name, refused="this type isn't supported")


def _vision(config: Mapping[str, Any]) -> Mapping[str, Any]:
    vision = config.get("vision_config")
    return vision if isinstance(vision, Mapping) else {}


def _number(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        raise ModelLoadError(f"config.json: {key}: expected a number from 0, got {shown(value)}")
    return value


_GEMMA3_IMAGE = ("boi_token_index", "boi_token_id")
_TYPES = (
    MediaType(model_type="aya_vision", layout="named_crops", written="<image>"),
    MediaType(model_type="exaone4_5", layout="grid"),
    MediaType(model_type="idefics3", layout="split"),
    MediaType(model_type="internvl", layout="crops"),
    MediaType(model_type="lighton_ocr", layout="block"),
    MediaType(model_type="llava", layout="llava"),
    MediaType(model_type="llava_next", layout="tiles"),
    MediaType(model_type="llava_onevision", layout="scaled_tiles"),
    MediaType(model_type="mistral3", layout="lines", least_rows=2),
    MediaType(model_type="smolvlm", layout="split"),
    *(
        MediaType(model_type=name, axes=True, layout="grid")
        for name in (
            "glm46v",
            "glm4v",
            "glm4v_moe",
            "glm_ocr",
            "qwen2_5_vl",
            "qwen2_vl",
            "qwen3_5",
            "qwen3_5_moe",
        )
    ),
    MediaType(model_type="qwen3_vl", axes=True, deepstack=True, layout="grid"),
    MediaType(model_type="qwen3_vl_moe", axes=True, deepstack=True, layout="grid"),
    MediaType(model_type="gemma3", both_ways="all", layout="fixed", in_prompt=_GEMMA3_IMAGE),
    MediaType(model_type="gemma4", both_ways="window", layout="counted"),
    MediaType(model_type="cohere2_vision", refused=_NEEDS_TORCHVISION),
    MediaType(model_type="kimi_k25", refused=_NEEDS_TORCHVISION),
    MediaType(model_type="lfm2_vl", refused=_TEXT_ISNT_SERVED),
    MediaType(model_type="llama4", refused=_TEXT_ISNT_SERVED),
    MediaType(model_type="mllama", refused="its language model reads images by cross-attention"),
    MediaType(model_type="paligemma", refused="it attends to the whole prompt in both directions"),
    *(
        MediaType(model_type=name, refused="a vision model of this design isn't supported")
        for name in ("minicpm_ocr", "minicpmv", "minicpmv4_6", "minicpmv4_7")
    ),
)
MEDIA_TYPES: Mapping[str, MediaType] = {each.model_type: each for each in _TYPES}
