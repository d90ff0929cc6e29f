"""`PrefixCache`: a KV-cache manager to inherit from. Requests that begin with the same tokens share
the blocks of this prefix.

It is complete: the bundled manager `prefix` is this class. A subclass chooses which cached block is
evicted first, by overriding `rank`:

    class MostPopularStay(PrefixCache):
        def rank(self, block: CachedBlock) -> float:
            return block.hits  # the lowest rank is evicted first; of equal ones the least recent

A full block is found by a hash of all tokens up to its end (`HashChain`). Blocks without holders
are cached until their space is needed. Without a rank, the least recently used is evicted first,
whatever its cache group, and within a request the last block, since a prefix is useful without its
end, but not the end without its beginning. All groups share one chain of hashes; each finds its own
blocks by it. Hashed blocks are the idea of vLLM's automatic prefix caching; reuse by longest prefix
is that of RadixAttention (SGLang, arXiv:2312.07104).

If a layout says that K and V also depend on the next token (`reads_next`), hashes cover this too.

If two requests compute the same block at the same time, only one of the two copies can be found;
the other becomes empty when its holder releases it.

Recurrent states: a request that prefills writes few checkpoints, at most one in a step: where its
tokens part from those in the cache, so that the next request with this beginning starts there, and
at the last block boundary of its known tokens, for the next turn of a conversation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle
from operator import mul
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from dovetail.api.blocks.hash_chain import Beginning, HashChain, HashName, make_digest
from dovetail.api.blocks.pool import NO_HASH, BlockPool
from dovetail.api.kv_cache import (
    HOLE,
    Allocation,
    CacheGroup,
    Checkpoint,
    KVCacheManager,
    KVCapabilities,
    KVContext,
    PageCopy,
    PageCounts,
    Pages,
)
from dovetail.errors import DovetailError, PluginError
from dovetail.request import Request
from dovetail.request.media import same_tokens

HOOKS = ("rank", "on_hit", "on_evict")
ENDLESS = 1 << 62  # tokens of a state, which is one block however many tokens


Rank = float | tuple[Any, ...]  # values of one manager must be comparable


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedBlock:
    """A block in the cache, as `rank`, `on_hit` and `on_evict` get it. Times are those of a logical
    clock, which advances by 1 when a request first allocates and when one is freed.

    Further fields may be added in later versions. The cost of computing a block again isn't among
    them, since it depends on the model; it grows with `tokens`, and with `end` where attention is
    full."""

    # Names the tokens up to the block's end, their `cache_keys` and the group. The same tokens have
    # the same key after an eviction, too, in this manager only.
    key: bytes
    group: CacheGroup  # of a checkpoint, the recurrent one
    pages: int  # that its eviction frees
    # whose K and V it holds; of a checkpoint, all tokens before it
    tokens: int
    end: int  # tokens from the beginning of the prefix to the end of the block
    hits: int  # requests that have found it since it was computed
    created: int  # when it was computed
    last_use: int  # when it was last released by a request, or its checkpoint was last copied


class PrefixOptions(BaseModel):
    """Options of a `PrefixCache`. A subclass with options of its own derives them from these."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reuse: bool = Field(
        default=True, description="Reuse K and V across requests, and after a preemption."
    )
    hash: HashName = Field(
        default="xxh3",
        description="Hash function of blocks: xxh3 is fast; sha256 prevents collisions that an "
        "untrusted user might construct.",
    )


class _Group(NamedTuple):
    """A cache group, and how its blocks are found."""

    number: int
    spec: CacheGroup
    hashes_per_block: int
    salt: bytes  # appended to hashes, so that a group doesn't find blocks of another

    def keys(self, hashes: list[bytes], start: int, end: int) -> list[bytes]:
        """Return the keys of blocks `start` … `end` - 1 in the pool's index."""
        step = self.hashes_per_block
        chosen = hashes[(start + 1) * step - 1 : end * step : step]
        return [digest + self.salt for digest in chosen] if self.salt else chosen

    def key(self, hashes: list[bytes], tokens: int) -> bytes:
        """Return the key of the block, or the checkpoint, that ends after `tokens` tokens."""
        return hashes[tokens * self.hashes_per_block // self.spec.block_tokens - 1] + self.salt


class _Facts:
    """The fields of a committed block that `CachedBlock` shows, which change with its use."""

    __slots__ = ("created", "end", "group", "hits", "key", "last_use")

    def __init__(self, key: bytes, group: _Group, end: int, now: int) -> None:
        self.key = key
        self.group = group
        self.end = end
        self.hits = 0
        self.created = self.last_use = now

    def as_cached(self) -> CachedBlock:
        spec = self.group.spec
        return CachedBlock(
            key=self.key,
            group=spec,
            pages=spec.pages_per_block,
            tokens=self.end if spec.recurrent else spec.block_tokens,
            end=self.end,
            hits=self.hits,
            created=self.created,
            last_use=self.last_use,
        )


class _Table:
    """Blocks and progress of one request."""

    __slots__ = (
        *(
            "blocks",
            "num_committed",
            "num_found",
            "num_tokens",
            "publishes",
            "released",
            "request",
            "room",
        ),
        *("checkpoints", "num_doubles", "parted", "pending", "replaces", "targets"),
    )

    def __init__(
        self,
        request: Request,
        blocks: list[list[int]],
        released: list[int],
        num_tokens: int,
        room: int,
        num_found: int,
    ) -> None:
        self.request = request
        self.blocks = blocks  # by group, append-only
        # by group, how many of its first blocks are HOLEs or no longer held
        self.released = released
        self.num_tokens = num_tokens  # requested
        self.room = room  # tokens that fit into its blocks
        # hashes; other requests computed the blocks of the first `num_found`
        self.num_committed = self.num_found = num_found
        self.parted = 0  # tokens: see `_Hit`
        # hashes up to which it has computed blocks that were cached, and these were replaced
        self.num_doubles = num_found
        # False after a `reset` while it was running: its K and V are outdated
        self.publishes = True
        # numbers of tokens worth a checkpoint, the most useful first
        self.targets: tuple[int, ...] = ()
        self.pending: _Pending | None = None  # the checkpoint that the next batch writes
        # number of tokens -> block of the checkpoint that it wrote
        self.checkpoints: dict[int, int] = {}
        # the checkpoint that it started from, by the one at the end of its own prompt
        self.replaces = False

    def own(self, group: int) -> list[int]:
        """Return the blocks of `group` that the request holds."""
        return (
            self.blocks[group][self.released[group] :]
            if self.released[group]
            else self.blocks[group]
        )


class _Pending(NamedTuple):
    """A checkpoint that isn't written yet."""

    table: _Table
    tokens: int
    block: int


class _Hit(NamedTuple):
    """Result of a search: blocks by group, those that later tokens see of the first `tokens`; of
    states, the checkpoint. Mustn't be modified."""

    tokens: int
    blocks: tuple[list[int], ...]
    # tokens that full attention alone finds, at least `tokens`: where the prompts of this request
    # and of others part
    parted: int


class _Found(NamedTuple):
    """Result of the last search, with its arguments."""

    hashes: list[bytes]  # the list of a chain, which identifies it
    limit: int  # tokens
    changes: int  # `BlockIndex.changes` at the search
    hit: _Hit

    def is_of(self, hashes: list[bytes], limit: int, changes: int) -> bool:
        return self.hashes is hashes and (self.limit, self.changes) == (limit, changes)


class PrefixCache(KVCacheManager):
    """Manager that keeps the blocks of ended requests, and finds them by their tokens.

    Subclasses override `rank`, `on_hit` and `on_evict`, and nothing else: all other rules of the
    contract are kept here. Names with a leading underscore may change in any release. `options` are
    `PrefixOptions`, or any others, which then choose neither `reuse` nor `hash`.

    Growing by one block, `counts` and `available_pages` are O(1); `lookup` is O(blocks found),
    `free` O(blocks held). With one of the hooks overridden, caching, holding and evicting a block
    take O(log n) time for n cached blocks, and the hooks' own. A request's tokens are hashed once:
    on its first lookup or commit, then block by block as it generates; the hashes are kept until
    `free`. Hashes of a beginning shared with the previous request aren't recomputed."""

    capabilities = KVCapabilities(
        reuse=True, fork=True, trim=True, groups=True, states=True, media=True, place=True
    )
    options: PrefixOptions

    def __init__(self, options: BaseModel, context: KVContext) -> None:
        super().__init__(options, context)
        chosen = options if isinstance(options, PrefixOptions) else PrefixOptions()
        unheeded = chosen.__class__.model_fields.keys() & type(options).model_fields.keys()
        if unheeded and chosen is not options:
            raise PluginError(
                f"{type(self).__name__}: {type(options).__name__} has {min(unheeded)}, which is "
                "heeded only of a subclass of dovetail.api.prefix_cache.PrefixOptions"
            )
        self._reuses = chosen.reuse
        if not self._reuses:
            self.capabilities = replace(self.capabilities, reuse=False)
        specs = context.layout.groups
        self._hash_tokens = math.gcd(*(spec.block_tokens for spec in specs))  # tokens of a hash
        self._groups = [
            _Group(
                index, spec, spec.block_tokens // self._hash_tokens, b"%d" % index if index else b""
            )
            for index, spec in enumerate(specs)
        ]
        self._recurrent, self._after = context.layout.recurrent, int(context.layout.reads_next)
        self._paged = self._groups[:-1] if self._recurrent else self._groups  # those of K and V
        self._sizes = [ENDLESS if spec.recurrent else spec.block_tokens for spec in specs]
        self._widths = [spec.pages_per_block for spec in specs]
        self._is_plain = self._widths == [1] and not self._recurrent
        self._hit_tokens = context.layout.hit_tokens
        # the group with full attention: what others keep is useless without its blocks
        self._trunk = self._paged[0] if self._paged and self._paged[0].spec.window is None else None
        self._digest = make_digest(chosen.hash)
        ranked = any(getattr(type(self), name) is not getattr(PrefixCache, name) for name in HOOKS)
        self._pool = BlockPool(
            context.num_pages, self._widths, (self._rank, self._evicted) if ranked else None
        )
        # by block, once it is committed; empty without ranks
        self._facts: list[_Facts | None] = [None] * (context.num_pages if ranked else 0)
        self._any_rank: Rank | None = None
        self._clock = 0
        self._tables: dict[str, _Table] = {}  # request id -> its table
        self._chains: dict[str, HashChain] = {}
        # beginning of the newest chain, for reuse by the next request
        self._latest: Beginning | None = None
        self._nothing = Allocation(((),) * len(specs))
        self._no_hit = _Hit(0, tuple([] for _ in specs), 0)
        self._found = _Found([], 0, -1, self._no_hit)
        self._copies: list[PageCopy] = []
        self._pending: dict[bytes, _Pending] = {}  # by the checkpoint's key
        # those that compute again what is cached, for lack of a checkpoint
        self._doubling: list[_Table] = []
        # by block, its key if a request ended there and none went on from it
        self._ends = [NO_HASH] * (context.num_pages if self._recurrent else 0)

    # Hooks

    def rank(self, block: CachedBlock) -> Rank:
        """Return the rank of a block that isn't held any more: cached blocks are evicted from the
        lowest rank to the highest, of equal ranks the least recently used first. It stays until the
        block is held again. Blocks of all groups, and checkpoints, are in one order.

        Some blocks are evicted later than by rank, since others are useless without them: a block
        of full attention after the cached blocks that continue it, in its group, in those with a
        window, and checkpoints. A checkpoint that the next turn of a conversation has replaced goes
        before all others.

        Returns a number, which isn't NaN, or a tuple; all ranks of a manager must be comparable.
        Called when the last holder lets go of a block, and for a checkpoint whenever it was written
        or copied: perhaps several times without an `on_hit` between. May depend on what `on_hit`
        and `on_evict` have noted; calls no method of the manager. The default is the order of
        use."""
        return block.last_use

    def on_hit(self, block: CachedBlock, request: Request) -> None:
        """Note that `request` starts from this block, which `lookup` found: it is held now, or, if
        it is a checkpoint, copied. `block.hits` counts this hit. Don't keep the request."""

    def on_evict(self, block: CachedBlock, rank: Any) -> None:
        """Note that a block is evicted, whose `rank` was this. Not called for blocks that `reset`
        or `uncommit` drop."""

    # The contract

    def lookup(self, request: Request) -> int:
        return self._hit(request).tokens

    def pages_needed(
        self, request: Request, num_tokens: int, without: Sequence[Request] = ()
    ) -> int:
        leaving = (
            self._holders(self._table(other, "without") for other in without) if without else {}
        )
        freed = sum(
            len(self._pool.rest[block]) + 1
            for block, holders in leaving.items()
            if self._pool.refs[block] == holders
        )
        table = self._tables.get(request.id)
        if table is not None:
            return self._pages_of(self._missing(table, num_tokens)) - freed
        return self._first_cost(self._hit(request), num_tokens, leaving) - freed

    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        table = self._tables.get(request.id)
        if table is None:
            return self._allocate_first(request, num_tokens)
        if num_tokens < table.num_tokens or table.request is not request:
            raise self._misuse(
                request, f"allocate({num_tokens} tokens), after {table.num_tokens}", table
            )
        if num_tokens <= table.room:
            table.num_tokens = num_tokens
            return self._nothing
        if (
            self._is_plain and num_tokens - table.room <= self._hash_tokens
        ):  # the usual case: a decode needs one block of one page
            if not self._pool.available:
                return None
            new = self._pool.take()
            table.blocks[0] += new
            table.num_tokens = num_tokens
            table.room += self._hash_tokens
            return Allocation((tuple(new),))
        missing = self._missing(table, num_tokens)
        if self._pages_of(missing) > self._pool.available:
            return None
        table.num_tokens, table.room = num_tokens, self._room(num_tokens)
        pages = []
        for group, (blocks, count) in enumerate(zip(table.blocks, missing, strict=True)):
            new = self._pool.take(count, group)
            blocks += new
            pages.append(self._pages(group, new))
        return Allocation(tuple(pages))

    def tables(self, request: Request) -> tuple[Pages, ...]:
        table = self._table(request, "tables")
        held = zip(table.blocks, table.released, strict=True)
        return tuple(
            self._pages(group, [HOLE] * released + blocks[released:])
            for group, (blocks, released) in enumerate(held)
        )

    def commit(self, request: Request, upto: int) -> None:
        table = self._table(request, "commit")
        if not 0 <= upto <= min(request.num_tokens, table.room):
            raise self._misuse(
                request, f"commit({upto} tokens), {request.num_tokens} of them known,", table
            )
        full = min(upto, request.num_tokens - self._after) // self._hash_tokens
        if full <= table.num_committed or not table.publishes or not self._reuses:
            return
        hashes = self._chain(request).extend(full)
        for index, group in enumerate(self._paged):
            start = max(table.num_committed // group.hashes_per_block, table.released[index])
            end = full // group.hashes_per_block
            blocks = table.blocks[index][start:end]
            if self._facts:
                for number, block in enumerate(blocks, start + 1):
                    self._describe(block, group, hashes, number * group.spec.block_tokens)
            for block, key in zip(blocks, group.keys(hashes, start, end), strict=True):
                self._pool.publish(block, key)
        if table.targets:
            self._request_checkpoint(table, hashes, full)
        table.num_committed = full

    def uncommit(self, request: Request, upto: int) -> None:
        table = self._table(request, "uncommit")
        full = max(upto // self._hash_tokens, table.num_found)
        if full < table.num_committed and table.publishes and self._reuses:
            hashes = self._chain(request).hashes
            if table.targets:
                self._drop_checkpoints(table, hashes, upto)
            for index, group in enumerate(self._paged):
                start = full // group.hashes_per_block
                end = table.num_committed // group.hashes_per_block
                for block, key in zip(
                    table.blocks[index][start:end], group.keys(hashes, start, end), strict=True
                ):
                    self._pool.unpublish(block, key)
            table.num_committed = full

    def distrust(self, request: Request) -> None:
        table = self._tables.get(request.id)
        if table is not None and table.request is request:
            self.uncommit(request, 0)
            table.publishes = False
        chain = HashChain(
            request, self._hash_tokens, self._digest, like=self._latest, after=self._after
        )
        known = max(0, request.num_tokens - self._after) // self._hash_tokens
        for digest in chain.extend(known)[:known]:
            for group in self._groups:
                block = self._pool.block_of.get(digest + group.salt)
                if block is not None:
                    self._pool.unpublish(block, digest + group.salt)

    def fork(self, parent: Request, child: Request, num_tokens: int) -> Allocation | None:
        source = self._table(parent, "fork")
        self._check_fork(source, child, num_tokens)
        partial = [int(num_tokens % group.spec.block_tokens > 0) for group in self._groups]
        if self._pages_of(partial) > self._pool.available:
            return None
        tables = []
        pages = []
        unseen = [group.spec.first_visible_block(num_tokens) for group in self._groups]
        for index, group in enumerate(self._groups):
            full = num_tokens // group.spec.block_tokens
            blocks = source.blocks[index][unseen[index] : full]
            self._pool.hold(blocks, index)
            if partial[index]:
                # If the parent's block gets a new owner before the copy runs, the owner still
                # writes after it: copies precede the batch.
                blocks += self._pool.take(1, index)
                copied = zip(
                    self._pool.pages(source.blocks[index][full]),
                    self._pool.pages(blocks[-1]),
                    strict=True,
                )
                self._copies.extend(PageCopy(src, dst) for src, dst in copied)
            tables.append([HOLE] * unseen[index] + blocks)
            pages.append(self._pages(index, tables[-1]))
        found = min(source.num_committed, num_tokens // self._hash_tokens)
        table = self._tables[child.id] = _Table(
            child, tables, unseen, num_tokens, self._room(num_tokens), found
        )
        table.publishes = source.publishes
        return Allocation(tuple(pages), cached=num_tokens)

    def take_copies(self) -> Sequence[PageCopy]:
        copies = self._copies
        self._copies = []
        return copies

    def take_checkpoints(self) -> Sequence[Checkpoint]:
        taken = list[Checkpoint]()
        for key, (table, tokens, block) in self._pending.items():
            self._publish_checkpoint(table, tokens, block, key)
            table.pending = None
            if tokens == table.targets[-1]:
                self._ends[block] = key
                if table.replaces:
                    self._pool.demote(
                        self._groups[-1].key(
                            self._chains[table.request.id].hashes,
                            table.num_found * self._hash_tokens,
                        )
                    )
            taken.append(Checkpoint(table.request, tokens, self._pool.pages(block)))
        self._pending.clear()
        self._doubling = [table for table in self._doubling if self._replace_doubles(table)]
        return taken

    def place_checkpoint(self, request: Request, tokens: int) -> Pages | None:
        table = self._table(request, "place_checkpoint")
        if not table.publishes or not 0 < tokens <= table.num_committed * self._hash_tokens:
            return None
        group = self._groups[-1]
        key = group.key(self._chains[request.id].hashes, tokens)
        if key in self._pool.block_of:
            return None
        if key in self._pending:
            self._drop_pending(self._pending[key].table)
        if self._widths[-1] > self._pool.available:
            return None
        [block] = self._pool.take(1, group.number)
        self._publish_checkpoint(table, tokens, block, key)
        return self._pool.pages(block)

    def free(self, request: Request) -> None:
        self._clock += 1
        chain = self._chains.get(request.id)
        if chain is not None and chain.request is request:
            del self._chains[request.id]
        table = self._tables.get(request.id)
        if table is not None and table.request is request:
            del self._tables[request.id]
            if self._recurrent:
                self._leave(table, chain.hashes if chain is not None else [])
                return
            for group in reversed(
                range(len(table.blocks))
            ):  # so that full attention's blocks, which many prefixes need, are evicted last
                self._pool.release(reversed(table.own(group)), group)
            if chain is not None and table.parted and any(table.released):
                self._refresh(table, chain)

    def trim(self, request: Request, computed: int) -> None:
        table = self._table(request, "trim")
        for index, group in enumerate(self._groups):
            blocks = table.blocks[index]
            released = table.released[index]
            unseen = min(group.spec.first_visible_block(computed), len(blocks))
            if unseen > released:
                self._pool.release(reversed(blocks[released:unseen]), index)
                table.released[index] = unseen

    def reset(self) -> None:
        for table in self._tables.values():
            self._drop_pending(table)
            table.checkpoints.clear()
            table.publishes = False  # what it computes from now on still depends on dropped K and V
        self._pool.forget()

    @property
    def counts(self) -> PageCounts:
        return self._pool.counts

    @property
    def available_pages(self) -> int:
        return self._pool.available

    def check_integrity(self) -> None:
        holders = [Counter[int]() for _ in self._groups]
        for table in self._tables.values():
            if table.num_tokens > table.room or any(
                released > len(own)
                for released, own in zip(table.released, table.blocks, strict=True)
            ):
                raise self._misuse(table.request, "table", table)
            for group, counter in enumerate(holders):
                own = table.own(group)
                if len(set(own)) != len(own):
                    raise DovetailError(
                        f"KV cache: request {table.request.id!r} holds a block twice: {own}"
                    )
                counter.update(own)
        for key, pending in self._pending.items():
            if pending.table.pending is not pending or key in self._pool.block_of:
                raise DovetailError(
                    f"KV cache: a checkpoint of request {pending.table.request.id!r} is pending, "
                    f"and written or forgotten, too"
                )
            holders[-1][pending.block] += 1
        self._pool.check(holders)

    def _allocate_first(self, request: Request, num_tokens: int) -> Allocation | None:
        if num_tokens < 1:
            raise self._misuse(request, f"allocate({num_tokens} tokens)")
        hit = self._hit(request)
        if self._first_cost(hit, num_tokens, {}) > self._pool.available:
            return None
        for group, found in zip(self._paged, hit.blocks, strict=False):
            # of all groups first, so that `take` doesn't evict them
            self._pool.hold(found, group.number)
        self._clock += 1
        if self._facts:
            self._note_hits(hit, request)
        # before K and V: see there
        live, is_first = self._take_state(request, hit) if self._recurrent else ([], False)
        tokens = max(num_tokens, hit.tokens)
        tables = list[list[int]]()
        unseen = list[int]()
        for group, found in zip(self._paged, hit.blocks, strict=False):
            whole = hit.tokens // group.spec.block_tokens
            unseen.append(whole - len(found))
            tables.append(
                [HOLE] * unseen[-1]
                + found
                + self._pool.take(group.spec.blocks(tokens) - whole, group.number)
            )
        if live:
            tables.append(live)
            unseen.append(0)
        table = self._tables[request.id] = _Table(
            request, tables, unseen, tokens, self._room(tokens), hit.tokens // self._hash_tokens
        )
        table.parted = hit.parted
        if live and self._reuses:
            table.targets = self._targets(request, hit)
            table.replaces = is_first and bool(table.targets)
            if hit.parted > hit.tokens:
                self._doubling.append(table)
        return Allocation(tuple(map(self._pages, range(len(tables)), tables)), hit.tokens)

    # Ranks

    def _describe(self, block: int, group: _Group, hashes: list[bytes], end: int) -> None:
        """Note the facts of a block that is committed now and ends after `end` tokens, and which
        block it is useless without."""
        key = group.key(hashes, end)
        if self._pool.block_of.get(key) == block:
            return  # it was committed before
        trunk = self._trunk
        parent = NO_HASH
        if trunk is not None:
            size = trunk.spec.block_tokens
            before = end - size if group is trunk else end - end % size
            if before:
                parent = trunk.key(hashes, before)
        self._facts[block] = _Facts(key, group, end, self._clock)
        if self._pool.ranked is not None:
            self._pool.ranked.describe(block, key, parent)

    def _note_hits(self, hit: _Hit, request: Request) -> None:
        for block in chain.from_iterable(hit.blocks):
            facts = self._facts[block]
            if facts is not None:
                facts.hits += 1
                self.on_hit(facts.as_cached(), request)

    def _rank(self, block: int) -> Rank:
        facts = self._known(block)
        facts.last_use = self._clock
        rank = self.rank(facts.as_cached())
        if self._any_rank is None:
            self._any_rank = rank
        if isinstance(rank, tuple) != isinstance(self._any_rank, tuple):
            raise PluginError(
                f"{type(self).__name__}.rank returned {rank!r}, and {self._any_rank!r} before: all "
                "ranks must be numbers, or all must be tuples"
            )
        return rank

    def _evicted(self, block: int, rank: Rank) -> None:
        self.on_evict(self._known(block).as_cached(), rank)

    def _known(self, block: int) -> _Facts:
        facts = self._facts[block]
        if facts is None:
            raise DovetailError(f"KV cache: block {block} is cached, but was never committed")
        return facts

    # States

    def _take_state(self, request: Request, hit: _Hit) -> tuple[list[int], bool]:
        """Take a live state, and have the checkpoint of a hit copied to it. Returns the state in a
        list, and True if this is the first use of a checkpoint at the end of a prompt.

        The checkpoint isn't held: its pages may get another owner even in this planning, who writes
        after the copy, since copies run in order and before the batch. If `take` evicts it already
        here, then last, so that the live state is made of the same pages in the same order, and
        nothing is copied. K and V, taken first, might evict it and leave some of its pages."""
        pool = self._pool
        group = len(self._paged)
        if not hit.tokens:
            return pool.take(1, group), False
        checkpoint = hit.blocks[group][0]
        key = self._groups[group].key(self._chain(request).hashes, hit.tokens)
        pages = pool.pages(checkpoint)
        is_first = self._goes_on(checkpoint, key)
        pool.keep_longest(key)
        live = pool.take(1, group)
        if pool.ranked is not None:
            pool.refresh([key])  # by its rank again
        self._copies.extend(
            PageCopy(src, dst)
            for src, dst in zip(pages, pool.pages(live[0]), strict=True)
            if src != dst
        )
        return live, is_first

    def _targets(self, request: Request, hit: _Hit) -> tuple[int, ...]:
        """Return where a request that starts from `hit` should write checkpoints, the most useful
        first: if one step computes all of its tokens, only that is written. Where prompts part,
        further ones will start, too. If a request ended there, though, and none has gone on from
        it, this is its next turn, and the one after that starts from the end of this prompt."""
        last = (request.num_tokens - 1) // self._hit_tokens * self._hit_tokens
        targets = {hit.parted: None, last: None}
        if hit.parted > hit.tokens:
            key = self._paged[0].key(self._chain(request).hashes, hit.parted)
            if self._goes_on(self._pool.block_of.get(key), key):
                targets = {last: None}
        return tuple(tokens for tokens in targets if tokens > hit.tokens)

    def _goes_on(self, block: int | None, key: bytes) -> bool:
        """Return True if a request or its prompt has ended with `block`, which `key` finds, and
        this is the first that goes on from there."""
        if block is None or self._ends[block] != key:
            return False
        self._ends[block] = NO_HASH
        return True

    def _request_checkpoint(self, table: _Table, hashes: list[bytes], full: int) -> None:
        """Request a checkpoint at the first target among the hashes committed now, up to `full`,
        unless one is pending.

        It takes pages only if that causes no preemption: every request can still get one more K
        and V block in each group.
        """
        pool = self._pool
        group = len(self._paged)
        if table.pending is not None:
            return
        for tokens in table.targets:
            if table.num_committed < tokens // self._hash_tokens <= full:
                key = self._groups[group].key(hashes, tokens)
                if key not in pool.block_of and key not in self._pending:
                    if (
                        self._widths[group] + len(self._tables) * sum(self._widths[:group])
                        <= pool.available
                    ):
                        table.pending = self._pending[key] = _Pending(
                            table, tokens, pool.take(1, group)[0]
                        )
                    return

    def _publish_checkpoint(self, table: _Table, tokens: int, block: int, key: bytes) -> None:
        """Let `key` find `block`, the state after `tokens` tokens of a request, which no longer
        holds it."""
        group = self._groups[-1]
        if self._facts:
            self._describe(block, group, self._chains[table.request.id].hashes, tokens)
        self._pool.publish(block, key)
        self._pool.release([block], group.number)
        table.checkpoints[tokens] = block

    def _drop_checkpoints(self, table: _Table, hashes: list[bytes], upto: int) -> None:
        """Drop the checkpoints of a request after more than `upto` tokens."""
        if table.pending is not None and table.pending.tokens > upto:
            self._drop_pending(table)
        for tokens in [tokens for tokens in table.checkpoints if tokens > upto]:
            self._pool.unpublish(
                table.checkpoints.pop(tokens), self._groups[-1].key(hashes, tokens)
            )

    def _drop_pending(self, table: _Table) -> None:
        if table.pending is not None:
            self._pending = {
                key: pending
                for key, pending in self._pending.items()
                if pending is not table.pending
            }
            self._pool.release([table.pending.block], len(self._paged))
            table.pending = None

    def _replace_doubles(self, table: _Table) -> bool:
        """Let the blocks that a request has computed again be found instead of the cached ones,
        which would be evicted earlier. Called once their step is submitted, since it can't be
        undone. Returns True if there will be more of them."""
        if self._tables.get(table.request.id) is not table or not table.publishes:
            return False
        hashes = self._chains[table.request.id].hashes
        most = table.parted // self._hash_tokens
        start = table.num_doubles
        end = min(table.num_committed, most)
        for index, group in enumerate(self._paged):
            first = max(start // group.hashes_per_block, table.released[index])
            last = end // group.hashes_per_block
            for block, key in zip(
                table.blocks[index][first:last], group.keys(hashes, first, last), strict=True
            ):
                self._pool.replace(block, key)
        table.num_doubles = end
        return end < most

    def _leave(self, table: _Table, hashes: list[bytes]) -> None:
        """Release the blocks of a request such that its tokens are evicted from the last to the
        first, and a checkpoint between those after it and those before it, since one is useless
        without the other."""
        pool = self._pool
        states = len(self._paged)
        found = table.num_found * self._hash_tokens
        self._drop_pending(table)
        self._doubling = [other for other in self._doubling if other is not table]
        pool.release(table.blocks[states], states)
        committed = table.num_committed if table.publishes and hashes else 0
        kept = {*table.checkpoints}
        if not table.replaces or table.targets[-1] not in kept:
            kept.add(found)
        ends = [len(blocks) for blocks in table.blocks]
        for tokens in (*sorted(kept - {0}, reverse=True), 0):
            for index, group in reversed([*enumerate(self._paged)]):
                start = max(tokens // group.spec.block_tokens, table.released[index])
                pool.release(reversed(table.blocks[index][start : ends[index]]), index)
                ends[index] = start
                if (
                    group.spec.window is not None and committed
                ):  # what it sees before; released long ago
                    keys = group.keys(
                        hashes,
                        group.spec.first_visible_block(tokens),
                        tokens // group.spec.block_tokens,
                    )
                    pool.refresh(reversed(keys))
            if tokens and committed:
                pool.refresh([self._groups[-1].key(hashes, tokens)])
        end = committed * self._hash_tokens // self._hit_tokens * self._hit_tokens
        if end and self._paged and self._paged[0].spec.window is None:
            key = self._paged[0].key(hashes, end)
            if (last := pool.block_of.get(key)) is not None:
                self._ends[last] = key

    def _refresh(self, table: _Table, chain: HashChain) -> None:
        """Let the blocks that a window sees where prompts part be evicted after those of full
        attention. They were released long before, and without them the whole prefix, which other
        requests will ask for, isn't found."""
        for group in self._groups:
            if group.spec.window is not None:
                start = group.spec.first_visible_block(table.parted)
                end = table.parted // group.spec.block_tokens
                self._pool.refresh(
                    reversed(
                        group.keys(chain.hashes, start, min(end, table.released[group.number]))
                    )
                )

    def _first_cost(self, hit: _Hit, num_tokens: int, leaving: Mapping[int, int]) -> int:
        """Return the number of available pages that a request without blocks would take, after
        freeing the `leaving` holders (block -> count)."""
        refs = self._pool.refs
        blocks = []
        for group, found in zip(self._paged, hit.blocks, strict=False):
            holders = (
                [refs[block] - leaving.get(block, 0) for block in found]
                if leaving
                else [refs[block] for block in found]
            )
            blocks.append(
                holders.count(0)
                + max(0, group.spec.blocks(num_tokens) - hit.tokens // group.spec.block_tokens)
            )
        if self._recurrent:
            blocks.append(1)
        return self._pages_of(blocks)

    def _missing(self, table: _Table, num_tokens: int) -> list[int]:
        """Return by group how many blocks `table` lacks for `num_tokens` tokens."""
        return [
            max(0, -(-num_tokens // size) - len(blocks))
            for size, blocks in zip(self._sizes, table.blocks, strict=True)
        ]

    def _room(self, num_tokens: int) -> int:
        """Return how many tokens fit into the blocks that `num_tokens` tokens need."""
        return min([-(-num_tokens // size) * size for size in self._sizes])

    def _holders(self, tables: Iterable[_Table]) -> Mapping[int, int]:
        """Return by block how many of `tables` hold it, with the checkpoints that `free` would
        drop."""
        holders = Counter[int]()
        for table in tables:
            holders.update(
                chain.from_iterable(table.own(group) for group in range(len(table.blocks)))
            )
            if table.pending is not None:
                holders[table.pending.block] += 1
        return holders

    def _pages_of(self, blocks: Sequence[int]) -> int:
        """Return the number of pages of these numbers of blocks, by group."""
        return sum(map(mul, blocks, self._widths))

    def _pages(self, group: int, blocks: Sequence[int]) -> Pages:
        """Return the pages of blocks of a group, block after block."""
        if self._widths[group] == 1:
            return tuple(blocks)
        hole = (HOLE,) * self._widths[group]
        return tuple(
            page
            for block in blocks
            for page in (hole if block == HOLE else self._pool.pages(block))
        )

    def _hit(self, request: Request) -> _Hit:
        """Return the longest cached prefix of `request`, without its last known token. It is kept,
        since a lookup is often followed by an admission, which searches again."""
        if not self._reuses or request.params.prompt_logprobs is not None:
            return self._no_hit
        limit = (request.num_tokens - 1) // self._hit_tokens * self._hit_tokens
        index = self._pool.block_of
        hashes = self._chain(request).extend(limit // self._hash_tokens)
        if not self._found.is_of(hashes, limit, index.changes):
            self._found = _Found(hashes, limit, index.changes, self._search(hashes, limit))
        return self._found.hit

    def _search(self, hashes: list[bytes], tokens: int) -> _Hit:
        """Return the longest hit of at most `tokens` tokens that every group accepts."""
        blocks: list[list[int]] = [[] for _ in self._groups]
        accepted = parted = 0  # number of groups in a row that accept `tokens`
        for group in cycle(self._groups):
            longest, blocks[group.number] = self._find(group, hashes, tokens)
            if group.spec.window is None and not group.spec.recurrent:
                parted = max(parted, longest)
            accepted = accepted + 1 if longest == tokens else 1
            tokens = longest
            if accepted == len(self._groups):
                break
        return _Hit(tokens, tuple(blocks), max(parted, tokens))

    def _find(self, group: _Group, hashes: list[bytes], tokens: int) -> tuple[int, list[int]]:
        """Return the longest hit of at most `tokens` tokens that `group` accepts, and the blocks of
        it that later tokens see."""
        index = self._pool.block_of
        spec = group.spec
        found: list[int] = []
        if spec.recurrent:
            for end in range(tokens, 0, -self._hit_tokens):
                if (block := index.get(group.key(hashes, end))) is not None:
                    return end, [block]
            return 0, found
        if spec.window is None:
            found = index.run(group.keys(hashes, 0, tokens // spec.block_tokens))
            tokens = len(found) * spec.block_tokens // self._hit_tokens * self._hit_tokens
            return tokens, found[: tokens // spec.block_tokens]
        end = tokens // spec.block_tokens  # of the blocks still to be found
        while end > spec.first_visible_block(tokens):
            block = index.get(hashes[end * group.hashes_per_block - 1] + group.salt)
            end -= 1
            if block is not None:
                found.append(block)
            else:
                # no hit that ends after it, and sees it, is accepted; earlier ones don't see those
                # found
                tokens = end * spec.block_tokens // self._hit_tokens * self._hit_tokens
                end = tokens // spec.block_tokens
                found.clear()
        return tokens, found[::-1]

    def _chain(self, request: Request) -> HashChain:
        chain = self._chains.get(request.id)
        if chain is None or chain.request is not request:  # another request may reuse the id
            chain = self._chains[request.id] = HashChain(
                request, self._hash_tokens, self._digest, like=self._latest, after=self._after
            )
            self._latest = chain.beginning
        return chain

    def _table(self, request: Request, act: str) -> _Table:
        table = self._tables.get(request.id)
        if table is None or table.request is not request:
            raise self._misuse(request, act)
        return table

    def _check_fork(self, source: _Table, child: Request, num_tokens: int) -> None:
        parent = source.request
        if self._recurrent:
            raise self._misuse(parent, "fork, which layouts with states have no use for,", source)
        if child.id in self._tables:
            raise DovetailError(
                f"KV cache: fork into request {child.id!r}, which holds blocks already"
            )
        if not 1 <= num_tokens <= source.room:
            raise self._misuse(parent, f"fork({num_tokens} tokens)", source)
        for group, released in zip(self._groups, source.released, strict=True):
            needed = group.spec.first_visible_block(num_tokens)
            end = group.spec.blocks(num_tokens)
            if needed < min(released, end):
                raise self._misuse(
                    parent,
                    f"fork({num_tokens} tokens), which needs block {needed} of group "
                    f"{group.number}",
                    source,
                )
        same = same_tokens(parent.prompt_array, parent.media, child.prompt_array, child.media)
        needed = min(num_tokens, max(parent.prompt_tokens, child.prompt_tokens))
        if parent.cache_keys != child.cache_keys or same < needed:
            raise DovetailError(
                f"KV cache: requests {parent.id!r} and {child.id!r} differ in their first "
                f"{num_tokens} tokens or their cache_keys"
            )

    def _misuse(self, request: Request, act: str, table: _Table | None = None) -> DovetailError:
        state = "it holds no blocks"
        if table is not None:
            groups = zip(self._groups, table.blocks, table.released, strict=True)
            held = " and ".join(
                f"{len(blocks)} blocks of {group.spec.block_tokens} ({released} released)"
                for group, blocks, released in groups
            )
            state = f"it holds {held} for {table.num_tokens} tokens"
        return DovetailError(f"KV cache: {act} of request {request.id!r}: {state}")
