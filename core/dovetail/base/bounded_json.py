"""Reader of untrusted JSON: `read_json` parses, `excess_of` bounds a text for other parsers. Both
count before anything is built.

Three bytes of JSON (`[],`) become a list of 72, and Python's garbage collector visits each list and
object many times. So their number, the number of keys, and the nesting are counted in the bytes
first, at some 10 ns per byte, in pieces between which other threads run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

_PIECE_BYTES = 1 << 16
_MARKS = b'[]{}:"'
_NO_MARKS = bytes(set(range(256)) - set(_MARKS))
_DEEPER, _SHALLOWER, _PARTS = (
    bytes(value in group for value in range(256)) for group in (b"[{", b"]}", b"[{:")
)
# translated by `_DIGITS`; reading and writing integers takes time quadratic in their digits
_LONG_NUMBER = b"0" * 100
_DIGITS = bytes(ord("0") if value in b"0123456789" else ord(" ") for value in range(256))


class JsonBounds(NamedTuple):
    """Upper bounds of a JSON text."""

    parts: int  # lists, objects, and keys of objects, together
    depth: int  # lists and objects in one another


# of JSON in a string of a request: schemas, arguments of calls
OF_TEXTS = JsonBounds(parts=200_000, depth=128)


class WrongJsonError(ValueError):
    """A text that isn't accepted as JSON."""


class JsonTexts:
    """Parser of texts whose parts count together: those within one request."""

    def __init__(self, bounds: JsonBounds = OF_TEXTS) -> None:
        self._left = bounds

    def read(self, text: bytes | str, **options: Any) -> Any:
        """Parse JSON, bytes in UTF-8. The options are those of `json.loads`. Raises
        `WrongJsonError`, and what the options raise."""
        data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
        measured = _measured(data, self._left)
        if (excess := _excess(measured, self._left)) is not None:
            raise WrongJsonError(excess)
        self._left = self._left._replace(parts=self._left.parts - measured.parts)
        try:
            return json.loads(
                text if isinstance(text, str) else text.decode("utf-8-sig"), **options
            )
        except RecursionError:
            raise WrongJsonError(
                "not valid JSON: lists and objects are nested too deeply"
            ) from None
        except (json.JSONDecodeError, UnicodeError) as error:
            raise WrongJsonError(f"not valid JSON: {error}") from None
        except ValueError as error:
            if type(error) is not ValueError:  # of an option
                raise
            raise WrongJsonError(
                "not valid JSON: a number of too many digits"
            ) from None  # more than Python reads


def read_json(text: bytes | str, bounds: JsonBounds = OF_TEXTS, **options: Any) -> Any:
    """Parse one JSON text: see `JsonTexts.read`."""
    return JsonTexts(bounds).read(text, **options)


def excess_of(data: bytes, bounds: JsonBounds) -> str | None:
    """Return which bound a JSON text in UTF-8 exceeds, for an error; None if none, or if a parser
    would stop at an error before."""
    containers = data.count(b"[") + data.count(b"{")  # those within strings included
    parts = containers + data.count(b":")
    if (
        containers <= bounds.depth
        and parts <= bounds.parts
        and next(_long_numbers(data), None) is None
    ):
        return None
    return _excess(_measured(data, bounds), bounds)


def _excess(measured: _Measured, bounds: JsonBounds) -> str | None:
    parts, depth, long_number = measured
    if long_number:
        return "a number of more than 100 digits"
    if depth > bounds.depth:
        return f"more than {bounds.depth} lists and objects in one another"
    return f"more than {bounds.parts} lists, objects and keys" if parts > bounds.parts else None


class _Measured(NamedTuple):
    """Counts of a text, up to the piece that exceeds a bound."""

    parts: int
    depth: int
    long_number: bool


def _long_numbers(text: bytes) -> Iterator[int]:
    """Yield where each long number begins; a longer one counts as several. Searching in translated
    bytes takes 1 ns per byte, whatever they are; a regular expression would try each digit as a
    beginning."""
    digits = text.translate(_DIGITS)
    found = digits.find(_LONG_NUMBER)
    while found >= 0:
        yield found
        found = digits.find(_LONG_NUMBER, found + len(_LONG_NUMBER))


def _plain(text: bytes) -> bytes:
    """Return a text without escapes, so that each quote begins or ends a string."""
    return text.replace(b"\\\\", b"").replace(b'\\"', b"")


def _measured(data: bytes, bounds: JsonBounds) -> _Measured:
    import numpy as np

    is_part, deeper, shallower = (
        np.frombuffer(table, np.int8) for table in (_PARTS, _DEEPER, _SHALLOWER)
    )
    steps = deeper - shallower
    parts = depth = deepest = start = 0
    in_string = False
    while start < len(data) and parts <= bounds.parts and deepest <= bounds.depth:
        piece = data[start : start + _PIECE_BYTES]
        backslashes = len(piece) - len(piece.rstrip(b"\\"))
        if backslashes % 2 and start + len(piece) < len(data):
            piece = piece[:-1]  # the last one escapes a byte of the next piece
        start += len(piece)
        read = 0
        quoted = int(in_string)
        for found in _long_numbers(
            piece
        ):  # one that lies across pieces may have twice as many digits
            quoted += _plain(piece[read:found]).count(b'"')
            read = found
            if quoted % 2 == 0:
                return _Measured(parts, deepest, long_number=True)
        marks = np.frombuffer(_plain(piece).translate(None, _NO_MARKS), np.uint8)
        quotes = np.cumsum(marks == ord('"'), dtype=np.int32) + in_string
        outside = marks[quotes % 2 == 0]
        if quotes.size:
            in_string = bool(quotes[-1] % 2)
        if outside.size:
            levels = depth + np.cumsum(steps[outside], dtype=np.int32)
            depth = int(levels[-1])
            deepest = max(deepest, int(levels.max()))
            parts += int(np.count_nonzero(is_part[outside]))
    return _Measured(parts, deepest, long_number=False)
