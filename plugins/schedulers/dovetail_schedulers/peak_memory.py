"""Peak memory of a batch if each answer has its assumed length; LightLLM and S-LoRA admit by it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple


class Size(NamedTuple):
    """Size of one request, in tokens."""

    held: int  # now
    left: int  # still to be generated


def peak_tokens(sizes: Iterable[Size]) -> int:
    """Return the tokens held at the peak, if all requests keep running at one token a step.

    Memory peaks when a request ends. Sorted by tokens left, descending, only the first i are still running when the i-th ends: then they hold their
    present tokens plus i times the number of tokens that the i-th has left.
    """
    ordered = sorted(sizes, key=lambda size: -size.left)
    held = accumulate(size.held for size in ordered)
    return max((total + count * size.left for count, (size, total) in enumerate(zip(ordered, held, strict=True), 1)), default=0)
