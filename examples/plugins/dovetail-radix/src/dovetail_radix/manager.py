"""The KV-cache manager `radix`: a table for each request, over the blocks of one tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dovetail.api.kv_cache import Allocation, BlockCopy, BlockCounts, KVCacheManager, KVCapabilities, KVContext
from dovetail.errors import DovetailError
from dovetail.request import Request
from pydantic import BaseModel

from dovetail_radix.tree import Node, RadixTree, Tokens


@dataclass(slots=True)
class Table:
    """One request's blocks."""

    request: Request
    blocks: list[int]  # only ever appended to; the first `trimmed` are no longer its own
    tokens: int  # asked for
    path: list[Node] = field(default_factory=list)  # of its committed blocks; a node's block may be another's copy of the same tokens
    found: int = 0  # of the path: computed by others
    trimmed: int = 0
    publishes: bool = True  # False: what it builds on was forgotten or evicted

    @property
    def own(self) -> list[int]:
        return self.blocks[self.trimmed :]


class RadixCache(KVCacheManager):
    """Costs: growing by a block and `counts` are O(1), `lookup` is O(tokens found), `free` O(blocks held)."""

    capabilities = KVCapabilities(reuse=True, fork=True, trim=True)

    def __init__(self, options: BaseModel, context: KVContext) -> None:
        super().__init__(options, context)
        self._size = context.layout.block_size
        self._tree = RadixTree(context.num_blocks)
        self._tables: dict[str, Table] = {}  # by request id
        self._copies: list[BlockCopy] = []

    def lookup(self, request: Request) -> int:
        return len(self._hits(request)) * self._size

    def blocks_needed(self, request: Request, num_tokens: int, without: Sequence[Request] = ()) -> int:
        wanted = -(-num_tokens // self._size)
        leaving = Counter(block for other in without for block in self._table(other).own)
        freed = sum(self._tree.holders[block] == count for block, count in leaving.items())
        if request.id in self._tables:
            return max(0, wanted - len(self._table(request).blocks)) - freed
        return self._first_cost(self._hits(request), wanted, leaving) - freed

    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        if request.id not in self._tables:
            return self._allocate_first(request, num_tokens)
        table = self._table(request)
        if num_tokens < table.tokens:
            raise DovetailError(f"radix: request {request.id!r} asks for {num_tokens} tokens, after {table.tokens}")
        missing = max(0, -(-num_tokens // self._size) - len(table.blocks))
        if missing > self._tree.available:
            return None
        blocks = [self._tree.take() for _ in range(missing)]
        table.tokens = num_tokens
        table.blocks += blocks
        return Allocation(tuple(blocks))

    def commit(self, request: Request, upto: int) -> None:
        table = self._table(request)
        if not 0 <= upto <= min(request.num_tokens, len(table.blocks) * self._size):
            raise DovetailError(f"radix: commit of {upto} tokens of request {request.id!r}, which knows {request.num_tokens}")
        for index in range(len(table.path), upto // self._size if table.publishes else 0):
            parent = table.path[-1] if table.path else None
            node = None
            if index >= table.trimmed:
                node = self._tree.insert(request.cache_keys, parent, self._tokens(request, index), table.blocks[index])
            if node is None:
                table.publishes = False
                return
            table.path.append(node)

    def uncommit(self, request: Request, upto: int) -> None:
        table = self._table(request)
        kept = max(upto // self._size, table.found)
        for index in range(len(table.path) - 1, kept - 1, -1):
            node = table.path.pop()
            if node.block == table.blocks[index]:
                self._tree.remove(node)

    def fork(self, parent: Request, child: Request, num_tokens: int) -> Allocation | None:
        source = self._table(parent)
        shared, rest = divmod(num_tokens, self._size)
        if child.id in self._tables or not source.trimmed * self._size < num_tokens <= len(source.blocks) * self._size:
            raise DovetailError(f"radix: request {child.id!r} can't take over {num_tokens} tokens of {parent.id!r}: it has blocks, or not that many")
        if rest and not self._tree.available:
            return None
        blocks = source.blocks[:shared]
        self._tree.hold(blocks[source.trimmed :])
        if rest:
            blocks.append(self._tree.take())
            self._copies.append(BlockCopy(source.blocks[shared], blocks[shared]))
        path = source.path[:shared]
        self._tables[child.id] = Table(child, blocks, num_tokens, path, len(path), source.trimmed, source.publishes)
        return Allocation(tuple(blocks), cached=num_tokens)

    def take_copies(self) -> Sequence[BlockCopy]:
        copies, self._copies = self._copies, []
        return copies

    def free(self, request: Request) -> None:
        table = self._tables.get(request.id)
        if table is not None and table.request is request:
            del self._tables[request.id]
            self._tree.release(reversed(table.own))

    def trim(self, request: Request, first_needed_token: int) -> None:
        table = self._table(request)
        unneeded = min(first_needed_token // self._size, len(table.blocks))
        if unneeded > table.trimmed:
            self._tree.release(reversed(table.blocks[table.trimmed : unneeded]))
            table.trimmed = unneeded

    def reset(self) -> None:
        self._tree.clear()
        for table in self._tables.values():
            table.publishes = False

    @property
    def counts(self) -> BlockCounts:
        return self._tree.counts

    def check_integrity(self) -> None:
        holders = Counter(block for table in self._tables.values() for block in table.own)
        self._tree.check([holders[block] for block in range(self.context.num_blocks)])

    def _allocate_first(self, request: Request, num_tokens: int) -> Allocation | None:
        if num_tokens < 1:
            raise DovetailError(f"radix: request {request.id!r} asks for {num_tokens} tokens")
        hits, wanted = self._hits(request), -(-num_tokens // self._size)
        if self._first_cost(hits, wanted, {}) > self._tree.available:
            return None
        blocks = [node.block for node in hits]
        self._tree.hold(blocks)  # before any is taken, so that none of these is
        blocks += [self._tree.take() for _ in range(wanted - len(hits))]
        cached = len(hits) * self._size
        self._tables[request.id] = Table(request, blocks, max(num_tokens, cached), hits, len(hits))
        return Allocation(tuple(blocks), cached)

    def _first_cost(self, hits: Sequence[Node], wanted: int, leaving: Mapping[int, int]) -> int:
        """Return how many available blocks a request that holds none would take, once the `leaving` holders (block -> their number) are freed."""
        unheld = sum(self._tree.holders[node.block] == leaving.get(node.block, 0) for node in hits)
        return unheld + max(0, wanted - len(hits))

    def _hits(self, request: Request) -> list[Node]:
        """The blocks of the longest beginning of `request` that can be found; never that of its last known token."""
        if request.params.prompt_logprobs is not None:
            return []

        def prefix() -> Iterator[Tokens]:
            for index in range((request.num_tokens - 1) // self._size):
                yield self._tokens(request, index)

        return self._tree.find(request.cache_keys, prefix())

    def _tokens(self, request: Request, index: int) -> Tokens:
        """The tokens of its block number `index`, which are known."""
        start, end, prompt = index * self._size, (index + 1) * self._size, request.prompt_tokens
        tokens = request.prompt_token_ids[start:end]
        return tokens if end <= prompt else (*tokens, *request.output_token_ids[max(0, start - prompt) : end - prompt])

    def _table(self, request: Request) -> Table:
        table = self._tables.get(request.id)
        if table is None or table.request is not request:
            raise DovetailError(f"radix: request {request.id!r} holds no blocks")
        return table
