"""`ImageProcesses`: decodes and prepares images, each in a process with limits of memory and time.

For `prompts`. `worker` is what runs there: it is started when the first image comes, which takes
a second or two. A server prepares an image before its first request.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.config.limits import Limits
from dovetail.errors import MissingExtraError, RequestError, UnsupportedError
from dovetail.front.media.facts import IMAGES_AT_ONCE
from dovetail.front.media.sources import ImageSource, SourceKind
from dovetail.front.worker_processes import WorkerEndedError, WorkerProcess, WorkerProcesses

_WORKER = Path(__file__).with_name("worker.py")
# beyond `limits.max_image_s`, until a process that waits is ended; the system ends one whose
# processor time is up
OVERTIME_S = 1.0
_TYPES = ("|b1", "|u1", "<i4", "<i8", "<f4", "<f8")  # of tensors


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image as the checkpoint's image processor returns it."""

    digest: bytes  # of its pixels, its size and the processor's settings
    size: tuple[int, int]  # width and height in pixels
    outputs: Mapping[str, NDArray[Any]]  # of the processor, for one image

    @property
    def nbytes(self) -> int:
        """Memory of its outputs, in bytes."""
        return sum(value.nbytes for value in self.outputs.values())


class _Kept:
    """LRU cache of prepared images, bounded in bytes. Conversations send the same images again with
    each message. Thread safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._left = most
        self._images: dict[bytes, PreparedImage] = {}  # the least recently used first
        self._lock = threading.Lock()

    def get(self, key: bytes) -> PreparedImage | None:
        with self._lock:
            image = self._images.pop(key, None)
            if image is not None:
                self._images[key] = image
            return image

    def put(self, key: bytes, image: PreparedImage) -> None:
        with self._lock:
            if key in self._images or image.nbytes > self._most:  # another thread was quicker
                return
            self._images[key] = image
            self._left -= image.nbytes
            while self._left < 0:
                oldest = next(iter(self._images))
                self._left += self._images.pop(oldest).nbytes

    def clear(self) -> None:
        with self._lock:
            for image in self._images.values():
                self._left += image.nbytes
            self._images.clear()


class _Given(NamedTuple):
    """An image as a worker reads it: a file, or pixels of this size."""

    data: bytes
    size: tuple[int, int] | None

    def key(self, settings: Mapping[str, Any]) -> bytes:
        """Return what the prepared image is known by: a hash of all that it is made of."""
        text = json.dumps([self.size, settings], sort_keys=True)
        return sha256(text.encode() + b"\n" + sha256(self.data).digest()).digest()


class ImageProcesses:
    """Prepares images for one checkpoint. Thread safe; each call blocks one thread."""

    def __init__(self, model_dir: str, limits: Limits, kept_bytes: int = 0) -> None:
        """`kept_bytes`: memory for prepared images that may come again."""
        self._kept = _Kept(kept_bytes)
        self._model_dir = model_dir
        self._limits = limits
        self.most = min(IMAGES_AT_ONCE, os.cpu_count() or 1)  # processes
        self._processes = WorkerProcesses(self.most, _start)

    def image(
        self,
        source: ImageSource,
        data: bytes | None,
        arguments: Mapping[str, Any],
        max_patches: int | None = None,
        *,
        as_bytes: bool = False,
        beside_others: bool = False,
    ) -> PreparedImage:
        """Return an image, prepared. `data`: its file; None for an image of Pillow. `arguments`: of
        the call of the image processor. `max_patches`: of what the processor tells before it
        begins. `as_bytes`, `beside_others`: see `worker.prepared`.

        Raises `RequestError` for what is wrong with the image, `UnsupportedError` if the
        checkpoint's image processor can't be made, `MissingExtraError` without Pillow.
        """
        check_pillow()
        limits = self._limits
        given = _pixels_of(source, limits) if data is None else _Given(data, None)
        settings = {
            "model_dir": self._model_dir,
            "arguments": dict(arguments),
            "as_bytes": as_bytes,
            "beside_others": beside_others,
            "max_patches": max_patches,
        }
        key = given.key(settings)
        image = self._kept.get(key)
        if image is None:
            image = self._prepared(given, source.place, settings)
            self._kept.put(key, image)
        return image

    def _prepared(self, given: _Given, place: str, settings: Mapping[str, Any]) -> PreparedImage:
        limits = self._limits
        with tempfile.TemporaryDirectory(prefix="dovetail-image-") as directory:
            file = Path(directory, "image")
            file.write_bytes(given.data)
            target = Path(directory, "tensors")
            request = {
                **settings,
                "file": str(file),
                "size": given.size,
                "target": str(target),
                "max_pixels": limits.max_image_pixels,
                "memory_bytes": limits.max_image_memory,
                "cpu_s": limits.max_image_s,
            }
            answer = self.ask(request, place)
            if "unusable" in answer:
                raise UnsupportedError(
                    f"the checkpoint's image processor can't be used: {answer['unusable']}"
                )
            if "refused" in answer:
                raise RequestError(f"{place}: {answer['refused']}")
            return PreparedImage(
                bytes.fromhex(answer["digest"]),
                tuple(answer["size"]),
                _read(target, answer["tensors"], limits.max_image_memory),
            )

    def close(self) -> None:
        """End the processes, and keep no images; another one starts new processes."""
        self._processes.close()
        self._kept.clear()

    def ask(self, request: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Return a worker's answer. Raises `RequestError` if it ends."""
        limits = self._limits
        with self._processes.one() as process:
            try:
                line = json.dumps(request).encode()
                answer: dict[str, Any] = process.ask(line, limits.max_image_s, OVERTIME_S)
            except WorkerEndedError as ended:
                raise RequestError(f"{place}: {_why_ended(ended.reason, limits)}") from None
        return answer


def check_pillow() -> None:
    """Raise `MissingExtraError` without Pillow."""
    if find_spec("PIL") is None:
        raise MissingExtraError.naming("torch", "images need Pillow")


def _start() -> WorkerProcess:
    return WorkerProcess("prepares images", _WORKER)


def _pixels_of(source: ImageSource, limits: Limits) -> _Given:
    """Return the pixels of an image of Pillow. Raises `RequestError`."""
    from dovetail.front.media.pixels import rgb

    assert source.kind is SourceKind.PIL
    image = source.content
    width, height = image.size
    if not 0 < width * height <= limits.max_image_pixels:
        raise RequestError(
            f"{source.place}: it must have from 1 to {limits.max_image_pixels:,} pixels "
            f"(limits.max_image_pixels), got {width:,} x {height:,}"
        )
    try:
        pixels = rgb(image)
    except Exception as error:  # of an image that is decoded only now
        raise RequestError(f"{source.place}: it can't be decoded: {error}") from None
    return _Given(pixels.tobytes(), pixels.size)


def _why_ended(reason: str, limits: Limits) -> str:
    match reason:
        case "memory":
            return (
                f"it takes more than {limits.max_image_memory:,} bytes of memory to prepare "
                f"(limits.max_image_memory)"
            )
        case "time":
            return f"it takes longer than {limits.max_image_s:g} s to prepare (limits.max_image_s)"
        case _:
            return "it ended the process that prepared it"


def _read(path: Path, described: list[list[Any]], most: int) -> dict[str, NDArray[Any]]:
    """Return the tensors that a worker has written, of at most `most` bytes. Raises `RequestError`
    if it is confused."""
    left = min(most, path.stat().st_size)
    tensors: dict[str, NDArray[Any]] = {}
    with open(path, "rb") as file:
        for name, kind, shape in described:
            if kind not in _TYPES:
                raise RequestError(f"the image processor returns numbers of type {kind}")
            count = int(np.prod(shape, dtype=np.int64))
            left -= count * np.dtype(kind).itemsize
            if left < 0:
                raise RequestError("the process that prepares images returned less than it said")
            tensors[name] = np.fromfile(file, kind, count).reshape(shape)
            tensors[name].flags.writeable = False
    return tensors
