"""The pool's pages, and the tree in which those blocks are found that hold computed tokens.

      root of cache_keys ()                       a node has the tokens that divide all groups' blocks, and the block of each group that ends with
       ├── (5, 1, 8, 2) full 7, window 9          them; the way to it are all tokens before it and its own: runs of nodes are not merged. A group
       │    └── (9, 4, 4, 1) full 3, window -     with a window may lack its block
       └── (6, 0, 2, 2) full 1, window 6

A block, named by its first page, is held (by so many tables) or cached (in the tree, and nobody
holds it); other pages are empty. Who holds a node's blocks of full attention holds those above it
too, and lets go of the lowest first, so that a leaf always stands before its parents in the order
of eviction. A block that was computed twice at once breaks that: it has one node, which the holder
of the other copy doesn't hold. Then a node with nodes below it may be evicted, and these can't be
found any more. The eviction of a block with a window leaves its node as it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dovetail.api.kv_cache import KVLayout, PageCounts, Pages
from dovetail.errors import DovetailError

Tokens = tuple[int, ...]


class Node:
    """Blocks that can be found. A root has no parent, no tokens and no blocks."""

    __slots__ = ("blocks", "children", "parent", "tokens")

    def __init__(self, tokens: Tokens, parent: Node | None, groups: int) -> None:
        self.tokens = tokens
        self.parent = parent
        self.blocks: list[int | None] = [None] * groups
        self.children: dict[Tokens, Node] = {}

    @property
    def is_found(self) -> bool:
        """Whether its parent knows it."""
        return self.parent is None or self.parent.children.get(self.tokens) is self

    def below(self) -> Iterator[Node]:
        """This node and all below it."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class RadixTree:
    """Callers take no more than `available` and release only what they hold, by the group for which
    they took it."""

    def __init__(self, num_pages: int, layout: KVLayout) -> None:
        self.full = frozenset(number for number, group in enumerate(layout.groups) if group.window is None)
        self.widths = [group.pages_per_block for group in layout.groups]
        self.holders = [0] * num_pages  # tables that hold it, a block
        self._rest: list[Pages] = [()] * num_pages  # the pages of a block, except the first
        self._roots: dict[tuple[str, ...], Node] = {}  # by cache_keys
        self._place: list[tuple[Node, int] | None] = [None] * num_pages  # node and group, a block
        self._empty = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # blocks; those used longest ago first
        self._held = [0] * len(self.widths)  # pages, by group

    @property
    def available(self) -> int:
        return len(self.holders) - sum(self._held)

    @property
    def counts(self) -> PageCounts:
        empty = len(self._empty)
        held = sum(self._held)
        return PageCounts(empty, held, self.available - empty, tuple(self._held) if len(self._held) > 1 else ())

    def pages(self, block: int) -> Pages:
        return (block, *self._rest[block])

    def find(self, keys: tuple[str, ...], prefix: Iterable[Tokens]) -> list[Node]:
        """The nodes of the longest beginning of `prefix` that is in the tree; they may lack blocks
        of groups with a window."""
        node = self._roots.get(keys)
        found = []
        if node is not None:
            for tokens in prefix:
                node = node.children.get(tokens)
                if node is None:
                    break
                found.append(node)
        return found

    def insert(self, keys: tuple[str, ...], parent: Node | None, tokens: Tokens, blocks: Sequence[int | None]) -> Node | None:
        """Let `blocks`, one for each group or None, be found by `tokens` below `parent` (None: a
        root), unless others are; the node where they are. None, with nothing changed, if the parent
        isn't in the tree any more."""
        if parent is None:
            parent = self._roots.setdefault(keys, Node((), None, 0))
        elif not parent.is_found:
            return None
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = Node(tokens, parent, len(blocks))
        for group, block in enumerate(blocks):
            if block is not None and node.blocks[group] is None:
                node.blocks[group], self._place[block] = block, (node, group)
        return node

    def remove(self, block: int) -> None:
        """It can't be found any more; nor can what is below it, if it is of full attention.
        Nothing, if it can't be now."""
        place = self._place[block]
        if place is None:
            return
        node, group = place
        if group in self.full:
            self._clear_below(node)
        else:
            self._clear(node, group)
        self._prune(node)

    def take(self, count: int, group: int) -> list[int]:
        """Blocks for one holder. If too few pages are empty, what was used longest ago is evicted,
        but no node above others unless all are."""
        blocks = []
        width = self.widths[group]
        while len(self._empty) < count * width:
            self.remove(next((block for block in self._cached if self._is_leaf(block)), next(iter(self._cached))))
        for _ in range(count):
            block = self._empty.pop()
            self._rest[block] = tuple(self._empty.pop() for _ in range(width - 1))
            self.holders[block] = 1
            blocks.append(block)
        self._held[group] += count * width
        return blocks

    def hold(self, blocks: Iterable[int], group: int) -> None:
        """One more holder for each of `blocks`, which are held or cached."""
        for block in blocks:
            if self.holders[block] == 0:
                del self._cached[block]
                self._held[group] += self.widths[group]
            self.holders[block] += 1

    def release(self, blocks: Iterable[int], group: int) -> None:
        """One holder fewer for each. Of those that stay cached, the first are the first to be
        evicted."""
        for block in blocks:
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self._held[group] -= self.widths[group]
                if self._place[block] is None:
                    self._dissolve(block)
                else:
                    self._cached[block] = None

    def clear(self) -> None:
        """Nothing can be found any more; the pages of cached blocks are empty."""
        for root in self._roots.values():
            self._clear_below(root)
        self._roots.clear()

    def check(self, holders: Sequence[Mapping[int, int]]) -> None:
        """Raise `DovetailError` if the books contradict each other, or `holders`: how many tables
        hold it, a block, by group."""
        held = {block: count for group in holders for block, count in group.items()}
        if held != {block: count for block, count in enumerate(self.holders) if count}:
            raise DovetailError(f"radix tree: holders are {self.holders}, in tables {holders}")
        if self._held != [len(group) * width for group, width in zip(holders, self.widths, strict=True)]:
            raise DovetailError(f"radix tree: {self._held} pages are held by group; in tables are {holders}")
        nodes = [node for root in self._roots.values() for node in root.below()]
        places = {block: (node, group) for node in nodes for group, block in enumerate(node.blocks) if block is not None}
        if places != {block: place for block, place in enumerate(self._place) if place is not None}:
            raise DovetailError("radix tree: the tree and the index of its blocks differ")
        pages = [*self._empty, *(page for block in (*self._cached, *held) for page in self.pages(block))]
        if sorted(pages) != list(range(len(self.holders))) or not self._cached.keys() <= places.keys() or set(self._empty) & places.keys():
            raise DovetailError(f"radix tree: pages lost or in two states: empty {self._empty}, cached {list(self._cached)}, held {sorted(held)}")

    def _is_leaf(self, block: int) -> bool:
        """Whether nothing below a cached block needs it."""
        place = self._place[block]
        return place is None or place[1] not in self.full or not place[0].children

    def _clear(self, node: Node, group: int) -> None:
        """Let a node's block not be found there; its pages are empty if nobody holds it."""
        block, node.blocks[group] = node.blocks[group], None
        if block is not None:
            self._place[block] = None
            if self.holders[block] == 0:
                del self._cached[block]
                self._dissolve(block)

    def _clear_below(self, node: Node) -> None:
        """Let nothing be found at a node, nor below it."""
        for gone in list(node.below()):
            gone.children.clear()
            for group in range(len(gone.blocks)):
                self._clear(gone, group)

    def _prune(self, node: Node) -> None:
        """Take a node out of the tree if it has neither blocks nor children, and then those above
        it."""
        while node.parent is not None and not node.children and not any(block is not None for block in node.blocks):
            if node.is_found:
                del node.parent.children[node.tokens]
            node = node.parent
        if node.parent is None and not node.children:
            self._roots = {keys: root for keys, root in self._roots.items() if root is not node}

    def _dissolve(self, block: int) -> None:
        """The pages of a block are empty from now on."""
        self._empty += reversed(self.pages(block))
        self._rest[block] = ()
