"""The most memory that a batch will ever hold, if each answer is as long as is assumed: what LightLLM and S-LoRA admit by."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple


class Size(NamedTuple):
    """Of one request, in tokens."""

    held: int  # now
    left: int  # yet to come


def peak_tokens(sizes: Iterable[Size]) -> int:
    """Tokens held at the worst moment, if all run on at one token a step.

    Memory peaks as one of them ends. In order of tokens left, the most first, when the i-th ends only the first i still run: they hold what
    they hold now and i times what the i-th has left.
    """
    ordered = sorted(sizes, key=lambda size: -size.left)
    held = accumulate(size.held for size in ordered)
    return max((total + count * size.left for count, (size, total) in enumerate(zip(ordered, held, strict=True), 1)), default=0)
