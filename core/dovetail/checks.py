"""Checks that every door shares: what a value from outside is, and what an error says of it. They know nothing of requests or configs."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any


def shown(value: Any) -> str:
    """What an error says of a wrong value: its repr, not all of it if that is long. Numbers have no limit to their length."""
    try:
        text = repr(value)
    except Exception:  # somebody else's class, or an integer that Python finds too long to print
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_integer(value: Any) -> bool:
    """An int, or a numpy one; a bool is none."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def as_number(value: Any) -> float | None:
    """A finite int or float, or a numpy one, as a float; None for anything else, a bool too."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def unicode_error(text: str) -> UnicodeEncodeError | None:
    """What is wrong with it, if anything is: Python allows half a surrogate pair in a string."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error
    return None
