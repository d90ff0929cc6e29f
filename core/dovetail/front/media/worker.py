"""The process in which images are decoded and prepared: `processes` starts it, and asks it through
standard input and output, a line of JSON each. Files and tensors are in files beside them.

An image's file is untrusted, and so are the settings of a checkpoint's image processor. A process
bounds what either takes of memory and time, and doesn't take the engine with it. It runs without
torch, which transformers' image processors for Pillow don't need, so that it starts soon and is
small.
"""

from __future__ import annotations

import io
import json
import os
import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])  # the parent's
    sys.modules["torch"] = sys.modules["torchvision"] = None  # type: ignore[assignment]
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from dovetail.front.media.pixels import rgb
from dovetail.front.worker_processes import OUT_OF_MEMORY, bound_process, own_memory

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
MAX_RATIO = 200  # of an image's longer side to the shorter: some processors scale by the shorter
# Calls that read of a file. Pillow reads each chunk or marker by a few, and an image in the usual
# chunks of 8 KiB needs some 10,000 for 20 MiB; ten millions of tiny ones would take ten seconds.
MOST_READS = 100_000
_LONGEST_REASON = 300  # characters
_BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a")


class RefusedError(Exception):
    """Why an image isn't prepared, as a clause that follows the image's name."""


Size = tuple[int, int]  # width and height in pixels


class _File(io.BytesIO):
    """A file that may be read `MOST_READS` times, which bounds a decoder's work in any format."""

    _reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads += 1
        if self._reads > MOST_READS:
            raise RefusedError("its file has too many parts")
        return super().read(size)


def decoded(
    data: bytes, max_pixels: int, check: Callable[[Size], None] = lambda size: None
) -> Image.Image:
    """Return the image of a file, as RGB; of several the first. `check` may raise `RefusedError`
    for its size before anything is decoded. Raises `RefusedError`."""
    if not data.startswith(_BEGINNINGS) and not (data[:4] == b"RIFF" and data[8:12] == b"WEBP"):
        raise RefusedError(f"it must be one of {', '.join(FORMATS)}, by its content")
    Image.MAX_IMAGE_PIXELS = max_pixels
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(_File(data), formats=FORMATS)
            size = image.size
            check_size(size, max_pixels)
            check(size)
            image.load()
            if image.size != size:
                raise RefusedError("its size isn't that of its header")
            return rgb(image)
    except (RefusedError, MemoryError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise RefusedError(_too_many(max_pixels)) from None
    except UnidentifiedImageError:
        raise RefusedError("its file is damaged: it has no header that can be read") from None
    except Exception as error:  # decoders raise whatever they meet
        reason = " ".join(str(error).split())[:_LONGEST_REASON]
        raise RefusedError(f"its file is damaged: {reason}") from None


def check_size(size: Size, max_pixels: int) -> None:
    """Raise `RefusedError` for an image that is too large, too small or too long."""
    width, height = size
    if width < 1 or height < 1:
        raise RefusedError(f"it has no pixels: {width} x {height}")
    if width * height > max_pixels:
        raise RefusedError(f"{_too_many(max_pixels)}, got {width:,} x {height:,}")
    if max(size) > MAX_RATIO * min(size):
        raise RefusedError(
            f"its longer side must be at most {MAX_RATIO} times the other, got "
            f"{width:,} x {height:,}"
        )


def _too_many(max_pixels: int) -> str:
    return f"it must have at most {max_pixels:,} pixels (limits.max_image_pixels)"


@cache
def _processor(model_dir: str) -> Any:
    return AutoImageProcessor.from_pretrained(
        model_dir, backend="pil", local_files_only=True, trust_remote_code=False
    )


@cache
def _own_bytes() -> int:
    """Return the address space of this process before its first image."""
    return own_memory().address_bytes


def check_patches(
    size: Size, *, processor: Any, arguments: dict[str, Any], most: int | None
) -> None:
    """Raise `RefusedError` if an image of this size becomes more than `most` patches, where the
    processor tells."""
    count = getattr(processor, "get_number_of_image_patches", None)
    if most is None or count is None:
        return
    patches = count(size[1], size[0], dict(arguments))
    if isinstance(patches, int | np.integer) and patches > most:
        raise RefusedError(
            f"it becomes {patches:,} patches, of which at most {most:,} fit (media.cache_rows, "
            f"and max_model_len)"
        )


def prepared(
    processor: Any,
    image: Image.Image,
    arguments: dict[str, Any],
    *,
    as_bytes: bool = False,
    beside_others: bool = False,
) -> dict[str, np.ndarray[Any, Any]]:
    """Return what the checkpoint's processor makes of an image.

    `as_bytes`: pixels aren't rescaled and normalized, but bytes, a quarter of the size; what these
    become is in "pixel_table" [3, 256], for each channel. `beside_others`: as one of several of a
    prompt, where the processor makes a difference. Raises `RefusedError`.
    """
    as_bytes = as_bytes and processor.do_rescale and processor.do_normalize
    plain = {"do_rescale": False, "do_normalize": False} if as_bytes else {}
    try:
        images = [[image, Image.new("RGB", (2, 2))]] if beside_others else image
        outputs = processor(images, return_tensors="np", **arguments, **plain)
        tensors = {name: np.asarray(value) for name, value in outputs.items()}
        if beside_others:
            tensors = {name: value[:1] for name, value in tensors.items()}
        if as_bytes:
            tensors["pixel_values"] = tensors["pixel_values"].astype(np.uint8)
            tensors["pixel_table"] = _table(processor)
    except MemoryError:
        raise
    except Exception as error:  # such as sides that a processor refuses
        reason = " ".join(str(error).split())[:_LONGEST_REASON]
        raise RefusedError(f"the model's image processor refuses it: {reason}") from None
    return {
        name: value.astype(np.bool_) if name.endswith("_mask") else value
        for name, value in tensors.items()
    }


def _table(processor: Any) -> np.ndarray[Any, Any]:
    """Return what each byte of a channel becomes, [3, 256] float32."""
    ramp = np.tile(np.arange(256, dtype=np.uint8).reshape(1, 16, 16), (3, 1, 1))
    scaled = processor.rescale(ramp, processor.rescale_factor)
    normalized = processor.normalize(scaled, processor.image_mean, processor.image_std)
    return np.asarray(normalized, np.float32).reshape(3, 256)


def answer_of(request: dict[str, Any]) -> dict[str, Any]:
    """Prepare an image, and write its tensors to a file. Return what they are, or why there are
    none."""
    try:
        processor = _processor(request["model_dir"])
    except MemoryError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:_LONGEST_REASON]
        return {"unusable": f"{type(error).__name__}: {reason}"}
    try:
        with open(request["file"], "rb") as file:
            data = file.read()
        arguments = request["arguments"]
        check = partial(
            check_patches,
            processor=processor,
            arguments=arguments,
            most=request["max_patches"],
        )
        if request["size"] is None:
            image = decoded(data, request["max_pixels"], check)
        else:
            check_size(request["size"], request["max_pixels"])
            check(request["size"])
            image = Image.frombytes("RGB", tuple(request["size"]), data)
        del data
        beside_others = request["beside_others"]
        outputs = prepared(
            processor,
            image,
            arguments,
            as_bytes=request["as_bytes"],
            beside_others=beside_others,
        )
    except RefusedError as refused:
        return {"refused": str(refused)}
    return {
        "digest": _digest(image, processor, [arguments, beside_others]),
        "size": image.size,
        "tensors": _write(outputs, Path(request["target"])),
    }


def _digest(image: Image.Image, processor: Any, settings: list[Any]) -> str:
    """Hash the pixels, the size, and the settings with which they are prepared."""
    import hashlib

    settings = [processor.to_dict(), *settings, image.size]
    state = hashlib.sha256(json.dumps(settings, sort_keys=True, default=repr).encode())
    state.update(image.tobytes())
    return state.hexdigest()


def _write(outputs: dict[str, np.ndarray[Any, Any]], target: Path) -> list[list[Any]]:
    """Write tensors to a file, one after the other; return name, type and shape of each."""
    described: list[list[Any]] = []
    with open(target, "wb") as file:
        for name, value in outputs.items():
            file.write(np.ascontiguousarray(value).data)
            described.append([name, value.dtype.str, list(value.shape)])
    return described


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the parent has ended, or the memory ran out: what is left of a process then is
    not to be trusted. `null` only asks whether this process is there."""
    for line in requests:
        request = json.loads(line)
        if request is not None:
            bound_process(_own_bytes() + request["memory_bytes"], request["cpu_s"])
        try:
            answer = json.dumps([] if request is None else answer_of(request)).encode()
        except MemoryError:
            answers.write(OUT_OF_MEMORY)
            return
        answers.write(answer + b"\n")
        answers.flush()


if __name__ == "__main__":
    sys.stdout, output = sys.stderr, sys.stdout  # a library that prints doesn't answer
    _serve(sys.stdin.buffer, output.buffer)
