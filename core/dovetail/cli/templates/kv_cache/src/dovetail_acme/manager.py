"""The manager of the paged K and V memory: it gives blocks to requests. This one shares no blocks and has no prefix cache."""

from collections.abc import Sequence

from dovetail.api.kv_cache import Allocation, BlockCopy, BlockCounts, KVCacheManager, KVCapabilities, KVContext
from dovetail.errors import DovetailError
from dovetail.request import Request
from pydantic import BaseModel


class AcmeKVCache(KVCacheManager):
    """A stack of empty blocks, and a table of blocks for each request."""

    capabilities = KVCapabilities(reuse=False, fork=False, trim=False)

    def __init__(self, options: BaseModel, context: KVContext) -> None:
        super().__init__(options, context)
        self._free = list(range(context.num_blocks))
        self._tables: dict[str, list[int]] = {}  # request id -> its blocks
        self._tokens: dict[str, int] = {}  # request id -> tokens asked for

    def lookup(self, request: Request) -> int:
        return 0

    def blocks_needed(self, request: Request, num_tokens: int, without: Sequence[Request] = ()) -> int:
        wanted = -(-num_tokens // self.context.layout.block_size)
        freed = sum(len(self._table(other)) for other in without)
        return max(0, wanted - len(self._tables.get(request.id, ()))) - freed

    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        before = self._tokens.get(request.id, 1)
        if num_tokens < before:
            raise DovetailError(f"request {request.id!r} asks for {num_tokens} tokens, after {before}")
        needed = self.blocks_needed(request, num_tokens)
        if needed > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(needed)]
        self._tables.setdefault(request.id, []).extend(blocks)
        self._tokens[request.id] = num_tokens
        return Allocation(tuple(blocks))

    def free(self, request: Request) -> None:
        self._free += self._tables.pop(request.id, [])
        self._tokens.pop(request.id, None)

    @property
    def counts(self) -> BlockCounts:
        free = len(self._free)
        return BlockCounts(free=free, held=self.context.num_blocks - free, cached=0)

    def check_integrity(self) -> None:
        held = [block for table in self._tables.values() for block in table]
        if sorted(held + self._free) != list(range(self.context.num_blocks)):
            raise DovetailError(f"blocks were lost or given out twice: free {self._free}, held {held}")

    def commit(self, request: Request, upto: int) -> None:
        if not 0 <= upto <= len(self._table(request)) * self.context.layout.block_size:
            raise DovetailError(f"commit of {upto} tokens of request {request.id!r}: its blocks don't hold so many")

    def uncommit(self, request: Request, upto: int) -> None:
        self._table(request)

    def trim(self, request: Request, first_needed_token: int) -> None:
        self._table(request)

    def fork(self, parent: Request, child: Request, num_tokens: int) -> Allocation | None:
        raise DovetailError("this manager can't fork: its capabilities say so")

    def take_copies(self) -> Sequence[BlockCopy]:
        return ()

    def reset(self) -> None:
        """Do nothing: there is no prefix cache to forget."""

    def _table(self, request: Request) -> list[int]:
        if request.id not in self._tables:
            raise DovetailError(f"request {request.id!r} holds no blocks")
        return self._tables[request.id]
