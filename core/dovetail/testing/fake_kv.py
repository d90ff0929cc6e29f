"""Minimal KV-cache manager: a block pool and a table per request, without sharing or prefix caching."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from dovetail.api.kv_cache import Allocation, BlockCopy, BlockCounts, KVCacheManager, KVCapabilities, KVContext
from dovetail.errors import DovetailError
from dovetail.request import Request


class FakeKVCache(KVCacheManager):
    """Manager whose `lookup` returns `hits[request.id]`, or 0, so that tests can simulate cached tokens. Declares `reuse` if `hits` aren't
    empty."""

    capabilities = KVCapabilities(reuse=False, fork=False, trim=False)

    def __init__(self, options: BaseModel, context: KVContext, hits: dict[str, int] | None = None) -> None:
        super().__init__(options, context)
        self._free = list(range(context.num_blocks - 1, -1, -1))
        self._tables: dict[str, list[int]] = {}
        self._tokens: dict[str, int] = {}  # request id -> tokens requested
        self._hits = hits or {}
        if hits is not None:
            self.capabilities = KVCapabilities(reuse=True, fork=False, trim=False)

    def lookup(self, request: Request) -> int:
        return self._hits.get(request.id, 0)

    def blocks_needed(self, request: Request, num_tokens: int, without: Sequence[Request] = ()) -> int:
        freed = sum(len(self._tables[other.id]) for other in without)
        return max(0, -(-num_tokens // self.context.layout.block_size) - len(self._tables.get(request.id, ()))) - freed

    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        if num_tokens < self._tokens.get(request.id, 1):
            raise DovetailError(f"allocate({num_tokens} tokens) of {request!r}, which had {self._tokens.get(request.id, 0)}")
        needed = self.blocks_needed(request, num_tokens)
        if needed > len(self._free):
            return None
        first = request.id not in self._tables
        blocks = tuple(self._free.pop() for _ in range(needed))
        self._tables.setdefault(request.id, []).extend(blocks)
        self._tokens[request.id] = num_tokens
        return Allocation(blocks, self.lookup(request) if first else 0)

    def free(self, request: Request) -> None:
        self._free.extend(self._tables.pop(request.id, ()))
        self._tokens.pop(request.id, None)

    @property
    def counts(self) -> BlockCounts:
        return BlockCounts(len(self._free), self.context.num_blocks - len(self._free), 0)

    def check_integrity(self) -> None:
        held = [block for table in self._tables.values() for block in table]
        if sorted(held + self._free) != list(range(self.context.num_blocks)):
            raise DovetailError("blocks were lost or given out twice")

    def fork(self, parent: Request, child: Request, num_tokens: int) -> Allocation | None:
        raise DovetailError("this manager can't fork, as declared")

    def commit(self, request: Request, upto: int) -> None:
        if request.id not in self._tables:
            raise DovetailError(f"commit of {request!r}, which holds no blocks")

    def uncommit(self, request: Request, upto: int) -> None: ...

    def take_copies(self) -> Sequence[BlockCopy]:
        return ()

    def trim(self, request: Request, first_needed_token: int) -> None: ...

    def reset(self) -> None: ...
