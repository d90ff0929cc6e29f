"""`parts_of`: the JSON of a large answer in parts, which are encoded one by one while they are
sent.

`Fields`, `Items` and `Numbers` mark what is encoded in parts; all other values are encoded
whole.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

PART_BYTES = 2**16  # about; takes less than a millisecond
_NUMBERS = 3 * 2**10  # encoded together; a multiple of three has no padding in base64


@dataclass(frozen=True, slots=True)
class Fields:
    """An object whose values are encoded one by one."""

    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Items:
    """A list whose items are made and encoded one by one."""

    values: Iterable[Any]


@dataclass(frozen=True, slots=True)
class Numbers:
    """An array, as lists of numbers, or as the base64 of its bytes."""

    data: NDArray[np.float32]
    as_base64: bool = False


def parts_of(value: Any) -> Iterator[bytes]:
    """Yield the JSON of a value in parts of about `PART_BYTES`, unless a value that is encoded
    whole is larger."""
    pieces: list[bytes] = []
    size = 0
    for piece in _pieces(value):
        pieces.append(piece)
        size += len(piece)
        if size >= PART_BYTES:
            yield b"".join(pieces)
            pieces = []
            size = 0
    if pieces:
        yield b"".join(pieces)


def _pieces(value: Any) -> Iterator[bytes]:
    match value:
        case Fields(values):
            yield from _joined(
                b"{", ((orjson.dumps(name) + b":", one) for name, one in values.items()), b"}"
            )
        case Items(values):
            yield from _joined(b"[", ((b"", one) for one in values), b"]")
        case Numbers(data, as_base64=True):
            yield b'"'
            flat = np.ascontiguousarray(data, "<f4").reshape(-1)
            for start in range(0, len(flat), _NUMBERS):
                yield base64.b64encode(flat[start : start + _NUMBERS].tobytes())
            yield b'"'
        case Numbers(data) if data.ndim > 1:
            yield from _joined(b"[", ((b"", Numbers(row)) for row in data), b"]")
        case Numbers(data):
            yield from _joined(
                b"[",
                (
                    (b"", _Run(data[start : start + _NUMBERS]))
                    for start in range(0, len(data), _NUMBERS)
                ),
                b"]",
            )
        case _Run(data):
            yield orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        case _:
            yield orjson.dumps(value)


@dataclass(frozen=True, slots=True)
class _Run:
    """A part of a row of numbers, without brackets."""

    data: NDArray[np.float32]


def _joined(begin: bytes, values: Iterable[tuple[bytes, Any]], end: bytes) -> Iterator[bytes]:
    """Yield the pieces of values, each after a prefix, with commas between them."""
    before = begin
    for prefix, value in values:
        yield before + prefix
        yield from _pieces(value)
        before = b","
    yield end if before == b"," else begin + end
