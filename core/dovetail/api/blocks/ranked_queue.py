"""`RankedQueue`: cached blocks in the order of a rank, in place of `BlockQueue`, which is in the
order of use.

A block may have a *parent*, another block without which it is useless, such as the one before it in
a prefix. A block is evicted only when no cached block has it as its parent, whatever its rank. Only
these *leaves* are in the heap: of a cached prefix of 100 blocks, one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from dovetail.errors import DovetailError

NO_PARENT = b""
PARTS = 256  # of the counts of children: see `BlockIndex`
# Classes of blocks: all of one are evicted before any of the next, leaves of the class, that is
FIRST = 0
BY_RANK = 1
LAST = 2

Order = tuple[int, Any, int]  # class, rank, number of the insertion


class RankedQueue:
    """Queue of blocks from 0 to `size` - 1, each at most once. The leaf of the lowest rank comes
    first; of equal ranks, the one inserted first. Inserting and removing are O(log n)."""

    __slots__ = (
        "_children",
        "_find",
        "_heap",
        "_key_of",
        "_numbers",
        "_on_evict",
        "_order",
        "_parent_of",
        "_place",
        "_rank",
    )

    def __init__(
        self,
        size: int,
        find: Callable[[bytes], int | None],
        rank: Callable[[int], Any],
        on_evict: Callable[[int, Any], None],
    ) -> None:
        """Create an empty queue. `find` returns the block that has a key, in the queue or not;
        `rank` is called with a block that is inserted, `on_evict` with one that `pop_oldest`
        returns, and its rank."""
        self._find = find
        self._rank = rank
        self._on_evict = on_evict
        self._numbers = count()
        self._order: list[Order | None] = [None] * size  # by block; None: not in the queue
        self._key_of = [NO_PARENT] * size
        self._parent_of = [NO_PARENT] * size  # the parent's key
        # key -> number of blocks in the queue whose parent has it
        self._children: list[dict[bytes, int]] = [{} for _ in range(PARTS)]
        self._heap: list[int] = []  # leaves, a binary heap by `_order`
        self._place = array("i", [-1]) * size  # by block, its index in the heap; -1: not in it

    def describe(self, block: int, key: bytes, parent: bytes) -> None:
        """Set the keys of a block, which isn't in the queue, and of its parent (b"": it has none)
        for its next insertion."""
        self._key_of[block] = key
        self._parent_of[block] = parent

    def append(self, block: int) -> None:
        """Insert `block`, which must not be in the queue, by its rank."""
        self._insert(block, BY_RANK)

    def append_last(self, block: int) -> None:
        """Insert `block`, which must not be in the queue, after those that have a rank."""
        self._insert(block, LAST)

    def prepend(self, block: int) -> None:
        """Insert `block`, which must not be in the queue, before those that have a rank."""
        self._insert(block, FIRST)

    def remove(self, block: int) -> None:
        """Remove `block`, which must be in the queue."""
        self._order[block] = None
        if self._place[block] >= 0:
            self._take_from_heap(block)
        parent = self._parent_of[block]
        if parent == NO_PARENT:
            return
        counts = self._children[parent[0]]
        counts[parent] -= 1
        if not counts[parent]:
            del counts[parent]
            other = self._find(parent)
            if other is not None and other in self:
                self._add_to_heap(other)

    def pop_oldest(self) -> int:
        """Remove and return the first leaf; the queue must not be empty."""
        block = self._heap[0]
        order = self._order[block]
        self.remove(block)
        self._on_evict(block, order[1] if order is not None else None)
        return block

    def clear(self) -> None:
        for block in self:
            self._order[block] = None
        for block in self._heap:
            self._place[block] = -1
        self._heap.clear()
        for counts in self._children:
            counts.clear()

    def check(self) -> None:
        """Raise `DovetailError` if the state is inconsistent."""
        children: dict[bytes, int] = {}
        for block in self:
            if parent := self._parent_of[block]:
                children[parent] = children.get(parent, 0) + 1
        counted = {key: number for part in self._children for key, number in part.items()}
        leaves = {block for block in self if self._key_of[block] not in children}
        if children != counted or leaves != set(self._heap):
            raise DovetailError(
                f"KV cache: {sorted(self._heap)} are ranked for eviction; leaves are "
                f"{sorted(leaves)}"
            )
        for place, block in enumerate(self._heap):
            above = self._heap[(place - 1) // 2] if place else block
            if self._place[block] != place or self._before(block, above):
                raise DovetailError(f"KV cache: block {block} is in the wrong place by rank")

    def __contains__(self, block: int) -> bool:
        return self._order[block] is not None

    def __iter__(self) -> Iterator[int]:
        """Iterate in the order of their numbers."""
        return (block for block, order in enumerate(self._order) if order is not None)

    def _insert(self, block: int, class_: int) -> None:
        key = self._key_of[block]
        parent = self._parent_of[block]
        self._order[block] = (class_, self._rank(block), next(self._numbers))
        if parent != NO_PARENT:
            counts = self._children[parent[0]]
            counts[parent] = counts.get(parent, 0) + 1
            other = self._find(parent)
            if other is not None and self._place[other] >= 0:
                self._take_from_heap(other)
        if key not in self._children[key[0]]:
            self._add_to_heap(block)

    # The heap, with the place of each of its blocks, so that any can be taken from it

    def _before(self, one: int, other: int) -> bool:
        return self._order[one] < self._order[other]  # type: ignore[operator]  # both are in it

    def _add_to_heap(self, block: int) -> None:
        self._heap.append(block)
        self._rise(len(self._heap) - 1)

    def _take_from_heap(self, block: int) -> None:
        place = self._place[block]
        self._place[block] = -1
        last = self._heap.pop()
        if last != block:
            self._heap[place] = last
            self._sink(place)
            self._rise(self._place[last])

    def _rise(self, place: int) -> None:
        """Move the block at `place` towards the front, past those that come after it."""
        heap = self._heap
        block = heap[place]
        while place and self._before(block, heap[above := (place - 1) // 2]):
            heap[place] = heap[above]
            self._place[heap[place]] = place
            place = above
        heap[place] = block
        self._place[block] = place

    def _sink(self, place: int) -> None:
        """Move the block at `place` towards the back, past those that come before it."""
        heap = self._heap
        block = heap[place]
        while (below := 2 * place + 1) < len(heap):
            if below + 1 < len(heap) and self._before(heap[below + 1], heap[below]):
                below += 1
            if not self._before(heap[below], block):
                break
            heap[place] = heap[below]
            self._place[heap[place]] = place
            place = below
        heap[place] = block
        self._place[block] = place
