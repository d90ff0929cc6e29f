"""`ImageSource`: an image as a request carries it, not read yet. The functions of this module make
them of conversations' parts and of `multi_modal_data`, which costs nothing by the size of an image.
"""

from __future__ import annotations

import binascii
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from dovetail.base.checks import BINARY
from dovetail.base.roadmap import planned
from dovetail.config.limits import Limits
from dovetail.errors import RequestError, shown

# types of parts of a conversation -> the key of their content
IMAGE_PARTS = {"image_url": "image_url", "image": "image", "image_pil": "image_pil"}
NO_IMAGES = "this engine takes no images: its model reads none, or media.images is false"
_DETAILS = ("auto", "low", "high", "original")
_OTHER_KINDS = {  # types of parts, and keys of `multi_modal_data`
    "audio": ("audio", "audio_url", "input_audio"),
    "video": ("video", "video_url"),
}
_KIND_OF = {name: kind for kind, names in _OTHER_KINDS.items() for name in names}
_OTHER_MEDIA = planned("Audio and video")
_ACCEPTED = "a data: URL, or a URL of a host in media.hosts"


class SourceKind(Enum):
    """How the content of an `ImageSource` is read."""

    BASE64 = "base64"  # text, of a `data:` URL or a field of its own
    URL = "url"  # text
    BYTES = "bytes"  # of a file
    PATH = "path"  # of a local file
    PIL = "pil"  # an image of Pillow


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image that a request carries. `place` names it in errors."""

    kind: SourceKind
    content: Any = field(repr=False)
    place: str = "the image"

    def file_bytes(self, limits: Limits) -> bytes:
        """Return the bytes of the image's file, of kinds that have them: not of `URL` and `PIL`.
        Reads no more than `limits.max_image_bytes`. Raises `RequestError`."""
        most = limits.max_image_bytes
        if self.kind is SourceKind.BASE64:
            if len(self.content) > (most + 2) // 3 * 4:
                raise too_large(self.place, most)
            data = _decoded(self.content, self.place)
        elif self.kind is SourceKind.PATH:
            data = _file_content(self.content, self.place, most)
        else:
            data = bytes(self.content[: most + 1])
        if len(data) > most:
            raise too_large(self.place, most)
        return data


def too_large(place: str, most: int) -> RequestError:
    """Make the error for an image whose file has more than `most` bytes."""
    return RequestError(
        f"{place}: its file must have at most {most:,} bytes (limits.max_image_bytes)"
    )


def image_of_text(text: str, place: str) -> ImageSource:
    """Return the image that a URL of a request names: a `data:` URL, or an http(s) one.

    For requests that come over HTTP: it never reads a local file. Raises `RequestError`.
    """
    if text[:5].lower() == "data:":
        head, comma, data = text.partition(",")
        if not comma or not head[:200].lower().endswith(";base64"):
            raise RequestError(
                f"{place}: a data: URL must be data:image/…;base64,…, got {shown(text)}"
            )
        return ImageSource(SourceKind.BASE64, data, place)
    if text[:8].lower().startswith(("http://", "https://")):
        return ImageSource(SourceKind.URL, text, place)
    raise RequestError(f"{place} must be {_ACCEPTED}, got {shown(text)}")


def image_of_base64(text: str, place: str) -> ImageSource:
    """Return the image whose file a field of a request has as base64."""
    return ImageSource(SourceKind.BASE64, text, place)


def image_of(value: Any, place: str) -> ImageSource:
    """Return the image that a program gives: a URL, a path, the bytes of a file, or an image of
    Pillow. Raises `RequestError`."""
    if isinstance(value, str):
        if "://" in value[:16] or value[:5].lower() == "data:":
            if value[:7].lower() == "file://":
                return ImageSource(SourceKind.PATH, value[7:], place)
            return image_of_text(value, place)
        return ImageSource(SourceKind.PATH, value, place)
    if isinstance(value, os.PathLike):
        return ImageSource(SourceKind.PATH, value, place)
    if isinstance(value, BINARY):
        return ImageSource(SourceKind.BYTES, value, place)
    if any(one.__module__ == "PIL.Image" for one in type(value).__mro__):
        return ImageSource(SourceKind.PIL, value, place)
    raise RequestError(
        f"{place} must be an image of Pillow, a path, the bytes of a file, or {_ACCEPTED}, got "
        f"{shown(value)}"
    )


def images_of_data(data: Any, what: str = "multi_modal_data") -> tuple[ImageSource, ...]:
    """Return the images of `multi_modal_data={"image": …}`: one, or a list. Raises
    `RequestError`."""
    if not isinstance(data, Mapping):
        raise RequestError(f'{what} must be a mapping like {{"image": …}}, got {shown(data)}')
    images: tuple[ImageSource, ...] = ()
    for name, value in data.items():
        if value is None or (isinstance(value, list | tuple) and not value):
            continue
        if name != "image":
            raise RequestError(f"{what}: {_unknown(name)}")
        listed = list(value) if isinstance(value, list | tuple) else None
        if listed is None:
            images = (image_of(value, f"{what}: the image"),)
        else:
            images = tuple(
                image_of(one, f"{what}: image {place}") for place, one in enumerate(listed)
            )
    return images


def image_of_part(part: Mapping[str, Any], place: str, *, local: bool) -> ImageSource | None:
    """Return the image of a part of a conversation, None for a part of another type.

    `local`: the part is a program's, which may name local files and hold images. Raises
    `RequestError`.
    """
    name = part.get("type")
    if not isinstance(name, str) or name not in IMAGE_PARTS:
        return None
    value = part.get(IMAGE_PARTS[name])
    if isinstance(value, ImageSource):  # as other APIs' parts are converted
        return value
    if isinstance(value, Mapping):  # {"url": …, "detail": …}, as OpenAI's API has it
        _check_detail(value.get("detail"), place)
        value = value.get("url")
    elif value is None and name == "image":  # as transformers' templates know it
        value = next((part[key] for key in ("url", "path") if part.get(key) is not None), None)
    _check_detail(part.get("detail"), place)
    if local:
        return image_of(value, place)
    if not isinstance(value, str):
        raise RequestError(f"{place}.{name} must be {_ACCEPTED}, got {shown(value)}")
    return image_of_text(value, place)


def _check_detail(detail: Any, place: str) -> None:
    if detail is not None and detail not in _DETAILS:
        raise RequestError(
            f"{place}: detail must be one of {', '.join(_DETAILS)}, got {shown(detail)}"
        )


def check_kind(name: Any, place: str) -> None:
    """Raise `RequestError` for the type of a part that is audio or video."""
    if isinstance(name, str) and name in _KIND_OF:
        raise RequestError(f"{place}: {_unknown(name)}")


def _unknown(name: Any) -> str:
    kind = _KIND_OF.get(name) if isinstance(name, str) else None
    if kind is None:
        return f"{shown(name)}: models are given images only, by the key image"
    return f"{kind}: {_OTHER_MEDIA}" if name == kind else f"{name}: {kind}: {_OTHER_MEDIA}"


def _decoded(text: str, place: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raise RequestError(f"{place}: its data isn't valid base64") from None


def _file_content(path: Any, place: str, most: int) -> bytes:
    """Return the content of a regular file, `most` + 1 bytes at most."""
    try:
        # not blocking: a named pipe would wait for its writer
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(number, "rb") as file:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise RequestError(f"{place}: {shown(os.fspath(path))} isn't a file")
            return file.read(most + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"{place}: {shown(os.fspath(path))}: {reason}") from None


def check_count(images: Sequence[ImageSource], limits: Limits) -> None:
    """Raise `RequestError` for too many images of one prompt."""
    if len(images) > limits.max_images:
        raise RequestError(
            f"a prompt must have at most {limits.max_images} images (limits.max_images), got "
            f"{len(images)}"
        )
