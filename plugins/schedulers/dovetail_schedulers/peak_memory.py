"""The most memory that a batch will ever hold if each answer has its assumed length; LightLLM and S-LoRA admit by it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple


class Size(NamedTuple):
    """The size of one request, in tokens."""

    held: int  # now
    left: int  # yet to come


def peak_tokens(sizes: Iterable[Size]) -> int:
    """Return the tokens held at the peak, if all requests run on at one token a step.

    Memory peaks when one of them ends. In order of tokens left, the most first, only the first i still run when the i-th ends: then they hold
    their present tokens and i times the tokens that the i-th has left.
    """
    ordered = sorted(sizes, key=lambda size: -size.left)
    held = accumulate(size.held for size in ordered)
    return max((total + count * size.left for count, (size, total) in enumerate(zip(ordered, held, strict=True), 1)), default=0)
