"""Decoding of JSON bodies into msgspec structs, with errors that name the field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import msgspec

from dovetail.errors import shown
from dovetail.request.structured import exact_float
from dovetail.serving import JsonBounds, did_you_mean, excess_of
from dovetail_server.errors import HttpError

T = TypeVar("T")

_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_OF_TYPE = re.compile(r"Invalid (?:enum )?value '(.*)'", re.DOTALL)
_MEDIA = (
    "image",
    "document",
    "input_image",
    "input_file",
    "input_audio",
    "input_video",
    "image_url",
    "audio",
    "video",
    "file",
)
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(.*?)(?:\[\.\.\.\])?`$", re.DOTALL)
# characters
_LONGEST_PLACE = 1_000
_LONGEST_REASON = 300


@lru_cache(maxsize=64)
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, float_hook=exact_float)


def decode(data: bytes, kind: type[T], bounds: JsonBounds) -> T:
    """Return a body as a struct. Raises `HttpError` 400 naming the field that is wrong, or what
    there is too much of."""
    if (excess := excess_of(data, bounds)) is not None:
        raise HttpError(
            400,
            f"the body has {excess} (limits.max_json_parts, limits.max_json_depth)",
            code="json_too_large",
        )
    try:
        body: T = _decoder(kind).decode(data)  # type: ignore[arg-type]
    except msgspec.ValidationError as error:
        raise _explained(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"the body isn't valid JSON: {error}", code="invalid_json") from None
    return body


def converted(value: Any, kind: type[T], place: str) -> T:
    """Return a part of a body as a struct. Raises `HttpError` 400 naming the field that is wrong,
    at this place."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), kind, place) from None


def _explained(text: str, kind: Any, within: str = "") -> HttpError:
    # at its end: it may quote the largest value
    found = _PLACE.search(text, max(0, len(text) - _LONGEST_PLACE))
    place = ".".join(one for one in (within, found[1][:200] if found else "") if one)
    reason = text if found is None else text[: found.start()]
    if found is not None and found[0].startswith(" - at `key` in "):
        reason = f"a key: {reason}"
    if unknown := _UNKNOWN.match(reason):
        name = unknown[1]
        known = getattr(kind, "__struct_encode_fields__", ())
        meant = did_you_mean(name, known) if not place else ""
        param = f"{place}.{name}" if place else name
        return HttpError(
            400,
            f"{param[:200]}: unknown parameter{meant}",
            param=param[:200],
            code="unknown_parameter",
        )
    if missing := _MISSING.match(reason):
        param = f"{place}.{missing[1]}" if place else missing[1]
        return HttpError(400, f"{param}: it is required", param=param, code="missing_parameter")
    of_type = _OF_TYPE.match(reason)
    if of_type and of_type[1] in _MEDIA and place.endswith(".type"):
        return not_read(place.removesuffix(".type"), of_type[1], "models here read text and images")
    if len(reason) > _LONGEST_REASON:
        reason = f"{reason[:_LONGEST_REASON]}..."
    return HttpError(
        400,
        f"{place or 'the body'}: {reason[:1].lower()}{reason[1:]}",
        param=place or None,
        code="invalid_type",
    )


def not_read(place: str, kind: str, reads: str) -> HttpError:
    """Return the error for a part of a prompt, of a type that the model doesn't read. `reads`: what
    it does."""
    return HttpError(
        400,
        f"{place} is of type {kind!r}; {reads}",
        param=place,
        code="unsupported_parameter",
    )


class Only(NamedTuple):
    """A parameter of which only some values are supported."""

    name: str
    values: tuple[Any, ...]  # supported besides null
    reason: str  # why the others aren't


def refuse_unsupported(body: Any, table: Sequence[Only]) -> None:
    """Raise `HttpError` 400 for the first parameter with an unsupported value."""
    for name, values, reason in table:
        value = getattr(body, name)
        if value is not None and not any(
            type(value) is type(one) and value == one for one in values
        ):
            raise unsupported(name, f"{reason}, got {shown(value)}")


def unsupported(param: str, reason: str) -> HttpError:
    """Return the error for a parameter, or a value of it, that isn't supported."""
    return HttpError(400, f"{param}: {reason}", param=param, code="unsupported_parameter")


def given(**fields: Any) -> Mapping[str, Any]:
    """Return the fields that aren't None."""
    return {name: value for name, value in fields.items() if value is not None}
