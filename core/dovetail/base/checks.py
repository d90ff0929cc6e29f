"""Checks of values from outside. They know nothing of requests or configs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral, Real
from typing import Any

INT64 = (-(2**63), 2**63 - 1)  # the range of numpy's integers
# 31 years in either direction: exact as microseconds in JSON, and within 64 bits as a trace's
# nanoseconds
MAX_TIME_S = 1e9
MAX_NAME = 200  # characters of a name that may be misspelt
# neither text nor numbers, though Python would read them as a list of small ones
BINARY = bytes | bytearray | memoryview


def is_integer(value: Any) -> bool:
    """Return True for an int, or a numpy one; False for a bool."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def plain_integer(value: Any) -> int | None:
    """Return what `is_integer` accepts as an int, None for anything else."""
    return int(value) if is_integer(value) else None


def as_number(value: Any) -> float | None:
    """Return a finite int or float, or a numpy one, as a float; None for anything else, also for a
    bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def unicode_error(text: str) -> UnicodeEncodeError | None:
    """Return the error of a text that isn't valid Unicode, or None: Python allows half a surrogate
    pair in a string."""
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
    """Return True if a value holds more than `size` items, characters and 64-bit words of long
    integers, all nested containers included."""
    left = [value]
    counted = 0
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
    """Return True if a value equals one of `values` and has its type: 1 is not True, but 0 is
    0.0."""
    if any(type(value) is type(one) and value == one for one in values):
        return True
    number = as_number(value)
    return number is not None and any(as_number(one) == number for one in values)
