"""`BlockPool`: the state of each page and block: which block a page is part of, how many block
tables hold a block, and whether a hash finds it.

A block is named by its first page; `rest` holds its other pages. Blocks of one page, which most
models have, have none.

state       refs   hash      transitions
empty        0     none      `take`: part of a held block
held        ≥ 1    maybe     `publish`: also findable; last `release`: cached if it has a hash, otherwise its pages are empty
cached       0     yes       `hold`: held; `take`, if too few pages are empty: its pages are empty

Every operation takes the same short time, independent of the number of pages. A dict moves all its
items whenever it has grown, or has been written to often enough; with the 70,000 blocks of a large
GPU that takes some 10 ms, which delays all requests. Hence `BlockIndex` and `BlockQueue`. With
ranks, an operation takes O(log n) time for n cached blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dovetail.api.blocks.ranked_queue import RankedQueue
from dovetail.api.kv_cache import PageCounts, Pages
from dovetail.errors import DovetailError

NO_HASH = b""
Ranks = tuple[Callable[[int], Any], Callable[[int, Any], None]]
PARTS = 256  # of a `BlockIndex`: one per value of a hash's first byte


class BlockPool:
    """Reference counts, the stack of empty pages, and the cached blocks of all groups in the order
    in which they are evicted: least recently used first, or by `ranks`.

    Callers must take no more than `available`, and hold and release blocks by the group that they
    were taken for.
    """

    __slots__ = (
        "_cached",
        "_empty",
        "_hash_of",
        "_held",
        "_size",
        "_widths",
        "block_of",
        "ranked",
        "refs",
        "rest",
    )

    def __init__(self, size: int, widths: Sequence[int] = (1,), ranks: Ranks | None = None) -> None:
        """Create a pool of `size` empty pages. `widths`: pages of a block, by group. `ranks`: two
        functions, of a block that is cached now and of one that is evicted: see `RankedQueue`."""
        self._size = size
        self._widths = widths
        self.refs = [0] * size  # by block, the number of tables that hold it
        self.rest: list[Pages] = [()] * size  # by block, its pages except the first
        self.block_of = BlockIndex()  # hash -> block
        self._hash_of = [NO_HASH] * size
        # a stack: initially the lowest on top, later the most recently freed
        self._empty = list(range(size - 1, -1, -1))
        # None: the least recently used block is evicted first
        self.ranked = None if ranks is None else RankedQueue(size, self.block_of.get, *ranks)
        self._cached = BlockQueue(size) if self.ranked is None else self.ranked
        self._held = [0] * len(widths)  # pages, by group

    @property
    def available(self) -> int:
        """Number of pages that `take` can use."""
        return self._size - sum(self._held)

    @property
    def counts(self) -> PageCounts:
        empty = len(self._empty)
        held = sum(self._held)
        by_group = tuple(self._held) if len(self._held) > 1 else ()
        return PageCounts(
            empty=empty, held=held, cached=self._size - empty - held, held_by_group=by_group
        )

    def take(self, count: int = 1, group: int = 0) -> list[int]:
        """Return `count` new blocks of `group` with one holder each, made of empty pages; if there
        are too few, cached blocks are evicted first."""
        empty = self._empty
        width = self._widths[group]
        needed = count * width
        while len(empty) < needed:
            self._evict()
        self._held[group] += needed
        if needed == 1:
            self.refs[empty[-1]] = 1
            return [empty.pop()]
        start = len(empty) - needed
        pages = empty[start:][::-1]
        del empty[start:]
        blocks = pages[::width]
        refs = self.refs
        for block in blocks:
            refs[block] = 1
        if width > 1:
            for number, block in enumerate(blocks):
                self.rest[block] = tuple(pages[number * width + 1 : (number + 1) * width])
        return blocks

    def hold(self, blocks: Iterable[int], group: int = 0) -> None:
        """Add one holder to each of `blocks`, which are held or cached."""
        refs = self.refs
        cached = self._cached
        gained = 0
        for block in blocks:
            if refs[block] == 0:
                cached.remove(block)
                gained += 1
            refs[block] += 1
        self._held[group] += gained * self._widths[group]

    def release(self, blocks: Iterable[int], group: int = 0) -> None:
        """Remove one holder from each of `blocks`. Findable ones stay cached, those late in
        `blocks` longest."""
        refs = self.refs
        hash_of = self._hash_of
        cached = self._cached
        empty = self._empty
        width = self._widths[group]
        lost = 0
        for block in blocks:
            refs[block] -= 1
            if refs[block] == 0:
                lost += 1
                if hash_of[block] != NO_HASH:
                    cached.append(block)
                elif width == 1:
                    empty.append(block)
                else:
                    self._dissolve(block)
        self._held[group] -= lost * width

    def refresh(self, digests: Iterable[bytes]) -> None:
        """Let those blocks of `digests` that are cached be evicted last, the later ones longest."""
        for digest in digests:
            block = self.block_of.get(digest)
            if block is not None and self.refs[block] == 0:
                self._cached.remove(block)
                self._cached.append(block)

    def keep_longest(self, digest: bytes) -> None:
        """Let the block of `digest`, if it is cached, be evicted after all others, whatever their
        ranks, until it is cached anew or `refresh`ed."""
        block = self.block_of.get(digest)
        if block is not None and self.refs[block] == 0:
            self._cached.remove(block)
            self._cached.append_last(block)

    def demote(self, digest: bytes) -> None:
        """Let the block of `digest`, if it is cached, be evicted first."""
        block = self.block_of.get(digest)
        if block is not None and self.refs[block] == 0:
            self._cached.remove(block)
            self._cached.prepend(block)

    def publish(self, block: int, digest: bytes) -> None:
        """Map `digest` to `block`, unless it maps to another block."""
        if self.block_of.setdefault(digest, block) == block:
            self._hash_of[block] = digest

    def replace(self, block: int, digest: bytes) -> None:
        """Map `digest` to `block`, which is held, unless it maps to another block that is; a cached
        one becomes empty."""
        other = self.block_of.get(digest)
        if other is not None and other != block and self.refs[other] == 0:
            self.unpublish(other, digest)
        self.publish(block, digest)

    def unpublish(self, block: int, digest: bytes) -> None:
        """Remove the mapping of `digest` to `block`. No-op if there is none."""
        if self.block_of.get(digest) == block:
            del self.block_of[digest]
            self._hash_of[block] = NO_HASH
            if self.refs[block] == 0:
                self._cached.remove(block)
                self._dissolve(block)

    def forget(self) -> None:
        """Remove all mappings; the pages of cached blocks become empty."""
        self.block_of.clear()
        self._hash_of = [NO_HASH] * self._size
        for block in reversed(list(self._cached)):
            self._dissolve(block)
        self._cached.clear()

    def _evict(self) -> None:
        """Make the pages of the first cached block empty."""
        block = self._cached.pop_oldest()
        del self.block_of[self._hash_of[block]]
        self._hash_of[block] = NO_HASH
        self._dissolve(block)

    def _dissolve(self, block: int) -> None:
        """Make the pages of `block` empty: it has no holder, and isn't cached any more."""
        if rest := self.rest[block]:
            self._empty.extend(reversed(rest))
            self.rest[block] = ()
        self._empty.append(block)

    def check(self, holders: Sequence[Mapping[int, int]]) -> None:
        """Raise `DovetailError` if the state is inconsistent, or differs from `holders`: by group
        and block, the number of tables that hold it."""
        counted = {block: count for group in holders for block, count in group.items()}
        if counted != {block: count for block, count in enumerate(self.refs) if count} or len(
            counted
        ) != sum(map(len, holders)):
            raise DovetailError(
                f"KV pool: the holders counted, {self.refs} by block, differ from those in tables, "
                f"by group: {holders}"
            )
        widths = {
            block: width
            for group, width in zip(holders, self._widths, strict=True)
            for block in group
        }
        held = [len(group) * width for group, width in zip(holders, self._widths, strict=True)]
        if held != self._held:
            raise DovetailError(
                f"KV pool: {self._held} pages are counted as held, by group; tables hold {held}"
            )
        if wrong := {
            block: self.pages(block)
            for block, width in widths.items()
            if len(self.pages(block)) != width
        }:
            raise DovetailError(f"KV pool: blocks with too few or too many pages: {wrong}")
        empty = set(self._empty)
        cached = set(self._cached)
        pages = [
            *self._empty,
            *(page for block in (*cached, *counted) for page in self.pages(block)),
        ]
        if sorted(pages) != list(range(self._size)):
            raise DovetailError(
                f"KV pool: pages lost or in two blocks: empty {sorted(empty)}, cached "
                f"{sorted(cached)}, held {sorted(counted)}"
            )
        findable = {
            block: digest for block, digest in enumerate(self._hash_of) if digest != NO_HASH
        }
        if {block: digest for digest, block in self.block_of.items()} != findable or len(
            self.block_of
        ) != len(findable):
            raise DovetailError("KV pool: the hashes of the blocks and the index of hashes differ")
        wrong_state = findable.keys() ^ (cached | (findable.keys() & counted.keys()))
        if wrong_state:
            raise DovetailError(
                f"KV pool: cached without a hash, or empty with one: blocks {sorted(wrong_state)}"
            )
        if self.ranked is not None:
            self.ranked.check()

    def pages(self, block: int) -> Pages:
        """Return all pages of `block`."""
        return (block, *self.rest[block])


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
        parts = self._parts
        blocks = list[int]()
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
    """Queue of blocks from 0 to `size` - 1, each at most once, in insertion order; any can be
    removed. A doubly linked list whose ends are an extra entry that belongs to no block:

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
        after = self._next
        before = self._before
        end = self._end
        newest = before[end]
        after[block], before[block] = end, newest
        after[newest] = before[end] = block
        self.count += 1

    append_last = append  # the newest is the last to be evicted

    def prepend(self, block: int) -> None:
        """Insert `block`, which must not be in the queue, as the oldest."""
        after = self._next
        before = self._before
        end = self._end
        oldest = after[end]
        after[block], before[block] = oldest, end
        before[oldest] = after[end] = block
        self.count += 1

    def remove(self, block: int) -> None:
        """Remove `block`, which must be in the queue."""
        after = self._next
        before = self._before
        older = before[block]
        newer = after[block]
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
