"""Peak memory of a batch if each answer has its assumed length; LightLLM and S-LoRA admit by it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from dovetail.api.scheduler import Step
from dovetail.request import Request

# blocks after a request's end over which its growth is measured; a multiple of 1 to 10, since some
# groups' blocks are that much larger
FAR = 5040


class Size(NamedTuple):
    """Size of one request, in tokens of the pool: a block is as many as
    `SchedulerContext.block_size`."""

    held: float  # now
    left: int  # still to be generated
    # of `held` with each of them; less than 1 if some layers' blocks leave a sliding window
    growth: float = 1


def size_of(step: Step, request: Request, tokens: int, left: int, block_size: int) -> Size:
    """Return the size of a request that has `tokens` tokens and will generate `left` more. A
    partial last block counts as full.

    Sliding windows fill up, then hold no more: the size on the way is that at the end, less the
    growth from there on for each token left. So it is exact once all windows are full, and larger
    than needed before (where groups differ in their block size, up to a block of each).
    """
    end = tokens + left
    last = (end - 1) // block_size * block_size + 1  # tokens at which its last block is begun
    pages = step.pages_at(request, last)
    growth = (step.pages_at(request, last + FAR * block_size) - pages) / FAR
    return Size(pages * block_size + growth * (end - last - left), left, growth)


def peak_tokens(sizes: Iterable[Size]) -> float:
    """Return the tokens held at the peak, if all requests keep running at one token a step.

    Memory peaks when a request ends. Sorted by tokens left, descending, only the first i are still
    running when the i-th ends: then they hold their present tokens, plus their growth times the
    number of tokens that the i-th has left.
    """
    ordered = sorted(sizes, key=lambda size: -size.left)
    held = accumulate(size.held for size in ordered)
    growth = accumulate(size.growth for size in ordered)
    return max(
        (now + rate * size.left for size, now, rate in zip(ordered, held, growth, strict=True)),
        default=0,
    )
