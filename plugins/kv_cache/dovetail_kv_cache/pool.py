"""`BlockPool`: the state of each block: its number of holders (block tables), and whether a hash finds it.

state       refs   hash      transitions
empty        0     none      `take`: held
held        ≥ 1    maybe     `publish`: also findable; last `release`: cached if it has a hash, otherwise empty
cached       0     yes       `hold`: held; `take`, if no block is empty: held, without its hash

Every operation takes the same short time, independent of the number of blocks. A dict moves all its items whenever it has grown, or has been
written to often enough; with the 70,000 blocks of a large GPU that takes some 10 ms, which delays all requests. Hence `BlockIndex` and
`BlockQueue`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from dovetail.api.kv_cache import BlockCounts
from dovetail.errors import DovetailError

NO_HASH = b""
PARTS = 256  # of a `BlockIndex`: one per value of a hash's first byte


class BlockPool:
    """Reference counts, the stack of empty blocks, and the cached blocks, least recently used first.

    Callers must take no more than `available`, and release only blocks that they hold.
    """

    __slots__ = ("_cached", "_empty", "_hash_of", "_size", "block_of", "refs")

    def __init__(self, size: int) -> None:
        self._size = size
        self.refs = [0] * size  # by block, the number of tables that hold it
        self.block_of = BlockIndex()  # hash -> block
        self._hash_of = [NO_HASH] * size
        self._empty = list(range(size - 1, -1, -1))  # a stack: initially the lowest on top, later the most recently freed
        self._cached = BlockQueue(size)

    @property
    def available(self) -> int:
        return len(self._empty) + self._cached.count

    @property
    def counts(self) -> BlockCounts:
        free, cached = len(self._empty), self._cached.count
        return BlockCounts(free=free, held=self._size - free - cached, cached=cached)

    def take(self) -> int:
        """Return an empty block, now with one holder; if there is none, the least recently used cached block."""
        if self._empty:
            block = self._empty.pop()
        else:
            block = self._cached.pop_oldest()
            del self.block_of[self._hash_of[block]]
            self._hash_of[block] = NO_HASH
        self.refs[block] = 1
        return block

    def hold(self, blocks: Iterable[int]) -> None:
        """Add one holder to each of `blocks`, which are held or cached."""
        refs, cached = self.refs, self._cached
        for block in blocks:
            if refs[block] == 0:
                cached.remove(block)
            refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one holder from each of `blocks`. Findable ones stay cached, those late in `blocks` longest."""
        refs, hash_of, cached, empty = self.refs, self._hash_of, self._cached, self._empty
        for block in blocks:
            refs[block] -= 1
            if refs[block] == 0:
                if hash_of[block] == NO_HASH:
                    empty.append(block)
                else:
                    cached.append(block)

    def publish(self, block: int, digest: bytes) -> None:
        """Map `digest` to `block`, unless it maps to another block."""
        if self.block_of.setdefault(digest, block) == block:
            self._hash_of[block] = digest

    def unpublish(self, block: int, digest: bytes) -> None:
        """Remove the mapping of `digest` to `block`. No-op if there is none."""
        if self.block_of.get(digest) == block:
            del self.block_of[digest]
            self._hash_of[block] = NO_HASH
            if self.refs[block] == 0:
                self._cached.remove(block)
                self._empty.append(block)

    def forget(self) -> None:
        """Remove all mappings; cached blocks become empty."""
        self.block_of.clear()
        self._hash_of = [NO_HASH] * self._size
        self._empty.extend(reversed(list(self._cached)))
        self._cached.clear()

    def check(self, holders: list[int]) -> None:
        """Raise `DovetailError` if the state is inconsistent, or differs from `holders`: by block, the number of tables that hold it."""
        if self.refs != holders:
            differing = [(block, *counted) for block, counted in enumerate(zip(self.refs, holders, strict=True)) if len(set(counted)) > 1]
            raise DovetailError(f"KV pool: (block, holders counted, holders in tables) differ: {differing}")
        empty, cached, held = set(self._empty), set(self._cached), {block for block, n in enumerate(self.refs) if n}
        if len(empty) != len(self._empty) or sorted([*empty, *cached, *held]) != list(range(self._size)):
            raise DovetailError(f"KV pool: blocks lost or in two states: empty {sorted(self._empty)}, cached {sorted(cached)}, held {sorted(held)}")
        findable = {block: digest for block, digest in enumerate(self._hash_of) if digest != NO_HASH}
        if {block: digest for digest, block in self.block_of.items()} != findable or len(self.block_of) != len(findable):
            raise DovetailError("KV pool: the hashes of the blocks and the index of hashes differ")
        wrong = (cached - findable.keys()) | (empty & findable.keys())
        if wrong:
            raise DovetailError(f"KV pool: cached without a hash, or empty with one: blocks {sorted(wrong)}")


class BlockIndex:
    """A map from hash, of one byte or more, to block, made of many small dicts."""

    __slots__ = ("_parts", "changes")

    def __init__(self) -> None:
        self._parts: list[dict[bytes, int]] = [{} for _ in range(PARTS)]
        self.changes = 0  # number of changes so far; equal values mean equal contents

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
        """Return the block of `digest`; set it to `block` first if there is none."""
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
    """Queue of blocks from 0 to `size` - 1, each at most once, in insertion order; any can be removed. A doubly linked list whose ends are an extra
    entry that belongs to no block:

        entry   0   1   2   3 | end        oldest ─► 2, then 0
        next    e   ·   0   · |  2         "·": not in it
        before  2   ·   e   · |  0
    """

    __slots__ = ("_before", "_end", "_next", "count")

    def __init__(self, size: int) -> None:
        self._end = size
        self._next, self._before = (array("i", [-1]) * (size + 1) for _ in range(2))
        self._next[size] = self._before[size] = size
        self.count = 0  # number of blocks in the list; read-only for callers

    def append(self, block: int) -> None:
        """Append `block`, which must not be in the queue, as the newest."""
        after, before, end = self._next, self._before, self._end
        newest = before[end]
        after[block], before[block] = end, newest
        after[newest] = before[end] = block
        self.count += 1

    def remove(self, block: int) -> None:
        """Remove `block`, which must be in the queue."""
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
        """Iterate from oldest to newest; the queue must not change meanwhile."""
        block = self._next[self._end]
        while block != self._end:
            yield block
            block = self._next[block]
