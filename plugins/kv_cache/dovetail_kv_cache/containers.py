"""The containers of the block pool: each operation takes the same short time, however many blocks there are.

A dict moves all its items whenever it has grown, or has been written to often enough. With the 70,000 blocks of a large GPU that takes some
10 ms, during which all requests wait.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

PARTS = 256  # one for each value of a hash's first byte


class BlockIndex:
    """A map from hash, of one byte or more, to block, made of many small dicts."""

    __slots__ = ("_parts", "changes")

    def __init__(self) -> None:
        self._parts: list[dict[bytes, int]] = [{} for _ in range(PARTS)]
        self.changes = 0  # number of changes so far: while it stays the same, so do the answers

    def get(self, digest: bytes) -> int | None:
        return self._parts[digest[0]].get(digest)

    def run(self, digests: Iterable[bytes]) -> list[int]:
        """Return the blocks of `digests`, up to the first digest that has none."""
        parts, blocks = self._parts, list[int]()
        for digest in digests:
            block = parts[digest[0]].get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def setdefault(self, digest: bytes, block: int) -> int:
        """Return the block of `digest`, after making it `block` if there was none."""
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
    """A queue of blocks from 0 to `size` - 1, each at most once, in the order in which they came; any can leave. It is a doubly linked list, whose
    ends are one more entry that belongs to no block:

        entry   0   1   2   3 | end        oldest ─► 2, then 0
        next    e   ·   0   · |  2         "·": not in it
        before  2   ·   e   · |  0
    """

    __slots__ = ("_before", "_end", "_next", "count")

    def __init__(self, size: int) -> None:
        self._end = size
        self._next, self._before = (array("i", [-1]) * (size + 1) for _ in range(2))
        self._next[size] = self._before[size] = size
        self.count = 0  # number of blocks in it; only to be read

    def append(self, block: int) -> None:
        """Append `block`, which must not be in it, as the newest."""
        after, before, end = self._next, self._before, self._end
        newest = before[end]
        after[block], before[block] = end, newest
        after[newest] = before[end] = block
        self.count += 1

    def remove(self, block: int) -> None:
        """Remove `block`, which must be in it."""
        after, before = self._next, self._before
        older, newer = before[block], after[block]
        after[older], before[newer] = newer, older
        after[block] = -1
        self.count -= 1

    def pop_oldest(self) -> int:
        """Remove and return the oldest block; the queue must not be empty."""
        block = self._next[self._end]
        self.remove(block)
        return block

    def clear(self) -> None:
        for block in list(self):
            self.remove(block)

    def __contains__(self, block: int) -> bool:
        return self._next[block] >= 0

    def __iter__(self) -> Iterator[int]:
        """Iterate from the oldest on; the queue must not change meanwhile."""
        block = self._next[self._end]
        while block != self._end:
            yield block
            block = self._next[block]
