"""The manager of the paged K and V memory: it gives pages to requests. This one shares nothing and has no prefix cache.

If only the order of eviction is to be yours, inherit `dovetail.api.prefix_cache.PrefixCache` instead, and override `rank`."""

from collections.abc import Sequence

from dovetail.api.kv_cache import Allocation, KVCacheManager, KVCapabilities, KVContext, PageCounts, Pages
from dovetail.errors import DovetailError
from dovetail.request import Request
from pydantic import BaseModel


class AcmeKVCache(KVCacheManager):
    """A stack of empty pages, and for each request a table of pages per cache group."""

    capabilities = KVCapabilities(groups=True)

    def __init__(self, options: BaseModel, context: KVContext) -> None:
        super().__init__(options, context)
        self._empty = list(range(context.num_pages))
        self._tables: dict[str, list[list[int]]] = {}  # request id -> its pages, by group
        self._tokens: dict[str, int] = {}  # request id -> tokens asked for

    def pages_needed(self, request: Request, num_tokens: int, without: Sequence[Request] = ()) -> int:
        held = sum(map(len, self._tables.get(request.id, ())))
        freed = sum(len(pages) for other in without for pages in self._table(other))
        return max(0, self.context.layout.pages(num_tokens) - held) - freed

    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        before = self._tokens.get(request.id, 1)
        if num_tokens < before:
            raise DovetailError(f"request {request.id!r} asks for {num_tokens} tokens, after {before}")
        if self.pages_needed(request, num_tokens) > len(self._empty):
            return None
        groups = self.context.layout.groups
        new = []
        for group, pages in zip(groups, self._tables.setdefault(request.id, [[] for _ in groups]), strict=True):
            missing = group.blocks(num_tokens) * group.pages_per_block - len(pages)
            new.append(tuple(self._empty.pop() for _ in range(missing)))
            pages += new[-1]
        self._tokens[request.id] = num_tokens
        return Allocation(tuple(new))

    def tables(self, request: Request) -> tuple[Pages, ...]:
        return tuple(tuple(pages) for pages in self._table(request))

    def free(self, request: Request) -> None:
        for pages in self._tables.pop(request.id, []):
            self._empty += pages
        self._tokens.pop(request.id, None)

    @property
    def counts(self) -> PageCounts:
        empty = len(self._empty)
        return PageCounts(empty=empty, held=self.context.num_pages - empty, cached=0)

    def check_integrity(self) -> None:
        held = [page for table in self._tables.values() for pages in table for page in pages]
        if sorted(held + self._empty) != list(range(self.context.num_pages)):
            raise DovetailError(f"pages were lost or given out twice: empty {self._empty}, held {held}")

    def commit(self, request: Request, upto: int) -> None:
        self._table(request)
        if not 0 <= upto <= self.context.layout.capacity(self._tokens[request.id]):
            raise DovetailError(f"commit of {upto} tokens of request {request.id!r}: its blocks don't hold so many")

    def uncommit(self, request: Request, upto: int) -> None:
        self._table(request)

    def reset(self) -> None:
        """Do nothing: there is no prefix cache to forget."""

    def _table(self, request: Request) -> list[list[int]]:
        if request.id not in self._tables:
            raise DovetailError(f"request {request.id!r} holds no blocks")
        return self._tables[request.id]
