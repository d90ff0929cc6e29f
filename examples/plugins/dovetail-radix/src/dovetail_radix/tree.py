"""The pool's blocks, and the tree in which those are found that hold computed tokens.

      root of cache_keys ()            a node is a block, the way to it the tokens of all blocks before it and its own;
       ├── (5, 1, 8, 2) block 7        an edge is always one whole block: runs of blocks are not merged
       │    └── (9, 4, 4, 1) block 3
       └── (6, 0, 2, 2) block 1

A block is held (by so many tables), cached (in the tree, and nobody holds it) or empty. Who holds a node holds those above it too, and lets go of
the lowest first, so that a leaf always stands before its parents in the order of eviction. Two cases break that: a block that was computed twice
at once has one node, which the holder of the other copy doesn't hold; and a window lets go of a request's first blocks. Then a node with nodes
below it may be evicted, and these can't be found any more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from dovetail.api.kv_cache import BlockCounts
from dovetail.errors import DovetailError

Tokens = tuple[int, ...]
NO_BLOCK = -1


class Node:
    """A block that can be found. A root has no parent, no tokens and no block."""

    __slots__ = ("block", "children", "parent", "tokens")

    def __init__(self, tokens: Tokens, parent: Node | None, block: int) -> None:
        self.tokens, self.parent, self.block = tokens, parent, block
        self.children: dict[Tokens, Node] = {}

    def below(self) -> Iterator[Node]:
        """This node and all below it."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class RadixTree:
    """Callers take no more than `available` and release only what they hold."""

    def __init__(self, num_blocks: int) -> None:
        self.holders = [0] * num_blocks  # tables that hold it, a block
        self._roots: dict[tuple[str, ...], Node] = {}  # by cache_keys
        self._node_of: list[Node | None] = [None] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[Node, None] = OrderedDict()  # those used longest ago first

    @property
    def available(self) -> int:
        return len(self._empty) + len(self._cached)

    @property
    def counts(self) -> BlockCounts:
        free, cached = len(self._empty), len(self._cached)
        return BlockCounts(free=free, held=len(self.holders) - free - cached, cached=cached)

    def find(self, keys: tuple[str, ...], prefix: Iterable[Tokens]) -> list[Node]:
        """The nodes of the longest beginning of `prefix`, block by block, that is in the tree."""
        node, found = self._roots.get(keys), []
        if node is not None:
            for tokens in prefix:
                node = node.children.get(tokens)
                if node is None:
                    break
                found.append(node)
        return found

    def insert(self, keys: tuple[str, ...], parent: Node | None, tokens: Tokens, block: int) -> Node | None:
        """Let `block` be found by `tokens` below `parent` (None: a root), unless another block is; the node that is. None, with nothing changed,
        if the parent isn't in the tree any more."""
        if parent is None:
            parent = self._roots.setdefault(keys, Node((), None, NO_BLOCK))
        elif self._node_of[parent.block] is not parent:
            return None
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = self._node_of[block] = Node(tokens, parent, block)
        return node

    def remove(self, node: Node) -> None:
        """Neither it nor what is below it can be found any more. Nothing, if it can't be now."""
        if self._node_of[node.block] is not node or node.parent is None:
            return
        del node.parent.children[node.tokens]
        if not node.parent.children and node.parent.parent is None:
            self._roots = {keys: root for keys, root in self._roots.items() if root is not node.parent}
        for gone in node.below():
            self._node_of[gone.block] = None
            if self.holders[gone.block] == 0:
                del self._cached[gone]
                self._empty.append(gone.block)

    def take(self) -> int:
        """A block for one holder. If none is empty, the cached leaf that was used longest ago is evicted."""
        if not self._empty:
            self.remove(next((node for node in self._cached if not node.children), next(iter(self._cached))))
        block = self._empty.pop()
        self.holders[block] = 1
        return block

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder for each of `blocks`, which are held or cached."""
        for block in blocks:
            node = self._node_of[block]
            if self.holders[block] == 0 and node is not None:
                del self._cached[node]
            self.holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder fewer for each. Of those that stay cached, the first are the first to be evicted."""
        for block in blocks:
            self.holders[block] -= 1
            if self.holders[block] == 0:
                node = self._node_of[block]
                if node is None:
                    self._empty.append(block)
                else:
                    self._cached[node] = None

    def clear(self) -> None:
        """Nothing can be found any more; cached blocks are empty."""
        for root in list(self._roots.values()):
            for child in list(root.children.values()):
                self.remove(child)

    def check(self, holders: list[int]) -> None:
        """Raise `DovetailError` if the books contradict each other, or `holders`: how many tables hold it, a block."""
        if self.holders != holders:
            raise DovetailError(f"radix tree: holders are {self.holders}, in tables {holders}")
        nodes = {node.block: node for root in self._roots.values() for node in root.below() if node is not root}
        if nodes != {block: node for block, node in enumerate(self._node_of) if node is not None}:
            raise DovetailError("radix tree: the tree and the index of its blocks differ")
        cached, empty = {node.block for node in self._cached}, set(self._empty)
        held = {block for block, count in enumerate(holders) if count}
        if sorted([*cached, *self._empty, *held]) != list(range(len(holders))) or not cached <= nodes.keys() or empty & nodes.keys():
            raise DovetailError(f"radix tree: blocks lost or in two states: empty {sorted(empty)}, cached {sorted(cached)}, held {sorted(held)}")
