"""Chooses the blocks of a decoder that are run while kernels are only compiled. Of blocks that
launch the same kernels a few suffice, and running all would take a large part of a start.

Which blocks are alike is observed when all are run for the first time.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from dovetail.nn.kernels.launch import asked_kinds


class Rehearsal:
    """Indices of the blocks of one decoder to run."""

    def __init__(self, blocks: Sequence[Any], last: int) -> None:
        """`blocks`: modules. Those from the one before `last` on are always run: there the stream
        is reduced to wanted tokens."""
        self._blocks = blocks
        self._tail = range(max(0, last - 1), len(blocks))
        self._chosen: Collection[int] | None = None  # None: they haven't been observed

    def indices(self, taps: Collection[int]) -> Iterator[int]:
        """Yield, in ascending order, the blocks to run: all, unless kernels are only compiled.
        `taps`: blocks that are run in any case. The caller runs each before it asks for the
        next."""
        asked = asked_kinds()
        if asked is None:
            yield from range(len(self._blocks))
        elif self._chosen is not None:
            yield from sorted({*self._chosen, *(tap for tap in taps if tap < len(self._blocks))})
        else:
            kinds: list[Hashable] = []
            for index, block in enumerate(self._blocks):
                before = len(asked)
                yield index
                kinds.append((_shapes(block), *asked[before:]))
            self._chosen = {*first_of_each_pair(kinds[: self._tail.start]), *self._tail}


def first_of_each_pair(kinds: Sequence[Hashable]) -> range:
    """Return the shortest beginning of `kinds` that has each pair of neighbours that occurs: what a
    block launches may depend on the one before."""
    missing = {*pairwise(kinds)}
    for end, pair in enumerate(pairwise(kinds), 2):
        missing.discard(pair)
        if not missing:
            return range(end)
    return range(len(kinds))


def _shapes(block: Any) -> Hashable:
    return tuple(
        (name, parameter.shape, parameter.dtype) for name, parameter in block.named_parameters()
    )
