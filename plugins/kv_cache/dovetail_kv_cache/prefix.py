"""KV-cache manager `prefix`: requests that begin with the same tokens share the blocks of this prefix.

A full block is found by a hash of all tokens up to its end (`HashChain`). Blocks without holders stay findable until the space is needed; then the
least recently used is evicted first, and within a request the last block, since a prefix is useful without its end, but not the end without its
beginning. Hashed blocks are the idea of vLLM's automatic prefix caching; reuse by longest prefix is that of RadixAttention (SGLang,
arXiv:2312.07104).

If two requests compute the same block at the same time, only one of the two copies can be found; the other becomes empty when its holder
releases it.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from xxhash import xxh3_128_digest

from dovetail.api.kv_cache import Allocation, BlockCopy, BlockCounts, KVCacheManager, KVCapabilities, KVContext
from dovetail.errors import DovetailError
from dovetail.request import Request
from dovetail_kv_cache.pool import BlockPool

TOKEN_BYTES = 8

HashName = Literal["xxh3", "sha256"]
Digest = Callable[[bytes], bytes]
NOTHING = Allocation(())


def make_digest(name: HashName) -> Digest:
    """Return the hash function `name`; each xxh3 has its own secret seed."""
    if name == "sha256":
        return lambda data: hashlib.sha256(data).digest()
    seed = int.from_bytes(os.urandom(8), "little")
    return lambda data: xxh3_128_digest(data, seed)


@dataclass(frozen=True, slots=True)
class Beginning:
    """Hashes of a chain, for reuse by a chain of another request with the same beginning. Doesn't keep the request."""

    root: bytes
    prompt: NDArray[np.int64]  # [tokens]
    hashes: list[bytes]  # the chain's own list, which grows

    def same_tokens(self, prompt: NDArray[np.int64]) -> int:
        """Return the number of leading tokens that both share."""
        most = min(len(self.prompt), len(prompt))
        differ = self.prompt[:most] != prompt[:most]
        return int(differ.argmax()) if differ.any() else most


class HashChain:
    """Hashes of one request's full blocks, each computed once: `hashes[i]` covers tokens 0 … (i + 1) * block_size - 1.

    A block's hash covers its tokens and the previous hash, hence every token up to its end; the chain starts with a hash of the request's
    `cache_keys`. Two prefixes with the same hash would share K and V that belong to one of them. By accident this has a probability of 1 in 10^20 for
    a billion blocks with 128-bit hashes. Deliberately: no two texts with the same SHA-256 are known. XXH3 isn't designed to withstand attacks; its
    seed is drawn for each cache, so that collisions can't be prepared. No decision depends on the values of hashes, so runs stay reproducible."""

    __slots__ = ("_block_size", "_digest", "_root", "hashes", "request")

    def __init__(self, request: Request, block_size: int, digest: Digest, like: Beginning | None = None) -> None:
        """Create a chain that copies the hashes of a common beginning from `like`, a chain with the same `block_size` and `digest`."""
        self.request = request
        self._block_size = block_size
        self._digest = digest
        self._root = digest(repr(request.cache_keys).encode())
        self.hashes: list[bytes] = []
        if like is not None and like.root == self._root:
            self.hashes = like.hashes[: like.same_tokens(request.prompt_array) // block_size]

    @property
    def beginning(self) -> Beginning:
        return Beginning(self._root, self.request.prompt_array, self.hashes)

    def extend(self, num_blocks: int) -> list[bytes]:
        """Return the hashes of at least the first `num_blocks` blocks, which must be full of known tokens."""
        hashes = self.hashes
        if len(hashes) >= num_blocks:
            return hashes
        data = _token_bytes(self.request, len(hashes) * self._block_size, num_blocks * self._block_size)
        width, digest = self._block_size * TOKEN_BYTES, self._digest
        parent = hashes[-1] if hashes else self._root
        for start in range(0, len(data), width):
            parent = digest(parent + data[start : start + width])
            hashes.append(parent)
        return hashes


def _token_bytes(request: Request, start: int, end: int) -> bytes:
    """Return token ids `start` … `end` - 1 of prompt and output, `TOKEN_BYTES` each."""
    prompt, data = request.prompt_tokens, request.prompt_array[start:end].tobytes()
    if end > prompt:
        data += array("q", request.output_token_ids[max(0, start - prompt) : end - prompt]).tobytes()
    return data


class PrefixOptions(BaseModel):
    """Options of the KV-cache manager `prefix`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reuse: bool = Field(True, description="Reuse K and V across requests, and after a preemption.")
    hash: HashName = Field(
        "xxh3", description="Hash function of blocks: xxh3 is fast; sha256 prevents collisions that an untrusted user might construct."
    )


class _Table:
    """Blocks and progress of one request."""

    __slots__ = ("blocks", "num_committed", "num_found", "num_tokens", "num_trimmed", "publishes", "request")

    def __init__(self, request: Request, blocks: list[int], num_tokens: int, num_found: int) -> None:
        self.request = request
        self.blocks = blocks  # append-only; the first `num_trimmed` are no longer held
        self.num_tokens = num_tokens  # requested
        self.num_trimmed = 0
        self.num_committed = self.num_found = num_found  # in blocks; other requests computed the first `num_found`
        self.publishes = True  # False after a `reset` while it was running: its K and V are outdated

    @property
    def own(self) -> list[int]:
        """Return the blocks that the request holds."""
        return self.blocks[self.num_trimmed :] if self.num_trimmed else self.blocks


class _Found(NamedTuple):
    """Result of the last search, with its arguments."""

    hashes: list[bytes]  # the list of a chain, which identifies it
    limit: int  # blocks
    changes: int  # `BlockIndex.changes` at the search
    blocks: list[int]

    def is_of(self, hashes: list[bytes], limit: int, changes: int) -> bool:
        return self.hashes is hashes and (self.limit, self.changes) == (limit, changes)


class PrefixCache(KVCacheManager):
    """The manager. Growing by one block, `counts` and `available_blocks` are O(1); `lookup` is O(blocks found), `free` O(blocks held). A request's
    tokens are hashed once: on its first lookup or commit, then block by block as it generates; the hashes are kept until `free`. Hashes of a
    beginning shared with the previous request aren't recomputed."""

    capabilities = KVCapabilities(reuse=True, fork=True, trim=True)
    options: PrefixOptions

    def __init__(self, options: PrefixOptions, context: KVContext) -> None:
        super().__init__(options, context)
        if not options.reuse:
            self.capabilities = KVCapabilities(reuse=False, fork=True, trim=True)
        self._block_size = context.layout.block_size
        self._digest = make_digest(options.hash)
        self._pool = BlockPool(context.num_blocks)
        self._tables: dict[str, _Table] = {}  # request id -> its table
        self._chains: dict[str, HashChain] = {}
        self._latest: Beginning | None = None  # beginning of the newest chain, for reuse by the next request
        self._found = _Found([], 0, -1, [])
        self._copies: list[BlockCopy] = []

    def lookup(self, request: Request) -> int:
        return len(self._hits(request)) * self._block_size

    def blocks_needed(self, request: Request, num_tokens: int, without: Sequence[Request] = ()) -> int:
        wanted = -(-num_tokens // self._block_size)
        leaving = Counter(block for other in without for block in self._table(other, "without").own) if without else {}
        freed = sum(self._pool.refs[block] == holders for block, holders in leaving.items())
        table = self._tables.get(request.id)
        if table is not None:
            return max(0, wanted - len(table.blocks)) - freed
        return self._first_cost(self._hits(request), wanted, leaving) - freed

    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        table = self._tables.get(request.id)
        if table is None:
            return self._allocate_first(request, num_tokens)
        if num_tokens < table.num_tokens or table.request is not request:
            raise self._misuse(request, f"allocate({num_tokens} tokens), after {table.num_tokens}", table)
        missing = -(-num_tokens // self._block_size) - len(table.blocks)
        if missing <= 0:
            table.num_tokens = num_tokens
            return NOTHING
        if missing > self._pool.available:
            return None
        table.num_tokens = num_tokens
        if missing == 1:  # the usual case, a decode
            block = self._pool.take()
            table.blocks.append(block)
            return Allocation((block,))
        blocks = tuple(self._pool.take() for _ in range(missing))
        table.blocks.extend(blocks)
        return Allocation(blocks)

    def commit(self, request: Request, upto: int) -> None:
        table = self._table(request, "commit")
        if not 0 <= upto <= min(request.num_tokens, len(table.blocks) * self._block_size):
            raise self._misuse(request, f"commit({upto} tokens), {request.num_tokens} of them known,", table)
        full = upto // self._block_size
        if full <= table.num_committed or not table.publishes or not self.options.reuse:
            return
        hashes = self._chain(request).extend(full)
        for index in range(max(table.num_committed, table.num_trimmed), full):
            self._pool.publish(table.blocks[index], hashes[index])
        table.num_committed = full

    def uncommit(self, request: Request, upto: int) -> None:
        table = self._table(request, "uncommit")
        full = max(upto // self._block_size, table.num_found)
        if full < table.num_committed and table.publishes and self.options.reuse:
            hashes = self._chain(request).hashes
            for index in range(full, table.num_committed):
                self._pool.unpublish(table.blocks[index], hashes[index])
            table.num_committed = full

    def fork(self, parent: Request, child: Request, num_tokens: int) -> Allocation | None:
        source = self._table(parent, "fork")
        self._check_fork(source, child, num_tokens)
        shared, rest = divmod(num_tokens, self._block_size)
        if rest and not self._pool.available:
            return None
        blocks = source.blocks[:shared]
        self._pool.hold(blocks[source.num_trimmed :])
        if rest:
            # If the parent's block gets a new owner before the copy runs, the owner still writes after it: copies precede the batch.
            blocks.append(self._pool.take())
            self._copies.append(BlockCopy(source.blocks[shared], blocks[shared]))
        table = self._tables[child.id] = _Table(child, blocks, num_tokens, num_found=min(source.num_committed, shared))
        table.num_trimmed, table.publishes = source.num_trimmed, source.publishes
        return Allocation(tuple(blocks), cached=num_tokens)

    def take_copies(self) -> Sequence[BlockCopy]:
        copies, self._copies = self._copies, []
        return copies

    def free(self, request: Request) -> None:
        chain = self._chains.get(request.id)
        if chain is not None and chain.request is request:
            del self._chains[request.id]
        table = self._tables.get(request.id)
        if table is not None and table.request is request:
            del self._tables[request.id]
            self._pool.release(reversed(table.own))

    def trim(self, request: Request, first_needed_token: int) -> None:
        table = self._table(request, "trim")
        unneeded = min(first_needed_token // self._block_size, len(table.blocks))
        if unneeded > table.num_trimmed:
            self._pool.release(reversed(table.blocks[table.num_trimmed : unneeded]))
            table.num_trimmed = unneeded

    def reset(self) -> None:
        self._pool.forget()
        for table in self._tables.values():
            table.publishes = False  # what it computes from now on still depends on dropped K and V

    @property
    def counts(self) -> BlockCounts:
        return self._pool.counts

    @property
    def available_blocks(self) -> int:
        return self._pool.available

    def check_integrity(self) -> None:
        holders = [0] * self.context.num_blocks
        for table in self._tables.values():
            if table.num_tokens > len(table.blocks) * self._block_size or table.num_trimmed > len(table.blocks):
                raise self._misuse(table.request, "table", table)
            if len(set(table.own)) != len(table.own):
                raise DovetailError(f"KV cache: request {table.request.id!r} holds a block twice: {table.own}")
            for block in table.own:
                holders[block] += 1
        self._pool.check(holders)

    def _allocate_first(self, request: Request, num_tokens: int) -> Allocation | None:
        if num_tokens < 1:
            raise self._misuse(request, f"allocate({num_tokens} tokens)")
        hits = self._hits(request)
        wanted = -(-num_tokens // self._block_size)
        if self._first_cost(hits, wanted, {}) > self._pool.available:
            return None
        self._pool.hold(hits)  # first, so that `take` doesn't evict them
        cached = len(hits) * self._block_size
        blocks = hits + [self._pool.take() for _ in range(wanted - len(hits))]
        self._tables[request.id] = _Table(request, blocks, max(num_tokens, cached), num_found=len(hits))
        return Allocation(tuple(blocks), cached)

    def _first_cost(self, hits: list[int], wanted: int, leaving: Mapping[int, int]) -> int:
        """Return the number of available blocks that a request without blocks would take, after freeing the `leaving` holders (block -> count)."""
        refs = self._pool.refs
        unheld = sum(refs[block] == leaving.get(block, 0) for block in hits) if leaving else [refs[block] for block in hits].count(0)
        return unheld + max(0, wanted - len(hits))

    def _hits(self, request: Request) -> list[int]:
        """Return the blocks of the longest cached prefix of `request`, without its last known token. The list must not be modified: it is kept,
        since a lookup is often followed by an admission, which searches again."""
        if not self.options.reuse or request.params.prompt_logprobs is not None:
            return []
        limit, index = (request.num_tokens - 1) // self._block_size, self._pool.block_of
        hashes = self._chain(request).extend(limit)
        if not self._found.is_of(hashes, limit, index.changes):
            self._found = _Found(hashes, limit, index.changes, index.run(islice(hashes, limit)))
        return self._found.blocks

    def _chain(self, request: Request) -> HashChain:
        chain = self._chains.get(request.id)
        if chain is None or chain.request is not request:  # another request may reuse the id
            chain = self._chains[request.id] = HashChain(request, self._block_size, self._digest, like=self._latest)
            self._latest = chain.beginning
        return chain

    def _table(self, request: Request, act: str) -> _Table:
        table = self._tables.get(request.id)
        if table is None or table.request is not request:
            raise self._misuse(request, act)
        return table

    def _check_fork(self, source: _Table, child: Request, num_tokens: int) -> None:
        parent, window = source.request, self.context.layout.window
        needed_from = 0 if window is None else max(0, num_tokens - window + 1)
        if child.id in self._tables:
            raise DovetailError(f"KV cache: fork into request {child.id!r}, which holds blocks already")
        if not 1 <= num_tokens <= len(source.blocks) * self._block_size:
            raise self._misuse(parent, f"fork({num_tokens} tokens)", source)
        if source.num_trimmed * self._block_size > needed_from:
            raise self._misuse(parent, f"fork({num_tokens} tokens), which needs token {needed_from}", source)
        if parent.cache_keys != child.cache_keys or parent.prompt_token_ids[:num_tokens] != child.prompt_token_ids[:num_tokens]:
            raise DovetailError(f"KV cache: requests {parent.id!r} and {child.id!r} differ in their first {num_tokens} tokens or their cache_keys")

    def _misuse(self, request: Request, act: str, table: _Table | None = None) -> DovetailError:
        if table is None:
            state = "it holds no blocks"
        else:
            state = f"it holds {len(table.blocks)} blocks of {self._block_size} for {table.num_tokens} tokens, {table.num_trimmed} of them trimmed"
        return DovetailError(f"KV cache: {act} of request {request.id!r}: {state}")
