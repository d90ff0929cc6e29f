"""Minimal KV-cache manager: a page pool and tables per request, without sharing or prefix
caching."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from dovetail.api.kv_cache import (
    Allocation,
    KVCacheManager,
    KVCapabilities,
    KVContext,
    PageCounts,
    Pages,
)
from dovetail.errors import DovetailError
from dovetail.request import Request


class FakeKVCache(KVCacheManager):
    """Manager whose `lookup` returns `hits[request.id]`, or 0, so that tests can simulate cached
    tokens. Declares `reuse` if `hits` aren't empty, and then no `states`: there are no checkpoints.
    Blocks before a window are never released."""

    capabilities = KVCapabilities(groups=True, states=True)

    def __init__(
        self, options: BaseModel, context: KVContext, hits: dict[str, int] | None = None
    ) -> None:
        super().__init__(options, context)
        self._free = list(range(context.num_pages - 1, -1, -1))
        self._tables: dict[str, list[list[int]]] = {}  # request id -> pages, by group
        self._tokens: dict[str, int] = {}  # request id -> tokens requested
        self._hits = hits or {}
        if hits is not None:
            self.capabilities = KVCapabilities(reuse=True, groups=True)

    def lookup(self, request: Request) -> int:
        return self._hits.get(request.id, 0)

    def pages_needed(
        self, request: Request, num_tokens: int, without: Sequence[Request] = ()
    ) -> int:
        held = sum(map(len, self._tables.get(request.id, ())))
        freed = sum(len(own) for other in without for own in self._tables[other.id])
        return max(0, self.context.layout.pages(num_tokens) - held) - freed

    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        if num_tokens < self._tokens.get(request.id, 1):
            raise DovetailError(
                f"allocate({num_tokens} tokens) of {request!r}, which had "
                f"{self._tokens.get(request.id, 0)}"
            )
        if self.pages_needed(request, num_tokens) > len(self._free):
            return None
        first = request.id not in self._tables
        tables = self._tables.setdefault(request.id, [[] for _ in self.context.layout.groups])
        pages = []
        for group, own in zip(self.context.layout.groups, tables, strict=True):
            new = [
                self._free.pop()
                for _ in range(group.blocks(num_tokens) * group.pages_per_block - len(own))
            ]
            own += new
            pages.append(tuple(new))
        self._tokens[request.id] = num_tokens
        return Allocation(tuple(pages), self.lookup(request) if first else 0)

    def tables(self, request: Request) -> tuple[Pages, ...]:
        if request.id not in self._tables:
            raise DovetailError(f"tables of {request!r}, which holds no blocks")
        return tuple(map(tuple, self._tables[request.id]))

    def free(self, request: Request) -> None:
        for own in self._tables.pop(request.id, ()):
            self._free.extend(own)
        self._tokens.pop(request.id, None)

    @property
    def counts(self) -> PageCounts:
        return PageCounts(len(self._free), self.context.num_pages - len(self._free), 0)

    def check_integrity(self) -> None:
        held = [page for tables in self._tables.values() for own in tables for page in own]
        if sorted(held + self._free) != list(range(self.context.num_pages)):
            raise DovetailError("pages were lost or given out twice")

    def commit(self, request: Request, upto: int) -> None:
        if request.id not in self._tables:
            raise DovetailError(f"commit of {request!r}, which holds no blocks")

    def uncommit(self, request: Request, upto: int) -> None: ...

    def reset(self) -> None: ...
