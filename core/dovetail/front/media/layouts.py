"""`Layout`: the tokens of an image, by the type of the model.

An image has a row for each of its placeholders, in runs that some types divide by ordinary tokens,
such as one at the end of a line. How many rows it has follows from what the checkpoint's image
processor returns, and from the checkpoint's configs.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.api.json_files import read_json_object
from dovetail.api.media_types import MediaType, media_type_of
from dovetail.errors import ConfigError, ModelLoadError, RequestError, UnsupportedError, shown
from dovetail.front.media.processes import PreparedImage

Piece = str | int  # text between placeholders, or a number of placeholders
_ONLY_COUNTED = (  # outputs of image processors that no vision model takes
    "cols",
    "num_crops",
    "num_patches",
    "num_soft_tokens_per_image",
    "rows",
)


# of Qwen2-VL's image processor, where a checkpoint says none
_PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}


class Layout(ABC):
    """The tokens of an image of one checkpoint."""

    arguments: Mapping[str, Any] = {}
    options: tuple[str, ...] = ()  # further ones, which change nothing but the number of rows
    # the pieces begin and end with newlines, which are tokenized with those around the image
    joins_newlines = False
    # pixels travel as bytes: nothing is filled up after they are normalized
    as_bytes = False
    # an image beside others of its prompt is prepared in another way than a single one
    knows_others = False

    def __init__(self, files: _Files, media_type: MediaType) -> None:
        self.files = files
        self.media_type = media_type

    def with_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the image processor's call. Raises `RequestError` for options
        that this type hasn't."""
        if wrong := self.wrong_option(options):
            raise RequestError(f"mm_processor_kwargs: {wrong}")
        return {**self.arguments, **options}

    @classmethod
    def wrong_option(cls, options: Mapping[str, Any]) -> str:
        """Return what is wrong with options, or an empty text."""
        for name in options:
            if name not in cls.options:
                allowed = ", ".join(cls.options) or "none"
                return f"{shown(name)}: the options of this model are {allowed}"
        try:
            json.dumps(options)
        except (TypeError, ValueError, RecursionError):
            return "values must be plain"
        return ""

    @abstractmethod
    def pieces(self, image: PreparedImage) -> Sequence[Piece]:
        """Return what takes the place of the image's one placeholder in a prompt."""

    def grid(self, image: PreparedImage) -> tuple[int, int, int] | None:
        """Return (time, height, width) in rows, of types with positions on three axes."""
        return None

    def max_patches(self, rows: int) -> int | None:
        """Return the number of patches, as image processors count them, that become `rows` rows."""
        return None

    @staticmethod
    def tensors(image: PreparedImage) -> dict[str, Any]:
        """Return what the vision model takes."""
        return {name: value for name, value in image.outputs.items() if name not in _ONLY_COUNTED}


class _Files:
    """The configs of a checkpoint that say how many rows an image has."""

    def __init__(
        self, directory: Path, config: Mapping[str, Any], spelled: Callable[[int], str]
    ) -> None:
        self.config = config
        self._spelled = spelled
        vision = config.get("vision_config")
        self.vision: Mapping[str, Any] = vision if isinstance(vision, Mapping) else {}
        self.processor = read_json_object(directory / "processor_config.json", missing_ok=True)
        own = self.processor.get("image_processor")
        self.image_processor: Mapping[str, Any] = (
            own
            if isinstance(own, Mapping)
            else read_json_object(directory / "preprocessor_config.json", missing_ok=True)
        )

    def number(self, key: str, *places: Mapping[str, Any], default: int | None = None) -> int:
        """Return the number of a key in the first of these mappings that has it. Raises
        `ModelLoadError`."""
        found = [one[key] for one in places if one.get(key) is not None] or [default]
        value = found[0]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise ModelLoadError(f"{key} of the checkpoint's configs is {shown(value)}, no number")
        return value

    def mark(self, name: str) -> str:
        """Return the text of a token that the config names, such as "boi". Raises
        `ModelLoadError`."""
        keys = f"{name}_token_index", f"{name}_token_id"
        found = [self.config[key] for key in keys if self.config.get(key) is not None]
        return self._spelled(self.number(keys[1], {keys[1]: found[0] if found else None}))


class _Grid(Layout):
    """Patches that are merged to rows, as Qwen2-VL and those after it have them."""

    as_bytes = True
    options = ("size", "min_pixels", "max_pixels")

    def with_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """As that of all types. `min_pixels` and `max_pixels` become `size`, which newer releases
        of transformers know alone."""
        arguments = super().with_options(options)
        settings = self.files.image_processor
        size = {**_PIXELS, **(settings.get("size") or {})}
        for given in (settings, arguments.pop("size", None) or {}, options):
            for name, side in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
                size[side] = given.get(name) or given.get(side) or size[side]
                arguments.pop(name, None)
        return {**arguments, "size": size} if options else arguments

    def grid(self, image: PreparedImage) -> tuple[int, int, int] | None:
        return self._sides(image) if self.media_type.axes else None

    def pieces(self, image: PreparedImage) -> Sequence[Piece]:
        return (math.prod(self._sides(image)),)

    def _sides(self, image: PreparedImage) -> tuple[int, int, int]:
        time, height, width = image.outputs["image_grid_thw"][0].tolist()
        return time, height // self._merged, width // self._merged

    def max_patches(self, rows: int) -> int:
        return rows * self._merged**2

    @property
    def _merged(self) -> int:
        return self.media_type.merged(self.files.config)


class _Llava(Layout):
    """One picture of fixed size, as LLaVA 1.5 has it."""

    as_bytes = True

    def pieces(self, image: PreparedImage) -> Sequence[Piece]:
        height, width = image.outputs["pixel_values"].shape[-2:]
        patch = self._patch
        return ((height // patch) * (width // patch) + self._others,)

    @property
    def _patch(self) -> int:
        files = self.files
        return max(1, files.number("patch_size", files.processor, files.vision))

    @property
    def _others(self) -> int:
        """The number of rows of a picture besides those of its patches: a class token, unless it
        is left out."""
        files = self.files
        key = "vision_feature_select_strategy"
        strategy = files.processor.get(key) or files.config.get(key) or "default"
        has_class = strategy == "default" or "clip" in str(files.vision.get("model_type"))
        others = files.number(
            "num_additional_image_tokens", files.processor, default=int(has_class)
        )
        return others - (strategy == "default")


class _Tiles(_Llava):
    """One small picture, and tiles of a large one without its padding, whose lines end with a row
    of their own, as LLaVA-NeXT has it."""

    def pieces(self, image: PreparedImage) -> Sequence[Piece]:
        height, width = image.outputs["pixel_values"].shape[-2:]
        lines, columns = height // self._patch, width // self._patch
        base = lines * columns + self._others
        return (base + self._of_tiles(image, lines, columns),)

    def _of_tiles(self, image: PreparedImage, lines: int, columns: int) -> int:
        """Return the number of rows of all tiles, which have so many lines and columns each."""
        size = image.outputs["image_sizes"][0].tolist()
        tile = image.outputs["pixel_values"].shape[-2:]
        best = _best_canvas(size, self._canvases())
        kept = _unpadded(size, lines * (best[0] // tile[0]), columns * (best[1] // tile[1]))
        return self._rows(kept, lines)

    def _rows(self, kept: tuple[int, int], lines: int) -> int:
        return kept[0] * kept[1] + kept[0]

    def _canvases(self) -> list[list[int]]:
        found = [
            one["image_grid_pinpoints"]
            for one in (self.files.image_processor, self.files.config)
            if one.get("image_grid_pinpoints")
        ]
        if not found:
            raise ModelLoadError("the checkpoint's configs have no image_grid_pinpoints")
        canvases: list[list[int]] = found[0]
        return canvases


class _ScaledTiles(_Tiles):
    """As LLaVA-OneVision has it: a picture of many tiles is scaled down to fewer rows, and only the
    one of a prompt has tiles."""

    knows_others = True

    def pieces(self, image: PreparedImage) -> Sequence[Piece]:
        files = self.files
        size = files.number("image_size", files.vision, default=384)
        default = (size // self._patch) ** 2
        base = files.number("num_image_tokens", files.processor, default=default)
        if image.outputs["batch_num_images"][0] > 1:
            return (base + 1,)  # the end of a line
        lines = math.isqrt(base)
        return (base + self._of_tiles(image, lines, lines),)

    def _rows(self, kept: tuple[int, int], lines: int) -> int:
        named = self.files.processor.get("vision_aspect_ratio")
        named = named or self.files.config.get("vision_aspect_ratio") or "anyres_max_9"
        most = int("".join(filter(str.isdigit, named)) or 9)
        ratio = math.sqrt(kept[0] * kept[1] / (most * lines**2))
        if ratio > 1.1:
            kept = int(kept[0] // ratio), int(kept[1] // ratio)
        return kept[0] * kept[1] + kept[0]


class _Lines(Layout):
    """Lines of rows, each of which ends with a token, as Mistral's models have them."""

    as_bytes = True
    options = ("size",)

    def __init__(self, files: _Files, media_type: MediaType) -> None:
        super().__init__(files, media_type)
        patch = files.number("patch_size", files.processor, files.vision, default=16)
        merged = files.number("spatial_merge_size", files.processor, files.config, default=1)
        self.patch = max(1, patch * merged)
        self.arguments = {"patch_size": self.patch}
        self.line_end = files.processor.get("image_break_token") or "[IMG_BREAK]"
        self.end = files.processor.get("image_end_token") or "[IMG_END]"

    def pieces(self, image: PreparedImage) -> Sequence[Piece]:
        lines, columns = self.sides(image)
        return [*([columns, self.line_end] * (lines - 1)), columns, self.end]

    def sides(self, image: PreparedImage) -> tuple[int, int]:
        height, width = image.outputs["image_sizes"][0].tolist()
        most = self.files.number("image_size", self.files.vision, default=max(height, width))
        if max(height, width) > most:  # the encoder has no positions beyond
            raise RequestError(
                f"the model's encoder reads images of at most {most} pixels on a side: lower the "
                f"image processor's size"
            )
        return height // self.patch, width // self.patch


class _Block(_Lines):
    """Lines of rows without tokens between them, as LightOnOCR has them."""

    def __init__(self, files: _Files, media_type: MediaType) -> None:
        super().__init__(files, media_type)
        self.arguments = {}

    def pieces(self, image: PreparedImage) -> Sequence[Piece]:
        return (math.prod(self.sides(image)),)


class _Crops(Layout):
    """Crops of one size, as InternVL has them."""

    as_bytes = True
    arguments: Mapping[str, Any] = {"crop_to_patches": True}
    options = ("crop_to_patches", "min_patches", "max_patches")

    def pieces(self, image: PreparedImage) -> Sequence[Piece]:
        return "<img>", self._each * self._count(image), "</img>"

    @staticmethod
    def _count(image: PreparedImage) -> int:
        return int(image.outputs["num_patches"][0])

    def max_patches(self, rows: int) -> int:
        return rows // max(1, self._each)

    @property
    def _each(self) -> int:
        files = self.files
        return files.number("image_seq_length", files.processor, files.config, default=256)


class _NamedCrops(_Crops):
    """Crops of one size that say their number, the whole picture last, as Aya Vision has them."""

    def pieces(self, image: PreparedImage) -> Sequence[Piece]:
        crops = range(1, self._count(image))
        pieces: list[Piece] = [self._mark("start_of_img_token", "<|START_OF_IMG|>")]
        for number in crops:
            pieces += [f"{self._mark('tile_token', 'TILE')}_{number}", self._each]
        pieces += [self._mark("tile_global_token", "TILE_GLOBAL"), self._each]
        return [*pieces, self._mark("end_of_img_token", "<|END_OF_IMG|>")]

    def _mark(self, key: str, default: str) -> str:
        return str(self.files.processor.get(key) or default)

    @property
    def _each(self) -> int:
        files = self.files
        size = files.number("img_size", files.processor, default=364)
        patch = files.number("patch_size", files.processor, default=28)
        patch *= files.number("downsample_factor", files.processor, default=1)
        return (size // max(1, patch)) ** 2


class _Split(Layout):
    """Crops that say their row and column, and the whole picture, as Idefics 3 has them."""

    arguments: Mapping[str, Any] = {"return_row_col_info": True}
    options = ("do_image_splitting",)
    edge = "<fake_token_around_image>"

    def pieces(self, image: PreparedImage) -> Sequence[Piece]:
        files = self.files
        each = files.number("image_seq_len", files.processor, default=169)
        rows = int(image.outputs["rows"].flat[0])
        columns = int(image.outputs["cols"].flat[0])
        pieces: list[Piece] = []
        for row in range(rows):
            for column in range(columns):
                pieces += [f"{self.edge}<row_{row + 1}_col_{column + 1}>", each]
            pieces += ["\n"]
        before = "\n" if rows or columns else ""
        return [*pieces, f"{before}{self.edge}<global-img>", each, self.edge]


class _Fixed(Layout):
    """As many rows for each picture, as Gemma 3 has them. Its crops ("pan and scan") would each be
    an image of the encoder: they aren't made."""

    arguments: Mapping[str, Any] = {"do_pan_and_scan": False}
    joins_newlines = True

    def pieces(self, image: PreparedImage) -> Sequence[Piece]:
        files = self.files
        default = files.number("mm_tokens_per_image", files.config, default=256)
        rows = files.number("image_seq_length", files.processor, default=default)
        return f"\n\n{self.files.mark('boi')}", rows, f"{self.files.mark('eoi')}\n\n"


class _Counted(Layout):
    """As many rows as the image processor says, as Gemma 4 has them."""

    options = ("max_soft_tokens",)

    def pieces(self, image: PreparedImage) -> Sequence[Piece]:
        rows = int(image.outputs["num_soft_tokens_per_image"][0])
        return self.files.mark("boi"), rows, self.files.mark("eoi")


_LAYOUTS: Mapping[str, type[Layout]] = {
    "block": _Block,
    "counted": _Counted,
    "crops": _Crops,
    "fixed": _Fixed,
    "grid": _Grid,
    "lines": _Lines,
    "named_crops": _NamedCrops,
    "llava": _Llava,
    "scaled_tiles": _ScaledTiles,
    "split": _Split,
    "tiles": _Tiles,
}


def layout_of(model_dir: Path, config: Mapping[str, Any], spelled: Callable[[int], str]) -> Layout:
    """Return the layout of a checkpoint's images. `config`: its config.json. `spelled`: the text of
    a token.

    Raises `ModelLoadError`, and `UnsupportedError` for a type whose images aren't served.
    """
    media_type, layout = _chosen(config)
    return layout(_Files(model_dir, config, spelled), media_type)


def check_options(options: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for options of the engine's config that the image processor hasn't.
    `config`: the checkpoint's. Raises as `layout_of`."""
    _, layout = _chosen(config)
    if wrong := layout.wrong_option(options):
        raise ConfigError(f"media.processor: {wrong}")


def _chosen(config: Mapping[str, Any]) -> tuple[MediaType, type[Layout]]:
    media_type = media_type_of(config)
    if media_type is None or media_type.refused:
        why = "it has no vision model" if media_type is None else media_type.refused
        raise UnsupportedError(f"images of this model aren't served: {why}")
    vision = config.get("vision_config")
    has_lines = isinstance(vision, Mapping) and vision.get("model_type") == "pixtral"
    is_pixtral = has_lines and media_type.layout == "llava"  # as it is first published
    return media_type, _LAYOUTS["lines" if is_pixtral else media_type.layout]


def _best_canvas(size: Sequence[int], canvases: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return the canvas (height, width) on which an image of this size keeps most of its pixels,
    and of several that which has the least of its own."""
    height, width = size

    def merit(canvas: Sequence[int]) -> tuple[int, int]:
        scale = min(canvas[1] / width, canvas[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - canvas[0] * canvas[1]

    return max(canvases, key=merit)


def _unpadded(size: Sequence[int], lines: int, columns: int) -> tuple[int, int]:
    """Return the lines and columns of a canvas that aren't padding around an image (height,
    width)."""
    height, width = size
    if width / height > columns / lines:
        scaled = int(round(height * (columns / width), 7))
        return lines - (lines - scaled) // 2 * 2, columns
    scaled = int(round(width * (lines / height), 7))
    return lines, columns - (columns - scaled) // 2 * 2
