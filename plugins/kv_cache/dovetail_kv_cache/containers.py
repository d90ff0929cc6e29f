"""What the block pool keeps its books in: containers whose every operation takes the same short time, however many blocks there are.

A dict moves all that it holds whenever it has grown, or has been written to often enough. With the 70,000 blocks of a large GPU that takes some
10 ms, and all requests wait for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

PARTS = 256  # one for each value of a hash's first byte


class BlockIndex:
    """Hash, of one byte or more -> block: many small dicts."""

    __slots__ = ("_parts", "changes")

    def __init__(self) -> None:
        self._parts: list[dict[bytes, int]] = [{} for _ in range(PARTS)]
        self.changes = 0  # so far: while there is no other, the same is found

    def get(self, digest: bytes) -> int | None:
        return self._parts[digest[0]].get(digest)

    def run(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks that are found by `digests`, up to the first by which none is."""
        parts, blocks = self._parts, list[int]()
        for digest in digests:
            block = parts[digest[0]].get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def setdefault(self, digest: bytes, block: int) -> int:
        """The block that is found by `digest`: `block`, if there was none."""
        self.changes += 1
        return self._parts[digest[0]].setdefault(digest, block)

    def __delitem__(self, digest: bytes) -> None:
        self.changes += 1
        del self._parts[digest[0]][digest]

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._parts[digest[0]]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def items(self) -> Iterator[tuple[bytes, int]]:
        for part in self._parts:
            yield from part.items()

    def clear(self) -> None:
        self.changes += 1
        for part in self._parts:
            part.clear()


class BlockQueue:
    """Blocks from 0 to `size` - 1, each once at most, in the order in which they came; any can leave. A list linked both ways, whose two ends are one
    more place that belongs to no block:

        place   0   1   2   3 | end        oldest ─► 2, then 0
        next    e   ·   0   · |  2         "·": not in it
        before  2   ·   e   · |  0
    """

    __slots__ = ("_before", "_end", "_next", "count")

    def __init__(self, size: int) -> None:
        self._end = size
        self._next, self._before = (array("i", [-1]) * (size + 1) for _ in range(2))
        self._next[size] = self._before[size] = size
        self.count = 0  # to be read: how many are in it

    def append(self, block: int) -> None:
        """The newest, which isn't in it."""
        after, before, end = self._next, self._before, self._end
        newest = before[end]
        after[block], before[block] = end, newest
        after[newest] = before[end] = block
        self.count += 1

    def remove(self, block: int) -> None:
        """It is in it."""
        after, before = self._next, self._before
        older, newer = before[block], after[block]
        after[older], before[newer] = newer, older
        after[block] = -1
        self.count -= 1

    def pop_oldest(self) -> int:
        """There is one."""
        block = self._next[self._end]
        self.remove(block)
        return block

    def clear(self) -> None:
        for block in list(self):
            self.remove(block)

    def __contains__(self, block: int) -> bool:
        return self._next[block] >= 0

    def __iter__(self) -> Iterator[int]:
        """From the oldest on; it doesn't change meanwhile."""
        block = self._next[self._end]
        while block != self._end:
            yield block
            block = self._next[block]
