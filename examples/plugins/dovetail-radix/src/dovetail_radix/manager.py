"""The KV-cache manager `radix`: tables for each request, over the blocks of one tree."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dovetail.api.kv_cache import HOLE, Allocation, KVCacheManager, KVCapabilities, KVContext, PageCopy, PageCounts, Pages
from dovetail.errors import DovetailError
from dovetail.request import Request
from pydantic import BaseModel

from dovetail_radix.tree import Node, RadixTree, Tokens


@dataclass(slots=True)
class Table:
    """One request's blocks."""

    request: Request
    blocks: list[list[int]]  # by group, only ever appended to
    trimmed: list[int]  # by group: the first that are no longer its own, or HOLEs
    tokens: int  # asked for
    # of its committed blocks; a node's block may be another's copy of the same tokens
    path: list[Node] = field(default_factory=list)
    found: int = 0  # of the path: computed by others
    publishes: bool = True  # False: what it builds on was forgotten or evicted

    def own(self, group: int) -> list[int]:
        return self.blocks[group][self.trimmed[group] :]


class Hit(NamedTuple):
    """Nodes of a prefix, and by group the blocks that later tokens see."""

    path: list[Node]
    blocks: list[list[int]]


class RadixCache(KVCacheManager):
    """Costs: growing by a block and `counts` are O(1), `lookup` is O(tokens found), `free` O(blocks
    held)."""

    capabilities = KVCapabilities(reuse=True, fork=True, trim=True, groups=True)

    def __init__(self, options: BaseModel, context: KVContext) -> None:
        super().__init__(options, context)
        self._layout, self._groups = context.layout, list(enumerate(context.layout.groups))
        self._size = math.gcd(*(group.block_tokens for group in context.layout.groups))  # of a node
        self._tree = RadixTree(context.num_pages, context.layout)
        self._tables: dict[str, Table] = {}  # by request id
        self._copies: list[PageCopy] = []

    def lookup(self, request: Request) -> int:
        return len(self._hit(request).path) * self._size

    def pages_needed(self, request: Request, num_tokens: int, without: Sequence[Request] = ()) -> int:
        leaving = [self._holders([self._table(other) for other in without], number) for number, _ in self._groups]
        freed = [sum(self._tree.holders[block] == count for block, count in group.items()) for group in leaving]
        if request.id in self._tables:
            needed = self._missing(self._table(request), num_tokens)
        else:
            needed = self._first_cost(self._hit(request), num_tokens, leaving)
        return self._pages_of(needed) - self._pages_of(freed)

    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        if request.id not in self._tables:
            return self._allocate_first(request, num_tokens)
        table = self._table(request)
        if num_tokens < table.tokens:
            raise DovetailError(f"radix: request {request.id!r} asks for {num_tokens} tokens, after {table.tokens}")
        missing = self._missing(table, num_tokens)
        if self._pages_of(missing) > self._tree.available:
            return None
        table.tokens = num_tokens
        new = [self._tree.take(count, group) for group, count in enumerate(missing)]
        for blocks, more in zip(table.blocks, new, strict=True):
            blocks += more
        return Allocation(self._pages(new))

    def tables(self, request: Request) -> tuple[Pages, ...]:
        table = self._table(request)
        return self._pages([[HOLE] * trimmed + table.own(group) for group, trimmed in enumerate(table.trimmed)])

    def commit(self, request: Request, upto: int) -> None:
        table = self._table(request)
        if not 0 <= upto <= min(request.num_tokens, self._layout.capacity(table.tokens)):
            raise DovetailError(f"radix: commit of {upto} tokens of request {request.id!r}, which knows {request.num_tokens}")
        for index in range(len(table.path), upto // self._size if table.publishes else 0):
            parent = table.path[-1] if table.path else None
            node = self._tree.insert(request.cache_keys, parent, self._tokens(request, index), self._blocks_of(table, index))
            if node is None:
                table.publishes = False
                return
            table.path.append(node)

    def uncommit(self, request: Request, upto: int) -> None:
        table = self._table(request)
        kept = max(upto // self._size, table.found)
        for index in range(len(table.path) - 1, kept - 1, -1):
            node = table.path.pop()
            for block in self._blocks_of(table, index, released=True):
                if block is not None and block in node.blocks:
                    self._tree.remove(block)

    def fork(self, parent: Request, child: Request, num_tokens: int) -> Allocation | None:
        source = self._table(parent)
        if child.id in self._tables or not 1 <= num_tokens <= self._layout.capacity(source.tokens):
            raise DovetailError(f"radix: request {child.id!r} can't take over {num_tokens} tokens of {parent.id!r}: it has blocks, or not that many")
        unseen = [group.first_visible_block(num_tokens) for _, group in self._groups]
        for number, group in self._groups:
            if unseen[number] < min(source.trimmed[number], group.blocks(num_tokens)):
                raise DovetailError(f"radix: request {parent.id!r} has released blocks that token {num_tokens} of {child.id!r} sees")
        partial = [int(num_tokens % group.block_tokens > 0) for _, group in self._groups]
        if self._pages_of(partial) > self._tree.available:
            return None
        tables = []
        for number, group in self._groups:
            full = num_tokens // group.block_tokens
            shared = source.blocks[number][unseen[number] : full]
            self._tree.hold(shared, number)
            copies = self._tree.take(partial[number], number)
            for copy in copies:
                pages = zip(self._tree.pages(source.blocks[number][full]), self._tree.pages(copy), strict=True)
                self._copies += [PageCopy(src, dst) for src, dst in pages]
            tables.append([HOLE] * unseen[number] + shared + copies)
        path = source.path[: num_tokens // self._size]
        self._tables[child.id] = Table(child, tables, unseen, num_tokens, path, len(path), source.publishes)
        return Allocation(self._pages(tables), cached=num_tokens)

    def take_copies(self) -> Sequence[PageCopy]:
        copies = self._copies
        self._copies = []
        return copies

    def free(self, request: Request) -> None:
        table = self._tables.get(request.id)
        if table is not None and table.request is request:
            del self._tables[request.id]
            for number, _ in reversed(self._groups):
                self._tree.release(reversed(table.own(number)), number)

    def trim(self, request: Request, computed: int) -> None:
        table = self._table(request)
        for number, group in self._groups:
            unneeded = min(group.first_visible_block(computed), len(table.blocks[number]))
            if unneeded > table.trimmed[number]:
                self._tree.release(reversed(table.blocks[number][table.trimmed[number] : unneeded]), number)
                table.trimmed[number] = unneeded

    def reset(self) -> None:
        self._tree.clear()
        for table in self._tables.values():
            table.publishes = False

    @property
    def counts(self) -> PageCounts:
        return self._tree.counts

    def check_integrity(self) -> None:
        self._tree.check([self._holders(self._tables.values(), number) for number, _ in self._groups])

    def _allocate_first(self, request: Request, num_tokens: int) -> Allocation | None:
        if num_tokens < 1:
            raise DovetailError(f"radix: request {request.id!r} asks for {num_tokens} tokens")
        hit = self._hit(request)
        cached = len(hit.path) * self._size
        if self._pages_of(self._first_cost(hit, num_tokens, [{} for _ in self._groups])) > self._tree.available:
            return None
        for number, _ in self._groups:
            # before any is taken, so that none of these is
            self._tree.hold(hit.blocks[number], number)
        tokens = max(num_tokens, cached)
        tables = []
        unseen = []
        for number, group in self._groups:
            found = cached // group.block_tokens
            unseen.append(found - len(hit.blocks[number]))
            tables.append([HOLE] * unseen[-1] + hit.blocks[number] + self._tree.take(group.blocks(tokens) - found, number))
        self._tables[request.id] = Table(request, tables, unseen, tokens, hit.path, len(hit.path))
        return Allocation(self._pages(tables), cached)

    def _first_cost(self, hit: Hit, num_tokens: int, leaving: Sequence[Mapping[int, int]]) -> list[int]:
        """Return by group how many blocks a request that holds none would take, once the `leaving`
        holders (block -> their number) are freed."""
        cached = len(hit.path) * self._size
        holders = self._tree.holders
        unheld = [sum(holders[block] == gone.get(block, 0) for block in own) for own, gone in zip(hit.blocks, leaving, strict=True)]
        return [unheld[number] + max(0, group.blocks(num_tokens) - cached // group.block_tokens) for number, group in self._groups]

    def _missing(self, table: Table, num_tokens: int) -> list[int]:
        """Return by group how many blocks it lacks for `num_tokens` tokens."""
        return [max(0, group.blocks(num_tokens) - len(table.blocks[number])) for number, group in self._groups]

    def _pages_of(self, blocks: Sequence[int]) -> int:
        """Return the pages of so many blocks of each group."""
        return sum(count * width for count, width in zip(blocks, self._tree.widths, strict=True))

    def _pages(self, tables: Sequence[Sequence[int]]) -> tuple[Pages, ...]:
        """Return the pages of blocks, by group."""
        holes = [(HOLE,) * width for width in self._tree.widths]
        return tuple(
            tuple(page for block in blocks for page in (hole if block == HOLE else self._tree.pages(block)))
            for blocks, hole in zip(tables, holes, strict=True)
        )

    def _holders(self, tables: Iterable[Table], group: int) -> Mapping[int, int]:
        """Return how many of `tables` hold it, a block of `group`."""
        return Counter(block for table in tables for block in table.own(group))

    def _blocks_of(self, table: Table, index: int, *, released: bool = False) -> list[int | None]:
        """Return the blocks that end with its node number `index`, by group; None for those that it
        has released, unless these are asked for."""
        blocks: list[int | None] = [None] * len(self._groups)
        for number, group in self._groups:
            place, rest = divmod((index + 1) * self._size, group.block_tokens)
            if not rest and table.blocks[number][place - 1] != HOLE and (released or place > table.trimmed[number]):
                blocks[number] = table.blocks[number][place - 1]
        return blocks

    def _hit(self, request: Request) -> Hit:
        """The longest beginning of `request` that every group accepts; never its last known
        token."""
        if request.params.prompt_logprobs is not None:
            return Hit([], [[] for _ in self._groups])

        def prefix() -> Iterator[Tokens]:
            for index in range((request.num_tokens - 1) // self._size):
                yield self._tokens(request, index)

        path = self._tree.find(request.cache_keys, prefix())
        # by group, the blocks after the last that is missing
        runs: list[list[int]] = [[] for _ in self._groups]
        hit = Hit([], [[] for _ in self._groups])
        for length, node in enumerate(path, 1):
            tokens = length * self._size
            for (number, group), run in zip(self._groups, runs, strict=True):
                if tokens % group.block_tokens == 0:
                    block = node.blocks[number]
                    if block is None:
                        run.clear()
                    else:
                        run.append(block)
            seen = [tokens // group.block_tokens - group.first_visible_block(tokens) for _, group in self._groups]
            if tokens % self._layout.hit_tokens == 0 and all(len(run) >= count for run, count in zip(runs, seen, strict=True)):
                hit = Hit(path[:length], [run[len(run) - count :] for run, count in zip(runs, seen, strict=True)])
        return hit

    def _tokens(self, request: Request, index: int) -> Tokens:
        """The tokens of its node number `index`, which are known."""
        start = index * self._size
        end = (index + 1) * self._size
        prompt = request.prompt_tokens
        tokens = request.prompt_token_ids[start:end]
        return tokens if end <= prompt else (*tokens, *request.output_token_ids[max(0, start - prompt) : end - prompt])

    def _table(self, request: Request) -> Table:
        table = self._tables.get(request.id)
        if table is None or table.request is not request:
            raise DovetailError(f"radix: request {request.id!r} holds no blocks")
        return table
