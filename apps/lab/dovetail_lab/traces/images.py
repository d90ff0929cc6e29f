"""Images of a trace's rows: `images`, a list of objects with `start`, `rows` and `digest`."""

from __future__ import annotations

from typing import Any

from dovetail.errors import shown
from dovetail.serving import unicode_error
from dovetail_lab.traces.reading import JsonObject, as_tokens
from dovetail_lab.traces.request import TraceImage

COLUMN = "images"
_KEYS = {"start", "rows", "digest"}


def read_images(row: JsonObject, prompt_tokens: int) -> tuple[TraceImage, ...]:
    """Return the images of a row; none without that column. Raises `TraceError`."""
    given = row.values.get(COLUMN)
    if given is None:
        return ()
    if not isinstance(given, list):
        raise _wrong(row, f"expected a list of images, got {shown(given)}")
    images = tuple([_image(row, one) for one in given])
    before = 0
    for image in images:
        if image.start < before:
            raise _wrong(row, f"expected images in order, one starts at {image.start} < {before}")
        before = image.stop
    if before > prompt_tokens:
        raise _wrong(row, f"an image ends at {before}, after the {prompt_tokens} prompt tokens")
    return images


def _image(row: JsonObject, given: Any) -> TraceImage:
    if not isinstance(given, dict) or set(given) != _KEYS:
        raise _wrong(row, f"expected start, rows and digest of each, got {shown(given)}")
    digest = given["digest"]
    if isinstance(digest, bool) or not isinstance(digest, str | int):
        raise _wrong(row, f"expected a text or a whole number as digest, got {shown(digest)}")
    if unicode_error(str(digest)):
        raise _wrong(row, f"expected a digest that is text, got {shown(digest)}")
    start, rows = (
        as_tokens(row.source, row.line, COLUMN, given[key], least)
        for key, least in (("start", 0), ("rows", 1))
    )
    return TraceImage(start, rows, str(digest))


def _wrong(row: JsonObject, message: str) -> Exception:
    return row.source.error(message, row.line, COLUMN)


def written_images(images: tuple[TraceImage, ...]) -> list[dict[str, Any]]:
    """Return images as `read_images` reads them."""
    return [image._asdict() for image in images]
