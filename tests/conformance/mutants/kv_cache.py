"""KV-cache managers with one thing wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from dovetail.api.blocks.hash_chain import Digest, HashChain
from dovetail.api.blocks.pool import BlockPool
from dovetail.api.kv_cache import (
    HOLE,
    Allocation,
    Checkpoint,
    KVContext,
    PageCopy,
    PageCounts,
    Pages,
)
from dovetail.api.prefix_cache import (
    CachedBlock,
    PrefixCache,
    PrefixOptions,
    _Group,
    _Hit,
    _Table,
)
from dovetail.errors import DovetailError
from dovetail.request import Request
from dovetail.request.sampling_params import SamplingParams
from tests.conformance.mutants import mutant

# Whose blocks


@mutant(caught_by="kv_cache.private", soon=True)
class HitsInTheWrongOrder(PrefixCache):
    def _search(self, hashes: list[bytes], tokens: int) -> _Hit:
        hit = super()._search(hashes, tokens)
        return hit._replace(blocks=tuple(blocks[::-1] for blocks in hit.blocks))


@mutant(caught_by="kv_cache.private")
class FindsACheckpointWithoutItsPrefix(PrefixCache):
    """K and V, which are evicted first, may be gone."""

    def free(self, request: Request) -> None:
        table, chain = self._tables.get(request.id), self._chains.get(request.id)
        super().free(request)
        if table is not None and chain is not None:
            self._pool.refresh(
                [self._groups[-1].key(chain.hashes, tokens) for tokens in table.checkpoints]
            )

    def _checkpoint(self, request: Request) -> tuple[int, list[int]]:
        limit = (request.num_tokens - 1) // self._hit_tokens * self._hit_tokens
        asks = self._recurrent and request.params.prompt_logprobs is None
        return (
            self._find(
                self._groups[-1], self._chain(request).extend(limit // self._hash_tokens), limit
            )
            if asks
            else (0, [])
        )

    def lookup(self, request: Request) -> int:
        return max(super().lookup(request), self._checkpoint(request)[0])

    def pages_needed(
        self, request: Request, num_tokens: int, without: Sequence[Request] = ()
    ) -> int:
        if request.id in self._tables or super().lookup(request) >= self._checkpoint(request)[0]:
            return super().pages_needed(request, num_tokens, without)
        return (
            super().pages_needed(request, 1, without)
            + self.context.layout.pages(num_tokens)
            - self.context.layout.pages(1)
        )

    def _allocate_first(self, request: Request, num_tokens: int) -> Allocation | None:
        end, found = self._checkpoint(request)
        if super().lookup(request) >= end:
            return super()._allocate_first(request, num_tokens)
        if self.context.layout.pages(num_tokens) > self._pool.available:
            return None
        pages = self._pool.pages(found[0])
        tables = [
            self._pool.take(group.spec.blocks(num_tokens), group.number) for group in self._groups
        ]
        self._copies += map(PageCopy, pages, self._pool.pages(tables[-1][0]))
        self._tables[request.id] = _Table(
            request,
            tables,
            [0] * len(tables),
            num_tokens,
            self._room(num_tokens),
            end // self._hash_tokens,
        )
        return Allocation(tuple(map(self._pages, range(len(tables)), tables)), end)


@mutant(caught_by="kv_cache.hit")
class FindsAPrefixWithoutACheckpoint(PrefixCache):
    def _search(self, hashes: list[bytes], tokens: int) -> _Hit:
        hit = super()._search(hashes, tokens)
        if not self._recurrent or len(self._paged) != 1 or hit.parted == hit.tokens:
            return hit
        return _Hit(
            hit.parted,
            (self._find(self._paged[0], hashes, hit.parted)[1], self._pool._empty[:1]),
            hit.parted,
        )


@mutant(caught_by="kv_cache.pages_needed")
class TakesAStateForNothing(PrefixCache):
    def _first_cost(self, hit: _Hit, num_tokens: int, leaving: Mapping[int, int]) -> int:
        return super()._first_cost(hit, num_tokens, leaving) - (self._recurrent and hit.tokens > 0)


@mutant(caught_by="kv_cache.pages_needed_without")
class ForgetsTheCheckpointsOfThoseFreed(PrefixCache):
    """Which aren't written then."""

    def _holders(self, tables: Iterable[_Table]) -> Mapping[int, int]:
        return Counter(
            chain.from_iterable(
                table.own(group) for table in tables for group in range(len(table.blocks))
            )
        )


@mutant(caught_by="kv_cache.counts")
class FreesWhatOthersHold(PrefixCache):
    def free(self, request: Request) -> None:
        if request.id in self._tables:
            for group in range(len(self._groups)):
                for block in self._tables[request.id].own(group):
                    self._pool.refs[block] = 1
        super().free(request)


@mutant(caught_by="kv_cache.exclusive", soon=True)
class PinsTheHitTooLate(PrefixCache):
    """A new block may be one of the hit's."""

    def _allocate_first(self, request: Request, num_tokens: int) -> Allocation | None:
        hit = self._hit(request)
        if self._first_cost(hit, num_tokens, {}) > self._pool.available or not hit.tokens:
            return super()._allocate_first(request, num_tokens)
        found = [hit.tokens // group.spec.block_tokens for group in self._groups]
        tokens = max(num_tokens, hit.tokens)
        new = [
            self._pool.take(group.spec.blocks(tokens) - found[group.number], group.number)
            for group in self._groups
        ]
        for group in self._groups:
            self._pool.hold(hit.blocks[group.number], group.number)
        unseen = [whole - len(blocks) for whole, blocks in zip(found, hit.blocks, strict=True)]
        tables = [
            [HOLE] * holes + old + more
            for holes, old, more in zip(unseen, hit.blocks, new, strict=True)
        ]
        self._tables[request.id] = _Table(
            request, tables, unseen, tokens, self._room(tokens), hit.tokens // self._hash_tokens
        )
        return Allocation(tuple(map(self._pages, range(len(tables)), tables)), hit.tokens)


@mutant(caught_by="kv_cache.table", soon=True)
class TakesABlockAhead(PrefixCache):
    def pages_needed(
        self, request: Request, num_tokens: int, without: Sequence[Request] = ()
    ) -> int:
        return super().pages_needed(request, num_tokens + self._hash_tokens, without)

    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        return super().allocate(request, num_tokens + self._hash_tokens)


@mutant(caught_by="kv_cache.counts")
class CountsHoldersForBlocks(PrefixCache):
    """A shared block counts as many times as it is held."""

    @property
    def counts(self) -> PageCounts:
        counts = super().counts
        return PageCounts(counts.empty, sum(self._pool.refs), counts.cached, counts.held_by_group)


@mutant(caught_by="kv_cache.counts")
class LosesTheLastBlock(PrefixCache):
    def free(self, request: Request) -> None:
        table = self._tables.get(request.id)
        if table is not None:
            self._pool.refs[table.blocks[0][-1]] += 1
        super().free(request)


class _Leaky(BlockPool):
    """Counts what it has lost as free, but can't give it."""

    __slots__ = ()

    @property
    def available(self) -> int:
        return len(self._empty) + sum(len(self.pages(block)) for block in self._cached)

    @property
    def counts(self) -> PageCounts:
        held, cached = sum(self._held), self.available - len(self._empty)
        return PageCounts(self._size - held - cached, held, cached)


class _Hiding(PrefixCache):
    Pool: type[_Leaky]

    def __init__(self, options: PrefixOptions, context: KVContext) -> None:
        super().__init__(options, context)
        self._pool = self.Pool(context.num_pages, self._widths)

    @property
    def available_pages(self) -> int:
        return self.context.num_pages - self.counts.held

    def check_integrity(self) -> None: ...


@mutant(caught_by="kv_cache.no_leak", soon=True)
class LosesABlockAndHidesIt(_Hiding):
    Pool = _Leaky

    def free(self, request: Request) -> None:
        super().free(request)
        if len(self._pool._empty) > 1:
            self._pool._empty.pop(0)


class _FirstPages(_Leaky):
    __slots__ = ()

    def _dissolve(self, block: int) -> None:
        self.rest[block] = ()
        super()._dissolve(block)


@mutant(caught_by="kv_cache.no_leak")
class ReleasesTheFirstPageOfABlock(_Hiding):
    Pool = _FirstPages


@mutant(caught_by="kv_cache.lawful", soon=True)
class FreesOnlyWhatHolds(PrefixCache):
    def free(self, request: Request) -> None:
        self._table(request, "free")
        super().free(request)


@mutant(caught_by="kv_cache.integrity")
class TakesTrimmedBlocksForLost(PrefixCache):
    def check_integrity(self) -> None:
        if any(any(table.released) for table in self._tables.values()):
            raise DovetailError("a table has lost blocks")


@mutant(caught_by="kv_cache.misuse")
class AcceptsAnything(PrefixCache):
    def commit(self, request: Request, upto: int) -> None:
        if request.id in self._tables:
            super().commit(request, upto)


# What a step is told


@mutant(caught_by="kv_cache.request_untouched")
class NotesTheHitOnTheRequest(PrefixCache):
    def _allocate_first(self, request: Request, num_tokens: int) -> Allocation | None:
        allocation = super()._allocate_first(request, num_tokens)
        if allocation is not None:
            request.cached_tokens = allocation.cached or 1  # type: ignore[misc]
        return allocation


@mutant(caught_by="kv_cache.request_untouched")
class SortsGeneratedTokens(PrefixCache):
    """So that more of them look alike."""

    def free(self, request: Request) -> None:
        super().free(request)
        request.output[:] = type(request.output)("q", sorted(request.output))  # type: ignore[attr-defined]


@mutant(caught_by="kv_cache.answers", soon=True)
class GivesOutItsOwnTable(PrefixCache):
    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        allocation = super().allocate(request, num_tokens)
        return allocation and Allocation(tuple(self._tables[request.id].blocks), allocation.cached)  # type: ignore[arg-type]


@mutant(caught_by="kv_cache.answers")
class UsesOneListOfCopies(PrefixCache):
    def __init__(self, options: PrefixOptions, context: KVContext) -> None:
        super().__init__(options, context)
        self.told: list[PageCopy] = []

    def take_copies(self) -> Sequence[PageCopy]:
        self.told[:] = super().take_copies()
        return self.told


@mutant(caught_by="kv_cache.failed_allocate")
class NotesWhatItCannotGive(PrefixCache):
    """A request that grows in vain is later refused fewer tokens, as if it had had more."""

    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        allocation = super().allocate(request, num_tokens)
        if allocation is None and request.id in self._tables:
            self._tables[request.id].num_tokens = num_tokens
        return allocation


@mutant(caught_by="kv_cache.misuse")
class UncommitsNothingOfNobody(PrefixCache):
    def uncommit(self, request: Request, upto: int) -> None:
        if request.id in self._tables:
            super().uncommit(request, upto)


@mutant(caught_by="kv_cache.misuse")
class ForksOverATable(PrefixCache):
    """The blocks that the child held are lost."""

    def _check_fork(self, source: _Table, child: Request, num_tokens: int) -> None: ...


@mutant(caught_by="kv_cache.failed_allocate")
class TakesBlocksUntilNoneIsLeft(PrefixCache):
    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        allocation = super().allocate(request, num_tokens)
        if allocation is None and self._pool.available:
            self._pool.take()
        return allocation


@mutant(caught_by="kv_cache.failed_allocate")
class PinsTheHitOfARequestThatDoesNotFit(PrefixCache):
    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        allocation = super().allocate(request, num_tokens)
        if allocation is None and request.id not in self._tables:
            for group, blocks in enumerate(self._hit(request).blocks):
                self._pool.hold(blocks, group)
        return allocation


@mutant(caught_by="kv_cache.pages_needed", soon=True)
class TakesCachedHitsForNothing(PrefixCache):
    """A hit on a block that nobody holds leaves one available block fewer."""

    def pages_needed(
        self, request: Request, num_tokens: int, without: Sequence[Request] = ()
    ) -> int:
        if request.id in self._tables:
            return super().pages_needed(request, num_tokens, without)
        return max(
            0,
            self.context.layout.pages(num_tokens) - self.context.layout.pages(self.lookup(request)),
        )


@mutant(caught_by="kv_cache.pages_needed_without")
class IgnoresWithout(PrefixCache):
    def pages_needed(
        self, request: Request, num_tokens: int, without: Sequence[Request] = ()
    ) -> int:
        return super().pages_needed(request, num_tokens)


@mutant(caught_by="kv_cache.pages_needed_without")
class CountsSharedBlocksAsFreed(PrefixCache):
    """Blocks that others hold, too, don't become available."""

    def pages_needed(
        self, request: Request, num_tokens: int, without: Sequence[Request] = ()
    ) -> int:
        shared = self._holders(self._tables[other.id] for other in without)
        return super().pages_needed(request, num_tokens) - sum(
            len(self._pool.pages(block)) for block in shared
        )


@mutant(caught_by="kv_cache.pages_needed_without")
class TakesTheirHitsForNothing(PrefixCache):
    """A hit on a block that only those freed held leaves one available block fewer."""

    def pages_needed(
        self, request: Request, num_tokens: int, without: Sequence[Request] = ()
    ) -> int:
        freed = -super().pages_needed(without[0], 1, without) if without else 0
        return super().pages_needed(request, num_tokens) - freed


@mutant(caught_by="kv_cache.pure")
class LookupKeepsFromEviction(PrefixCache):
    def lookup(self, request: Request) -> int:
        for block in chain.from_iterable(self._hit(request).blocks):
            if block in self._pool._cached:
                self._pool._cached.remove(block)
                self._pool._cached.append(block)
        return super().lookup(request)


# Finding again


@mutant(caught_by="kv_cache.hit_length", soon=True)
class FindsTheWholeRequest(PrefixCache):
    def lookup(self, request: Request) -> int:
        found, end = super().lookup(request), request.num_tokens
        last = end - self._hash_tokens
        whole = (
            len(self._groups) == 1
            and found == last
            and self._chain(request).extend(end // self._hash_tokens)[-1] in self._pool.block_of
        )
        return (
            end
            if whole and request.params.prompt_logprobs is None and self.options.reuse
            else found
        )


class _OwnTokensOnly(HashChain):
    __slots__ = ()

    def extend(self, num_blocks: int) -> list[bytes]:
        tokens, size = (
            (*self.request.prompt_token_ids, *self.request.output_token_ids),
            self._block_size,
        )
        self.hashes += [
            repr((self._root, tokens[i * size : (i + 1) * size])).encode()
            for i in range(len(self.hashes), num_blocks)
        ]
        return self.hashes


@mutant(caught_by="kv_cache.hit")
class BlocksFoundByTheirOwnTokens(PrefixCache):
    """Not by all tokens before them."""

    def _chain(self, request: Request) -> HashChain:
        if self._chains.get(request.id) is None or self._chains[request.id].request is not request:
            self._chains[request.id] = _OwnTokensOnly(request, self._hash_tokens, self._digest)
        return self._chains[request.id]


@mutant(caught_by="kv_cache.hit")
class CommitsTheBlockBegun(PrefixCache):
    """Its end isn't computed yet."""

    def commit(self, request: Request, upto: int) -> None:
        end = -(-upto // self._hash_tokens) * self._hash_tokens
        super().commit(
            request,
            end if end <= request.num_tokens and end <= len(request.prompt_token_ids) else upto,
        )


@mutant(caught_by="kv_cache.reuse")
class ForgetsAtFree(PrefixCache):
    def free(self, request: Request) -> None:
        if request.id in self._tables:
            self._tables[request.id].num_found = 0
            self.uncommit(request, 0)
        super().free(request)


@mutant(caught_by="kv_cache.reuse")
class FindsOneBlockLess(PrefixCache):
    def _search(self, hashes: list[bytes], tokens: int) -> _Hit:
        found = super()._search(hashes, tokens).tokens
        return super()._search(hashes, max(0, found - self._hit_tokens))


@mutant(caught_by="kv_cache.same_step")
class PublishesAtFree(PrefixCache):
    def commit(self, request: Request, upto: int) -> None:
        self._table(request, "commit")

    def free(self, request: Request) -> None:
        table = self._tables.get(request.id)
        if table is not None:
            super().commit(request, min(request.num_tokens, table.room))
        super().free(request)


@mutant(caught_by="kv_cache.generated")
class CommitsPromptsAlone(PrefixCache):
    def commit(self, request: Request, upto: int) -> None:
        super().commit(request, min(upto, request.prompt_tokens))


class _Keyless(HashChain):
    __slots__ = ()

    def __init__(
        self, request: Request, block_size: int, digest: Digest, keys: tuple[str, ...]
    ) -> None:
        super().__init__(request, block_size, digest)
        self._root = repr(keys).encode().ljust(16)


@mutant(caught_by="kv_cache.cache_keys")
class IgnoresCacheKeys(PrefixCache):
    def _chain(self, request: Request) -> HashChain:
        return self._chains.setdefault(
            request.id, _Keyless(request, self._hash_tokens, self._digest, ())
        )


@mutant(caught_by="kv_cache.cache_keys")
class JoinsCacheKeys(PrefixCache):
    """("a", "b") is ("ab",)."""

    def _chain(self, request: Request) -> HashChain:
        return self._chains.setdefault(
            request.id,
            _Keyless(request, self._hash_tokens, self._digest, ("".join(request.cache_keys),)),
        )


@mutant(caught_by="kv_cache.prompt_logprobs")
class TakesNoLogprobsWantedForNone(PrefixCache):
    """`prompt_logprobs=0` asks for those of the prompt's own tokens."""

    def _hit(self, request: Request) -> _Hit:
        if request.params.prompt_logprobs == 0:
            plain = Request(
                request.id,
                request.prompt_token_ids,
                SamplingParams(),
                max_tokens=1,
                cache_keys=request.cache_keys,
            )
            return super()._hit(plain)
        return super()._hit(request)


@mutant(caught_by="kv_cache.uncommit")
class IgnoresUncommit(PrefixCache):
    def uncommit(self, request: Request, upto: int) -> None: ...


@mutant(caught_by="kv_cache.uncommit")
class UncommitsWhatOthersComputed(PrefixCache):
    def uncommit(self, request: Request, upto: int) -> None:
        self._table(request, "uncommit").num_found = 0
        super().uncommit(request, upto)


@mutant(caught_by="kv_cache.reuse")
class CutsTokenIdsTo16Bits(PrefixCache):
    def _chain(self, request: Request) -> HashChain:
        tokens = [
            token & 0xFFFF for token in (*request.prompt_token_ids, *request.output_token_ids)
        ]
        return HashChain(
            Request(
                request.id, tokens, request.params, max_tokens=1, cache_keys=request.cache_keys
            ),
            self._hash_tokens,
            self._digest,
        )


@mutant(caught_by="kv_cache.reset")
class ResetForgetsCachedBlocksAlone(PrefixCache):
    def reset(self) -> None:
        for block in list(self._pool._cached):
            self._pool.unpublish(block, self._pool._hash_of[block])


@mutant(caught_by="kv_cache.reset")
class PublishesAfterAReset(PrefixCache):
    """What a request computes then builds on what was forgotten."""

    def reset(self) -> None:
        self._pool.forget()
        for table in self._tables.values():
            table.num_committed = table.num_found = 0


@mutant(caught_by="kv_cache.reset")
class ForksForgetTheReset(PrefixCache):
    """A sample publishes what it computes, though what it has from its parent was disowned."""

    def fork(self, parent: Request, child: Request, num_tokens: int) -> Allocation | None:
        allocation = super().fork(parent, child, num_tokens)
        if allocation is not None:
            self._tables[child.id].publishes = True
        return allocation


# Forks and windows


@mutant(caught_by="kv_cache.fork")
class CopiesEveryBlock(PrefixCache):
    """Nothing is shared."""

    def fork(self, parent: Request, child: Request, num_tokens: int) -> Allocation | None:
        source, wanted = self._table(parent, "fork").blocks[0], -(-num_tokens // self._hash_tokens)
        if (
            not self._is_plain
            or wanted > self._pool.available
            or super().fork(parent, child, num_tokens) is None
        ):
            return None
        self._pool.release(self._tables[child.id].own(0))
        self._tables[child.id].released = [0]
        blocks = self._tables[child.id].blocks[0] = self._pool.take(wanted)
        self._copies = [PageCopy(src, dst) for src, dst in zip(source, blocks, strict=False)]
        return Allocation((tuple(blocks),), num_tokens)


@mutant(caught_by="kv_cache.fork_copies")
class ForgetsTheCopy(PrefixCache):
    def take_copies(self) -> Sequence[PageCopy]:
        super().take_copies()
        return ()


@mutant(caught_by="kv_cache.fork_copies")
class CopiesTheWrongWay(PrefixCache):
    def take_copies(self) -> Sequence[PageCopy]:
        return [PageCopy(copy.dst, copy.src) for copy in super().take_copies()]


@mutant(caught_by="kv_cache.private")
class TellsACopyAgain(PrefixCache):
    def take_copies(self) -> Sequence[PageCopy]:
        return list(self._copies)


@mutant(caught_by="kv_cache.fork_copies")
class ForgetsCopiesAtAReset(PrefixCache):
    def reset(self) -> None:
        super().reset()
        self._copies.clear()


@mutant(caught_by="kv_cache.failed_fork")
class SharesBeforeItLooksForABlock(PrefixCache):
    def fork(self, parent: Request, child: Request, num_tokens: int) -> Allocation | None:
        allocation = super().fork(parent, child, num_tokens)
        if allocation is None:
            source = self._table(parent, "fork")
            self._pool.hold(
                source.blocks[0][
                    source.released[0] : num_tokens // self._groups[0].spec.block_tokens
                ]
            )
        return allocation


@mutant(caught_by="kv_cache.trim")
class TrimsABlockStillNeeded(PrefixCache):
    def trim(self, request: Request, computed: int) -> None:
        super().trim(request, computed + self._hash_tokens - 1)


@mutant(caught_by="kv_cache.trim")
class NeverTrims(PrefixCache):
    def trim(self, request: Request, computed: int) -> None: ...


@mutant(caught_by="kv_cache.trim")
class TrimsOneTokenLate(PrefixCache):
    def trim(self, request: Request, computed: int) -> None:
        super().trim(request, max(0, computed - 1))


@mutant(caught_by="kv_cache.trim")
class TrimsOneTokenEarly(PrefixCache):
    def trim(self, request: Request, computed: int) -> None:
        super().trim(request, computed + 1)


@mutant(caught_by="kv_cache.trim", soon=True)
class TrimsFullAttentionToo(PrefixCache):
    """As far as the smallest window sees."""

    def trim(self, request: Request, computed: int) -> None:
        groups = self._groups
        self._groups = [
            group._replace(spec=replace(group.spec, window=groups[-1].spec.window))
            for group in groups
        ]
        super().trim(request, computed)
        self._groups = groups


@mutant(caught_by="kv_cache.trim")
class TrimsOneGroupOnly(PrefixCache):
    def trim(self, request: Request, computed: int) -> None:
        groups = self._groups
        self._groups = [
            group
            if group.number == len(groups) - 1
            else group._replace(spec=replace(group.spec, window=None))
            for group in groups
        ]
        super().trim(request, computed)
        self._groups = groups


@mutant(caught_by="kv_cache.reuse")
class ForgetsWhatItTrims(PrefixCache):
    """A later request with the same prefix sees these blocks."""

    def trim(self, request: Request, computed: int) -> None:
        table = self._table(request, "trim")
        before = list(table.released)
        super().trim(request, computed)
        for blocks, start, end in zip(table.blocks, before, table.released, strict=True):
            for block in blocks[start:end]:
                if self._pool.refs[block] == 0 and self._pool._hash_of[block]:
                    self._pool.unpublish(block, self._pool._hash_of[block])


# Groups


@mutant(caught_by="kv_cache.hit")
class AsksTheFirstGroupOnly(PrefixCache):
    def _search(self, hashes: list[bytes], tokens: int) -> _Hit:
        found, blocks = self._find(self._groups[0], hashes, tokens)
        hit = super()._search(hashes, found)
        return hit._replace(tokens=found, blocks=(blocks, *hit.blocks[1:]))


@mutant(caught_by="kv_cache.hit")
class ForgetsTheOldestBlockOfAWindow(PrefixCache):
    """Finds a prefix without the oldest block that later tokens see."""

    def _find(self, group: _Group, hashes: list[bytes], tokens: int) -> tuple[int, list[int]]:
        window = group.spec.window
        if window is None or window <= group.spec.block_tokens:
            return super()._find(group, hashes, tokens)
        return super()._find(
            group._replace(spec=replace(group.spec, window=window - group.spec.block_tokens)),
            hashes,
            tokens,
        )


@mutant(caught_by="kv_cache.reuse")
class WantsWhatNoWindowSees(PrefixCache):
    """Every group must have all blocks of a prefix."""

    def _find(self, group: _Group, hashes: list[bytes], tokens: int) -> tuple[int, list[int]]:
        tokens, blocks = super()._find(
            group._replace(spec=replace(group.spec, window=None)), hashes, tokens
        )
        return tokens, blocks[group.spec.first_visible_block(tokens) :]


@mutant(caught_by="kv_cache.exclusive")
class MixesTheHashesOfGroups(PrefixCache):
    def __init__(self, options: PrefixOptions, context: KVContext) -> None:
        super().__init__(options, context)
        self._groups = self._paged = [group._replace(salt=b"") for group in self._groups]


@mutant(caught_by="kv_cache.hit_length")
class FindsABlockOfTheSmallestGroup(PrefixCache):
    """Takes a hit that ends within a block of another group."""

    def __init__(self, options: PrefixOptions, context: KVContext) -> None:
        super().__init__(options, context)
        self._hit_tokens = context.layout.block_size


@mutant(caught_by="kv_cache.holes")
class LosesTheOldestBlockThatAHitSees(PrefixCache):
    def _allocate_first(self, request: Request, num_tokens: int) -> Allocation | None:
        allocation = super()._allocate_first(request, num_tokens)
        if allocation is None or not allocation.cached:
            return allocation
        table, pages = self._tables[request.id], list(allocation.pages)
        seen, width = table.released[-1], self._widths[-1]
        if seen * self._groups[-1].spec.block_tokens < allocation.cached:
            pages[-1] = (
                *pages[-1][: seen * width],
                *[HOLE] * width,
                *pages[-1][(seen + 1) * width :],
            )
        return Allocation(tuple(pages), allocation.cached)


@mutant(caught_by="kv_cache.fork")
class SharesWhatTheParentReleased(PrefixCache):
    """Its pages belong to others."""

    def fork(self, parent: Request, child: Request, num_tokens: int) -> Allocation | None:
        allocation = super().fork(parent, child, num_tokens)
        if allocation is None:
            return None
        stale = self._table(parent, "fork")
        released = stale.released[0] * self._widths[0]
        old = [
            page
            for block in stale.blocks[0][: stale.released[0]]
            for page in (block,) * self._widths[0]
        ]
        return Allocation(
            ((*old, *allocation.pages[0][released:]), *allocation.pages[1:]), allocation.cached
        )


@mutant(caught_by="kv_cache.fork_copies")
class CopiesTheFirstPageOfABlock(PrefixCache):
    def fork(self, parent: Request, child: Request, num_tokens: int) -> Allocation | None:
        before = len(self._copies)
        allocation = super().fork(parent, child, num_tokens)
        self._copies[before:] = [
            copy for copy in self._copies[before:] if self._pool.refs[copy.dst]
        ]
        return allocation


@mutant(caught_by="kv_cache.fork_copies")
class CopiesTheFirstGroupOnly(PrefixCache):
    def fork(self, parent: Request, child: Request, num_tokens: int) -> Allocation | None:
        before = len(self._copies)
        allocation = super().fork(parent, child, num_tokens)
        if allocation is not None:
            self._copies[before:] = [
                copy for copy in self._copies[before:] if copy.dst in allocation.pages[0]
            ]
        return allocation


@mutant(caught_by="kv_cache.table")
class GivesOnePageABlock(PrefixCache):
    def _pages(self, group: int, blocks: Sequence[int]) -> Pages:
        return tuple(blocks)


@mutant(caught_by="kv_cache.held_by_group")
class CountsBlocksByGroup(PrefixCache):
    """Not pages."""

    @property
    def counts(self) -> PageCounts:
        counts = super().counts
        blocks = tuple(
            held // width for held, width in zip(counts.held_by_group, self._widths, strict=False)
        )
        return PageCounts(counts.empty, counts.held, counts.cached, blocks)


@mutant(caught_by="kv_cache.held_by_group")
class CountsTheFirstGroupForAll(PrefixCache):
    @property
    def counts(self) -> PageCounts:
        counts = super().counts
        return PageCounts(
            counts.empty, counts.held, counts.cached, (counts.held, *[0] * (len(self._groups) - 1))
        )


@mutant(caught_by="kv_cache.tables")
class LeavesOutWhatWasTrimmed(PrefixCache):
    def tables(self, request: Request) -> tuple[Pages, ...]:
        table = self._table(request, "tables")
        return tuple(self._pages(group, table.own(group)) for group in range(len(self._groups)))


@mutant(caught_by="kv_cache.tables")
class KnowsOnlyTheFirstTables(PrefixCache):
    """Not what was appended."""

    def __init__(self, options: PrefixOptions, context: KVContext) -> None:
        super().__init__(options, context)
        self.first: dict[str, tuple[Pages, ...]] = {}

    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        allocation = super().allocate(request, num_tokens)
        if allocation is not None:
            self.first.setdefault(request.id, allocation.pages)
        return allocation

    def tables(self, request: Request) -> tuple[Pages, ...]:
        return self.first.get(request.id) or super().tables(request)

    def free(self, request: Request) -> None:
        self.first.pop(request.id, None)
        super().free(request)


@mutant(caught_by="kv_cache.forgets")
class NotesWhatWasLookedUp(PrefixCache):
    def __init__(self, options: PrefixOptions, context: KVContext) -> None:
        super().__init__(options, context)
        self.lookups: dict[str, int] = {}

    def lookup(self, request: Request) -> int:
        self.lookups[request.id] = found = super().lookup(request)
        return found


@mutant(caught_by="kv_cache.reuse")
class FindsSoManyBlocksAtMost(PrefixCache):
    def _search(self, hashes: list[bytes], tokens: int) -> _Hit:
        return super()._search(hashes, min(tokens, 512 * self._hit_tokens))


# At the edges


@mutant(caught_by="kv_cache.misuse")
class TakesFewerTokensOfTheSameBlock(PrefixCache):
    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        table = self._tables.get(request.id)
        if table is not None and self.context.layout.capacity(num_tokens) == table.room:
            num_tokens = max(num_tokens, table.num_tokens)
        return super().allocate(request, num_tokens)


@mutant(caught_by="kv_cache.misuse")
class TakesFewerTokensThanWereForked(PrefixCache):
    def fork(self, parent: Request, child: Request, num_tokens: int) -> Allocation | None:
        allocation = super().fork(parent, child, num_tokens)
        if allocation is not None:
            self._tables[child.id].num_tokens = 1
        return allocation


@mutant(caught_by="kv_cache.misuse")
class TrimsNothingOfNobody(PrefixCache):
    def trim(self, request: Request, computed: int) -> None:
        if request.id in self._tables:
            super().trim(request, computed)


@mutant(caught_by="kv_cache.misuse")
class FreesNothingOfNobody(PrefixCache):
    def pages_needed(
        self, request: Request, num_tokens: int, without: Sequence[Request] = ()
    ) -> int:
        return super().pages_needed(
            request, num_tokens, [other for other in without if other.id in self._tables]
        )


@mutant(caught_by="kv_cache.pages_needed")
class RefusesAgainWhatItRefused(PrefixCache):
    """Fewer tokens would fit."""

    def __init__(self, options: PrefixOptions, context: KVContext) -> None:
        super().__init__(options, context)
        self.refused: dict[str, int] = {}  # request id -> the blocks available then

    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        if self.refused.get(request.id) == self.available_pages:
            return None
        allocation, hits = (
            super().allocate(request, num_tokens),
            request.id not in self._tables and self.lookup(request),
        )
        if allocation is None and hits:
            self.refused[request.id] = self.available_pages
        return allocation

    def free(self, request: Request) -> None:
        self.refused.pop(request.id, None)
        super().free(request)


@mutant(caught_by="kv_cache.hit")
class RemembersWhatItFound(PrefixCache):
    """Until something is committed or forgotten; not when a block is evicted."""

    def __init__(self, options: PrefixOptions, context: KVContext) -> None:
        super().__init__(options, context)
        self.found: dict[tuple[str, int], int] = {}

    def lookup(self, request: Request) -> int:
        if request.id in self._tables:
            return super().lookup(request)
        return self.found.setdefault((request.id, request.num_tokens), super().lookup(request))

    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        self._forget(request)
        return super().allocate(request, num_tokens)

    def commit(self, request: Request, upto: int) -> None:
        self.found.clear()
        super().commit(request, upto)

    def uncommit(self, request: Request, upto: int) -> None:
        self.found.clear()
        super().uncommit(request, upto)

    def reset(self) -> None:
        self.found.clear()
        super().reset()

    def free(self, request: Request) -> None:
        self._forget(request)
        super().free(request)

    def _forget(self, request: Request) -> None:
        self.found = {key: found for key, found in self.found.items() if key[0] != request.id}


@mutant(caught_by="kv_cache.uncommit")
class PublishesNothingAfterAnUncommit(PrefixCache):
    def uncommit(self, request: Request, upto: int) -> None:
        table = self._table(request, "uncommit")
        committed = table.num_committed
        super().uncommit(request, upto)
        table.num_committed = committed


@mutant(caught_by="kv_cache.uncommit")
class KeepsABlockUncommittedInPart(PrefixCache):
    """Unless it is the last."""

    def uncommit(self, request: Request, upto: int) -> None:
        end = -(-upto // self._hash_tokens)
        last = end >= self._table(request, "uncommit").num_committed
        super().uncommit(request, upto if last else end * self._hash_tokens)


@mutant(caught_by="kv_cache.uncommit")
class SamplesUncommitTheirParentsBlocks(PrefixCache):
    def fork(self, parent: Request, child: Request, num_tokens: int) -> Allocation | None:
        allocation = super().fork(parent, child, num_tokens)
        if allocation is not None:
            self._tables[child.id].num_found = 0
        return allocation


@mutant(caught_by="kv_cache.reuse")
class CommittingLessForgets(PrefixCache):
    def commit(self, request: Request, upto: int) -> None:
        self.uncommit(request, upto)
        super().commit(request, upto)


@mutant(caught_by="kv_cache.reset")
class ResetMindsOnlyWhoCommitted(PrefixCache):
    """A request that held blocks but had committed none publishes K and V computed before the
    reset."""

    def reset(self) -> None:
        super().reset()
        for table in self._tables.values():
            table.publishes = not table.num_committed


@mutant(caught_by="kv_cache.reset")
class ResetMindsOnlyChildrenWithParents(PrefixCache):
    def __init__(self, options: PrefixOptions, context: KVContext) -> None:
        super().__init__(options, context)
        self.parents: dict[str, Request] = {}  # child's id -> parent

    def fork(self, parent: Request, child: Request, num_tokens: int) -> Allocation | None:
        allocation = super().fork(parent, child, num_tokens)
        if allocation is not None:
            self.parents[child.id] = parent
        return allocation

    def free(self, request: Request) -> None:
        self.parents.pop(request.id, None)
        super().free(request)

    def reset(self) -> None:
        super().reset()
        for child, parent in self.parents.items():
            self._tables[child].publishes = parent.id not in self._tables


@mutant(caught_by="kv_cache.reset")
class NeverForgivesWhoHeldBlocksAtAReset(PrefixCache):
    """A request that was preempted since computes everything anew."""

    def __init__(self, options: PrefixOptions, context: KVContext) -> None:
        super().__init__(options, context)
        self.outdated: set[str] = set()

    def reset(self) -> None:
        super().reset()
        self.outdated |= set(self._tables)

    def commit(self, request: Request, upto: int) -> None:
        self._table(request, "commit").publishes &= request.id not in self.outdated
        super().commit(request, upto)


@mutant(caught_by="kv_cache.reset")
class ASecondResetForgivesReaders(PrefixCache):
    resets = 0

    def reset(self) -> None:
        super().reset()
        self.resets += 1
        for table in self._tables.values():
            table.publishes = self.resets > 1 and table.num_found > 0


@mutant(caught_by="kv_cache.fork_copies")
class SortsManyCopies(PrefixCache):
    def take_copies(self) -> Sequence[PageCopy]:
        copies = super().take_copies()
        return sorted(copies, key=lambda copy: copy.dst) if len(copies) > 2 else copies


@mutant(caught_by="kv_cache.fork_copies")
class CopiesABlockOnce(PrefixCache):
    """If three samples fork one request, only the last gets a copy of the partial block."""

    def take_copies(self) -> Sequence[PageCopy]:
        copies = super().take_copies()
        return list({copy.src: copy for copy in copies}.values()) if len(copies) > 2 else copies


@mutant(caught_by="kv_cache.lawful")
class TrimsForwardsOnly(PrefixCache):
    def trim(self, request: Request, computed: int) -> None:
        unseen, table = (
            self._groups[-1].spec.first_visible_block(computed),
            self._table(request, "trim"),
        )
        if unseen < table.released[-1] <= len(table.blocks[-1]):
            raise DovetailError("trimmed backwards")
        super().trim(request, computed)


@mutant(caught_by="kv_cache.request_untouched")
class RewritesParameters(PrefixCache):
    def free(self, request: Request) -> None:
        super().free(request)
        object.__setattr__(request.params, "top_k", 1)


# States


@mutant(caught_by="kv_cache.states")
class CopiesACheckpointAgain(PrefixCache):
    """Later, too, when its request has gone on."""

    def take_copies(self) -> Sequence[PageCopy]:
        copies = list(self._copies)
        self._copies = [] if len(copies) % 2 else copies
        return copies


@mutant(caught_by="kv_cache.state_copies")
class ForgetsTheCopyOfACheckpoint(PrefixCache):
    def take_copies(self) -> Sequence[PageCopy]:
        copies = super().take_copies()
        return () if self._recurrent else copies


@mutant(caught_by="kv_cache.state_copies")
class CopiesTheFirstPageOfACheckpoint(PrefixCache):
    def take_copies(self) -> Sequence[PageCopy]:
        copies = super().take_copies()
        return [
            copy
            for copy in copies
            if not self._recurrent
            or copy.dst in {table.blocks[-1][0] for table in self._tables.values()}
        ]


@mutant(caught_by="kv_cache.state_copies")
class HoldsACheckpointThatIsCopied(PrefixCache):
    def _allocate_first(self, request: Request, num_tokens: int) -> Allocation | None:
        hit = self._hit(request)
        allocation = super()._allocate_first(request, num_tokens)
        if allocation is not None and self._recurrent:
            self._pool.hold(
                [block for block in hit.blocks[-1] if block in self._pool._cached], len(self._paged)
            )
        return allocation


@mutant(caught_by="kv_cache.state_copies")
class EvictsACheckpointThatItCopies(PrefixCache):
    """For K and V, so that the live state may have some of its pages, in another order."""

    def _allocate_first(self, request: Request, num_tokens: int) -> Allocation | None:
        hit = self._hit(request)
        if (
            self._recurrent
            and hit.tokens
            and self._first_cost(hit, num_tokens, {}) <= self._pool.available
        ):
            self.pages = self._pool.pages(hit.blocks[-1][0])
            for group in self._paged:
                self._pool.hold(hit.blocks[group.number], group.number)
            self._pool.demote(self._groups[-1].key(self._chain(request).hashes, hit.tokens))
            self._pool.release(
                self._pool.take(max(0, self._pool.available - self._widths[-1]) // self._widths[0])
            )
            for group in self._paged:
                self._pool.release(hit.blocks[group.number], group.number)
        return super()._allocate_first(request, num_tokens)

    def _take_state(self, request: Request, hit: _Hit) -> tuple[list[int], bool]:
        if not hit.tokens:
            return super()._take_state(request, hit)
        live = self._pool.take(1, len(self._paged))
        self._copies += [
            PageCopy(src, dst)
            for src, dst in zip(self.pages, self._pool.pages(live[0]), strict=True)
            if src != dst
        ]
        return live, False


@mutant(caught_by="kv_cache.checkpoints")
class WritesTwoCheckpointsAStep(PrefixCache):
    def take_checkpoints(self) -> Sequence[Checkpoint]:
        taken = super().take_checkpoints()
        return [*taken, *taken[:1]]


@mutant(caught_by="kv_cache.checkpoints")
class TellsOfACheckpointAgain(PrefixCache):
    def take_checkpoints(self) -> Sequence[Checkpoint]:
        self.told = list(super().take_checkpoints()) or getattr(self, "told", [])
        return list(self.told)


@mutant(caught_by="kv_cache.checkpoints")
class WritesACheckpointWithinABlock(PrefixCache):
    def take_checkpoints(self) -> Sequence[Checkpoint]:
        return [
            replace(checkpoint, tokens=checkpoint.tokens - 1)
            for checkpoint in super().take_checkpoints()
        ]


@mutant(caught_by="kv_cache.checkpoints")
class WritesACheckpointOfWhatIsComputed(PrefixCache):
    """When the step that computes it has been submitted."""

    def _request_checkpoint(self, table: _Table, hashes: list[bytes], full: int) -> None:
        table.num_committed, committed = (
            max(0, table.num_committed - self._hit_tokens // self._hash_tokens),
            table.num_committed,
        )
        super()._request_checkpoint(table, hashes, committed)
        table.num_committed = committed


@mutant(caught_by="kv_cache.checkpoints")
class WritesCheckpointsOfGeneratedTokens(PrefixCache):
    def commit(self, request: Request, upto: int) -> None:
        table = self._table(request, "commit")
        if table.targets and upto > table.targets[-1] + self._hit_tokens:
            table.targets = (upto // self._hit_tokens * self._hit_tokens,)
        super().commit(request, upto)


@mutant(caught_by="kv_cache.checkpoints")
class GivesOutThePagesOfACheckpoint(PrefixCache):
    """Before it is written."""

    def _request_checkpoint(self, table: _Table, hashes: list[bytes], full: int) -> None:
        super()._request_checkpoint(table, hashes, full)
        if table.pending is not None:
            self._pool.release([table.pending.block], len(self._paged))

    def take_checkpoints(self) -> Sequence[Checkpoint]:
        for pending in self._pending.values():
            self._pool.refs[pending.block] += 1
            self._pool._held[-1] += self._widths[-1]
            for page in self._pool.pages(pending.block):
                if page in self._pool._empty:
                    self._pool._empty.remove(page)
        return super().take_checkpoints()

    def check_integrity(self) -> None: ...


@mutant(caught_by="kv_cache.checkpoint_found")
class FindsACheckpointBeforeItIsSubmitted(PrefixCache):
    def _request_checkpoint(self, table: _Table, hashes: list[bytes], full: int) -> None:
        super()._request_checkpoint(table, hashes, full)
        if table.pending is not None:
            self._pool.publish(
                table.pending.block, self._groups[-1].key(hashes, table.pending.tokens)
            )


@mutant(caught_by="kv_cache.checkpoint_found")
class ForgetsACheckpointThatIsWritten(PrefixCache):
    def take_checkpoints(self) -> Sequence[Checkpoint]:
        keys, taken = list(self._pending), super().take_checkpoints()
        for key in keys:
            self._pool.unpublish(self._pool.block_of.get(key) or 0, key)
        return taken


@mutant(caught_by="kv_cache.checkpoint_found")
class HoldsWrittenCheckpoints(PrefixCache):
    """As long as their requests."""

    def take_checkpoints(self) -> Sequence[Checkpoint]:
        taken = super().take_checkpoints()
        for checkpoint in taken:
            self._pool.hold(checkpoint.pages[:1], len(self._paged))
        return taken

    def free(self, request: Request) -> None:
        for block in (
            self._tables[request.id].checkpoints.values() if request.id in self._tables else ()
        ):
            if self._pool.refs[block]:
                self._pool.release([block], len(self._paged))
        super().free(request)


@mutant(caught_by="kv_cache.checkpoint_dropped")
class UncommitsOnlyBlocks(PrefixCache):
    """Not the checkpoint that the step would have written."""

    def _drop_checkpoints(self, table: _Table, hashes: list[bytes], upto: int) -> None:
        pending, table.pending = table.pending, None
        super()._drop_checkpoints(table, hashes, upto)
        table.pending = pending


@mutant(caught_by="kv_cache.checkpoint_dropped")
class KeepsCheckpointsOfAFailedRequest(PrefixCache):
    def _drop_checkpoints(self, table: _Table, hashes: list[bytes], upto: int) -> None:
        table.checkpoints.clear()
        super()._drop_checkpoints(table, hashes, upto)


@mutant(caught_by="kv_cache.checkpoint_dropped")
class DropsACheckpointOnlyOfTokensBeforeTheLast(PrefixCache):
    """Off by one."""

    def _drop_checkpoints(self, table: _Table, hashes: list[bytes], upto: int) -> None:
        super()._drop_checkpoints(table, hashes, upto + 1)


@mutant(caught_by="kv_cache.checkpoint_dropped")
class WritesTheCheckpointOfWhoIsGone(PrefixCache):
    def free(self, request: Request) -> None:
        table = self._tables.get(request.id)
        if table is not None:
            table.pending = None
        super().free(request)


@mutant(caught_by="kv_cache.checkpoint_dropped")
class ResetForgetsWhatIsPending(PrefixCache):
    def reset(self) -> None:
        pending = [(table, table.pending) for table in self._tables.values()]
        for table, _ in pending:
            table.pending = None
        super().reset()
        for table, dropped in pending:
            table.pending = dropped


@mutant(caught_by="kv_cache.checkpoint_dropped")
class ResetKeepsCheckpoints(PrefixCache):
    def reset(self) -> None:
        for table in self._tables.values():
            self._drop_pending(table)
            table.publishes = False
        kept = {block for table in self._tables.values() for block in table.checkpoints.values()}
        for key, block in [*self._pool.block_of.items()]:
            if block not in kept:
                self._pool.unpublish(block, key)


# Managers that compare cache keys in a shortened form


class _OtherKeys(PrefixCache):
    """Tells cache keys apart by `seen` only."""

    def seen(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        raise NotImplementedError

    def _chain(self, request: Request) -> HashChain:
        return self._chains.setdefault(
            request.id,
            _Keyless(request, self._hash_tokens, self._digest, self.seen(request.cache_keys)),
        )


@mutant(caught_by="kv_cache.cache_keys")
class TakesKeysInAnyCase(_OtherKeys):
    def seen(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(key.casefold() for key in keys)


@mutant(caught_by="kv_cache.cache_keys")
class TakesTheBeginningOfKeys(_OtherKeys):
    def seen(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(key[:32] for key in keys)


@mutant(caught_by="kv_cache.cache_keys")
class TakesTheEndOfKeys(_OtherKeys):
    def seen(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(key[-32:] for key in keys)


@mutant(caught_by="kv_cache.cache_keys")
class StripsKeys(_OtherKeys):
    def seen(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(key.strip() for key in keys)


@mutant(caught_by="kv_cache.cache_keys")
class TakesTheFirstKeys(_OtherKeys):
    def seen(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        return keys[:3]


@mutant(caught_by="kv_cache.cache_keys")
class EncodesKeysInAscii(_OtherKeys):
    def seen(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(key.encode("ascii", "replace").decode() for key in keys)


class _ShortIds(PrefixCache):
    """Keeps the ids of those that hold blocks, in a short form."""

    def __init__(self, options: PrefixOptions, context: KVContext) -> None:
        super().__init__(options, context)
        self.holders: dict[str, str] = {}

    def short(self, id: str) -> str:
        raise NotImplementedError

    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        if self.holders.setdefault(self.short(request.id), request.id) != request.id:
            raise DovetailError(f"{request.id} holds blocks already")
        return super().allocate(request, num_tokens)

    def free(self, request: Request) -> None:
        self.holders.pop(self.short(request.id), None)
        super().free(request)


@mutant(caught_by="kv_cache.ids", error=DovetailError)
class TakesTheBeginningOfIds(_ShortIds):
    def short(self, id: str) -> str:
        return id[:8]


@mutant(caught_by="kv_cache.ids", error=DovetailError)
class TakesTheEndOfIds(_ShortIds):
    def short(self, id: str) -> str:
        return id[-8:]


@mutant(caught_by="kv_cache.ids", error=DovetailError)
class TakesIdsInAnyCase(_ShortIds):
    def short(self, id: str) -> str:
        return id.casefold()


@mutant(caught_by="kv_cache.reuse")
class FindsOnlyWhatTheSameClientComputed(_OtherKeys):
    def _chain(self, request: Request) -> HashChain:
        return self._chains.setdefault(
            request.id,
            _Keyless(
                request,
                self._hash_tokens,
                self._digest,
                (*request.cache_keys, repr(request.client)),
            ),
        )


@mutant(caught_by="kv_cache.reuse")
class FindsOnlyForTheSamePriority(_OtherKeys):
    def _chain(self, request: Request) -> HashChain:
        return self._chains.setdefault(
            request.id,
            _Keyless(
                request,
                self._hash_tokens,
                self._digest,
                (*request.cache_keys, repr(request.priority)),
            ),
        )


# What changes with use


class _Counting(PrefixCache):
    def __init__(self, options: PrefixOptions, context: KVContext) -> None:
        super().__init__(options, context)
        self.freed = 0

    def free(self, request: Request) -> None:
        super().free(request)
        self.freed += 1


@mutant(caught_by="kv_cache.long_use")
class FindsNothingAfterAThousandRequests(_Counting):
    def lookup(self, request: Request) -> int:
        return 0 if self.freed >= 1000 else super().lookup(request)


@mutant(caught_by="kv_cache.long_use")
class LosesABlockOnceInAWhile(_Counting):
    def free(self, request: Request) -> None:
        super().free(request)
        if self.freed % 500 == 0 and self._pool._empty:
            self._pool._empty.pop()

    def check_integrity(self) -> None: ...


@mutant(caught_by="kv_cache.long_use")
class KeepsANumberOfEachRequest(_Counting):
    def __init__(self, options: PrefixOptions, context: KVContext) -> None:
        super().__init__(options, context)
        self.lengths: list[int] = []

    def free(self, request: Request) -> None:
        super().free(request)
        self.lengths.append(request.num_tokens)


@mutant(caught_by="kv_cache.forgets")
class KeepsTheRequestsOfHits(PrefixCache):
    def __init__(self, options: PrefixOptions, context: KVContext) -> None:
        super().__init__(options, context)
        self.readers: dict[bytes, Request] = {}

    def on_hit(self, block: CachedBlock, request: Request) -> None:
        self.readers[block.key] = request


class _JoinedChain(HashChain):
    def __init__(self, request: Request, block_size: int, digest: Digest, after: int) -> None:
        super().__init__(request, block_size, digest, None, after)
        self._root = digest(",".join(request.cache_keys).encode())


class _OwnChains(PrefixCache):
    """Hashes prefixes by chains of its own."""

    chain_type: type[HashChain] = HashChain

    def _chain(self, request: Request) -> HashChain:
        chain = self._chains.get(request.id)
        if chain is None or chain.request is not request:
            chain = self.chain_type(request, self._hash_tokens, self._digest, after=self._after)
            self._chains[request.id] = chain
        return chain


@mutant(caught_by="kv_cache.joined_keys")
class JoinsKeysByAComma(_OwnChains):
    chain_type = _JoinedChain


class _OneImage:
    """A request with the first of its images only."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.media = request.media[:1]

    def __getattr__(self, name: str) -> object:
        return getattr(self.request, name)


class _FirstImageChain(HashChain):
    def extend(self, num_blocks: int) -> list[bytes]:
        whole = self.request
        self.request = _OneImage(whole)  # type: ignore[assignment]
        try:
            return super().extend(num_blocks)
        finally:
            self.request = whole


@mutant(caught_by="kv_cache.media")
class TellsPromptsApartByTheirFirstImage(_OwnChains):
    chain_type = _FirstImageChain
