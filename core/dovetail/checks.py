"""Checks of values from outside, and how an error shows such a value, for all who read input. They know nothing of requests or configs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from decimal import Decimal
from numbers import Integral, Real
from typing import Any

INT64 = (-(2**63), 2**63 - 1)  # the range of numpy's integers
_SHOWN = 80  # characters of a value in an error
MAX_TIME_S = 1e9  # 31 years in either direction: exact as microseconds in JSON, and within 64 bits as a trace's nanoseconds
_SURE_DIGITS = 17  # as many tell any double
_ZERO = re.compile(r"-?0(?:\.0+)?(?:[eE].*)?")
_NO_DIGITS = re.compile(r"[eE].*|[^0-9]")  # of a number's significand
MAX_NAME = 200  # characters of a name that may be misspelt
BINARY = (
    bytes | bytearray | memoryview
)  # neither text nor numbers, though Python would read them as a list of small ones


def shown(value: Any) -> str:
    """Show a wrong value in an error: its repr, shortened if that is long. Numbers may have any length. Reads no more than it shows."""
    try:
        text = _repr(value, _SHOWN + 1)
    except Exception:  # an integer that Python finds too long to print, say
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _repr(value: Any, room: int) -> str:
    """Return the repr of a value, or the beginning of it if that has more than `room` characters."""
    kind = type(value)
    if kind in (str, bytes):
        return repr(value[:room])
    if kind not in (list, tuple, dict) or not value:
        return repr(value)
    text = "[" if kind is list else "(" if kind is tuple else "{"
    for index, item in enumerate(value):
        if len(text) > room:
            return text
        text += (", " if index else "") + _repr(item, room - len(text))
        if kind is dict:
            text += ": " + _repr(value[item], max(0, room - len(text)))
    comma = "," if kind is tuple and len(value) == 1 else ""
    return text + comma + ("]" if kind is list else ")" if kind is tuple else "}")


def is_integer(value: Any) -> bool:
    """Return True for an int, or a numpy one; False for a bool."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def plain_integer(value: Any) -> int | None:
    """Return what `is_integer` accepts as an int, None for anything else."""
    return int(value) if is_integer(value) else None


def as_number(value: Any) -> float | None:
    """Return a finite int or float, or a numpy one, as a float; None for anything else, also for a bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def exact_float(text: str) -> float:
    """Return a decimal number of JSON as a double. Raises `ValueError` if it says more than a double holds: it is too large or too small, or has more
    than 17 digits, which tell any double, and isn't one."""
    value = float(text)
    if len(text) <= _SURE_DIGITS and (0 < abs(value) < math.inf or _ZERO.fullmatch(text)):
        return value
    digits = _NO_DIGITS.sub("", text).strip("0")
    if (
        math.isinf(value)
        or (digits and not value)
        or (len(digits) > _SURE_DIGITS and Decimal(text) != Decimal(value))
    ):
        raise ValueError(
            f"{text if len(text) <= 80 else f'{text[:77]}...'} can't be kept exactly: a double holds about 17 digits, up to 1e308"
        )
    return value


def unicode_error(text: str) -> UnicodeEncodeError | None:
    """Return the error of a text that isn't valid Unicode, or None: Python allows half a surrogate pair in a string."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error
    return None


def did_you_mean(wrong: str, valid: Iterable[str]) -> str:
    """Return `, did you mean x?` for the nearest name, or an empty string."""
    import difflib

    if len(wrong) > MAX_NAME:
        return ""  # no valid name is as long, and comparing takes time that grows with the length
    near = difflib.get_close_matches(wrong, list(valid), n=1, cutoff=0.6)
    return f", did you mean {near[0]}?" if near else ""


def is_larger(value: Any, size: int) -> bool:
    """Return True if a value holds more than `size` items, characters and 64-bit words of long integers, all nested containers included."""
    left, counted = [value], 0
    while left and counted <= size:
        one = left.pop()
        if isinstance(one, int):
            counted += one.bit_length() // 64
        elif isinstance(one, Mapping | Sequence | Set):
            counted += len(one)
            if counted <= size and not isinstance(one, str | bytes):
                left += [*one.keys(), *one.values()] if isinstance(one, Mapping) else one
    return counted > size


def among(value: Any, values: tuple[Any, ...]) -> bool:
    """Return True if a value equals one of `values` and has its type: 1 is not True, but 0 is 0.0."""
    if any(type(value) is type(one) and value == one for one in values):
        return True
    number = as_number(value)
    return number is not None and any(as_number(one) == number for one in values)
