"""KV-cache managers with one thing wrong."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.api.kv_cache import Allocation, BlockCopy, BlockCounts, KVContext
from dovetail.errors import DovetailError
from dovetail.request import Request
from dovetail.sampling_params import SamplingParams
from dovetail_kv_cache.prefix import Digest, HashChain, PrefixCache, PrefixOptions, _Table
from tests.conformance.mutants import mutant

# Whose blocks


@mutant(caught_by="kv_cache.private")
class HitsInTheWrongOrder(PrefixCache):
    def _allocate_first(self, request: Request, num_tokens: int) -> Allocation | None:
        allocation, hits = super()._allocate_first(request, num_tokens), self._hits(request)
        if allocation is None or not allocation.cached:
            return allocation
        table = self._tables[request.id].blocks
        table[: len(hits)] = table[: len(hits)][::-1]
        return Allocation(tuple(table), allocation.cached)


@mutant(caught_by="kv_cache.counts")
class FreesWhatOthersHold(PrefixCache):
    def free(self, request: Request) -> None:
        if request.id in self._tables:
            for block in self._tables[request.id].own:
                self._pool.refs[block] = 1
        super().free(request)


@mutant(caught_by="kv_cache.exclusive")
class PinsTheHitTooLate(PrefixCache):
    """A new block may be one of the hit's."""

    def _allocate_first(self, request: Request, num_tokens: int) -> Allocation | None:
        hits, wanted = self._hits(request), -(-num_tokens // self._block_size)
        if self._first_cost(hits, wanted, {}) > self._pool.available:
            return None
        new = [self._pool.take() for _ in range(wanted - len(hits))]
        self._pool.hold(hits)
        self._tables[request.id] = _Table(request, hits + new, num_tokens, num_found=len(hits))
        return Allocation((*hits, *new), len(hits) * self._block_size)


@mutant(caught_by="kv_cache.table")
class TakesABlockAhead(PrefixCache):
    def blocks_needed(self, request: Request, num_tokens: int, without: Sequence[Request] = ()) -> int:
        return super().blocks_needed(request, num_tokens + self._block_size, without)

    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        return super().allocate(request, num_tokens + self._block_size)


@mutant(caught_by="kv_cache.counts")
class CountsHoldersForBlocks(PrefixCache):
    """A shared block counts as many times as it is held."""

    @property
    def counts(self) -> BlockCounts:
        counts = super().counts
        return BlockCounts(counts.free, sum(self._pool.refs), counts.cached)


@mutant(caught_by="kv_cache.counts")
class LosesTheLastBlock(PrefixCache):
    def free(self, request: Request) -> None:
        table = self._tables.get(request.id)
        if table is not None:
            self._pool.refs[table.blocks[-1]] += 1
        super().free(request)


@mutant(caught_by="kv_cache.no_leak")
class LosesABlockAndHidesIt(PrefixCache):
    """The counts are of the tables, not of the pool."""

    def free(self, request: Request) -> None:
        super().free(request)
        if len(self._pool._empty) > 1:
            self._pool._empty.pop(0)

    @property
    def counts(self) -> BlockCounts:
        held, cached = sum(refs > 0 for refs in self._pool.refs), super().counts.cached
        return BlockCounts(self.context.num_blocks - held - cached, held, cached)

    @property
    def available_blocks(self) -> int:
        return self.context.num_blocks - self.counts.held

    def check_integrity(self) -> None: ...


@mutant(caught_by="kv_cache.lawful")
class FreesOnlyWhatHolds(PrefixCache):
    def free(self, request: Request) -> None:
        self._table(request, "free")
        super().free(request)


@mutant(caught_by="kv_cache.integrity")
class TakesTrimmedBlocksForLost(PrefixCache):
    def check_integrity(self) -> None:
        if any(table.num_trimmed for table in self._tables.values()):
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
        request.output_token_ids[:] = type(request.output_token_ids)("q", sorted(request.output_token_ids))  # type: ignore[index]


@mutant(caught_by="kv_cache.answers")
class GivesOutItsOwnTable(PrefixCache):
    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        first = request.id not in self._tables
        allocation = super().allocate(request, num_tokens)
        return allocation and Allocation(self._tables[request.id].blocks if first else allocation.blocks, allocation.cached)  # type: ignore[arg-type]


@mutant(caught_by="kv_cache.answers")
class UsesOneListOfCopies(PrefixCache):
    def __init__(self, options: PrefixOptions, context: KVContext) -> None:
        super().__init__(options, context)
        self.told: list[BlockCopy] = []

    def take_copies(self) -> Sequence[BlockCopy]:
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
            self._pool.hold(self._hits(request))
        return allocation


@mutant(caught_by="kv_cache.blocks_needed")
class TakesCachedHitsForNothing(PrefixCache):
    """A hit on a block that nobody holds leaves one available block fewer."""

    def blocks_needed(self, request: Request, num_tokens: int, without: Sequence[Request] = ()) -> int:
        if request.id in self._tables:
            return super().blocks_needed(request, num_tokens, without)
        return max(0, -(-num_tokens // self._block_size) - len(self._hits(request)))


@mutant(caught_by="kv_cache.blocks_needed_without")
class IgnoresWithout(PrefixCache):
    def blocks_needed(self, request: Request, num_tokens: int, without: Sequence[Request] = ()) -> int:
        return super().blocks_needed(request, num_tokens)


@mutant(caught_by="kv_cache.blocks_needed_without")
class CountsSharedBlocksAsFreed(PrefixCache):
    """Blocks that others hold, too, don't become available."""

    def blocks_needed(self, request: Request, num_tokens: int, without: Sequence[Request] = ()) -> int:
        shared = {block for other in without for block in self._tables[other.id].own}
        return super().blocks_needed(request, num_tokens) - len(shared)


@mutant(caught_by="kv_cache.blocks_needed_without")
class TakesTheirHitsForNothing(PrefixCache):
    """A hit on a block that only those freed held leaves one available block fewer."""

    def blocks_needed(self, request: Request, num_tokens: int, without: Sequence[Request] = ()) -> int:
        freed = -super().blocks_needed(without[0], 1, without) if without else 0
        return super().blocks_needed(request, num_tokens) - freed


@mutant(caught_by="kv_cache.pure")
class LookupKeepsFromEviction(PrefixCache):
    def lookup(self, request: Request) -> int:
        for block in self._hits(request):
            if block in self._pool._cached:
                self._pool._cached.remove(block)
                self._pool._cached.append(block)
        return super().lookup(request)


# Finding again


@mutant(caught_by="kv_cache.hit_length")
class FindsTheWholeRequest(PrefixCache):
    def lookup(self, request: Request) -> int:
        found, end = super().lookup(request), request.num_tokens
        last = end - self._block_size
        whole = found == last and self._chain(request).extend(end // self._block_size)[-1] in self._pool.block_of
        return end if whole and request.params.prompt_logprobs is None and self.options.reuse else found


class _OwnTokensOnly(HashChain):
    __slots__ = ()

    def extend(self, num_blocks: int) -> list[bytes]:
        tokens, size = (*self.request.prompt_token_ids, *self.request.output_token_ids), self._block_size
        self.hashes += [repr((self._root, tokens[i * size : (i + 1) * size])).encode() for i in range(len(self.hashes), num_blocks)]
        return self.hashes


@mutant(caught_by="kv_cache.hit")
class BlocksFoundByTheirOwnTokens(PrefixCache):
    """Not by all tokens before them."""

    def _chain(self, request: Request) -> HashChain:
        if self._chains.get(request.id) is None or self._chains[request.id].request is not request:
            self._chains[request.id] = _OwnTokensOnly(request, self._block_size, self._digest)
        return self._chains[request.id]


@mutant(caught_by="kv_cache.hit")
class CommitsTheBlockBegun(PrefixCache):
    """Its end isn't computed yet."""

    def commit(self, request: Request, upto: int) -> None:
        end = -(-upto // self._block_size) * self._block_size
        super().commit(request, end if end <= request.num_tokens and end <= len(request.prompt_token_ids) else upto)


@mutant(caught_by="kv_cache.reuse")
class ForgetsAtFree(PrefixCache):
    def free(self, request: Request) -> None:
        if request.id in self._tables:
            self._tables[request.id].num_found = 0
            self.uncommit(request, 0)
        super().free(request)


@mutant(caught_by="kv_cache.reuse")
class FindsOneBlockLess(PrefixCache):
    def _hits(self, request: Request) -> list[int]:
        return super()._hits(request)[:-1]


@mutant(caught_by="kv_cache.same_step")
class PublishesAtFree(PrefixCache):
    def commit(self, request: Request, upto: int) -> None:
        self._table(request, "commit")

    def free(self, request: Request) -> None:
        table = self._tables.get(request.id)
        if table is not None:
            super().commit(request, min(request.num_tokens, len(table.blocks) * self._block_size))
        super().free(request)


@mutant(caught_by="kv_cache.generated")
class CommitsPromptsAlone(PrefixCache):
    def commit(self, request: Request, upto: int) -> None:
        super().commit(request, min(upto, request.prompt_tokens))


class _Keyless(HashChain):
    __slots__ = ()

    def __init__(self, request: Request, block_size: int, digest: Digest, keys: tuple[str, ...]) -> None:
        super().__init__(request, block_size, digest)
        self._root = repr(keys).encode().ljust(16)


@mutant(caught_by="kv_cache.cache_keys")
class IgnoresCacheKeys(PrefixCache):
    def _chain(self, request: Request) -> HashChain:
        return self._chains.setdefault(request.id, _Keyless(request, self._block_size, self._digest, ()))


@mutant(caught_by="kv_cache.cache_keys")
class JoinsCacheKeys(PrefixCache):
    """("a", "b") is ("ab",)."""

    def _chain(self, request: Request) -> HashChain:
        return self._chains.setdefault(request.id, _Keyless(request, self._block_size, self._digest, ("".join(request.cache_keys),)))


@mutant(caught_by="kv_cache.prompt_logprobs")
class TakesNoLogprobsWantedForNone(PrefixCache):
    """`prompt_logprobs=0` asks for those of the prompt's own tokens."""

    def _hits(self, request: Request) -> list[int]:
        if request.params.prompt_logprobs == 0:
            plain = Request(request.id, request.prompt_token_ids, SamplingParams(), max_tokens=1, cache_keys=request.cache_keys)
            return super()._hits(plain)
        return super()._hits(request)


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
        tokens = [token & 0xFFFF for token in (*request.prompt_token_ids, *request.output_token_ids)]
        return HashChain(Request(request.id, tokens, request.params, max_tokens=1, cache_keys=request.cache_keys), self._block_size, self._digest)


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
        source, wanted = self._table(parent, "fork").blocks, -(-num_tokens // self._block_size)
        if wanted > self._pool.available or super().fork(parent, child, num_tokens) is None:
            return None
        self._pool.release(self._tables[child.id].own)
        blocks = tuple(self._pool.take() for _ in range(wanted))
        self._tables[child.id].blocks[:] = blocks
        self._copies = [BlockCopy(src, dst) for src, dst in zip(source, blocks, strict=False)]
        return Allocation(blocks, num_tokens)


@mutant(caught_by="kv_cache.fork_copies")
class ForgetsTheCopy(PrefixCache):
    def take_copies(self) -> Sequence[BlockCopy]:
        super().take_copies()
        return ()


@mutant(caught_by="kv_cache.fork_copies")
class CopiesTheWrongWay(PrefixCache):
    def take_copies(self) -> Sequence[BlockCopy]:
        return [BlockCopy(copy.dst, copy.src) for copy in super().take_copies()]


@mutant(caught_by="kv_cache.private")
class TellsACopyAgain(PrefixCache):
    def take_copies(self) -> Sequence[BlockCopy]:
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
            self._pool.hold(source.blocks[source.num_trimmed : num_tokens // self._block_size])
        return allocation


@mutant(caught_by="kv_cache.trim")
class TrimsABlockStillNeeded(PrefixCache):
    def trim(self, request: Request, first_needed_token: int) -> None:
        super().trim(request, first_needed_token + self._block_size - 1)


@mutant(caught_by="kv_cache.trim")
class NeverTrims(PrefixCache):
    def trim(self, request: Request, first_needed_token: int) -> None: ...


@mutant(caught_by="kv_cache.trim")
class TrimsOneTokenLate(PrefixCache):
    def trim(self, request: Request, first_needed_token: int) -> None:
        super().trim(request, max(0, first_needed_token - 1))


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
    def _hits(self, request: Request) -> list[int]:
        return super()._hits(request)[:512]


# At the edges


@mutant(caught_by="kv_cache.misuse")
class TakesFewerTokensOfTheSameBlock(PrefixCache):
    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        table = self._tables.get(request.id)
        if table is not None and -(-num_tokens // self._block_size) == len(table.blocks):
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
    def trim(self, request: Request, first_needed_token: int) -> None:
        if request.id in self._tables:
            super().trim(request, first_needed_token)


@mutant(caught_by="kv_cache.misuse")
class FreesNothingOfNobody(PrefixCache):
    def blocks_needed(self, request: Request, num_tokens: int, without: Sequence[Request] = ()) -> int:
        return super().blocks_needed(request, num_tokens, [other for other in without if other.id in self._tables])


@mutant(caught_by="kv_cache.blocks_needed")
class RefusesAgainWhatItRefused(PrefixCache):
    """Fewer tokens would fit."""

    def __init__(self, options: PrefixOptions, context: KVContext) -> None:
        super().__init__(options, context)
        self.refused: dict[str, int] = {}  # request id -> the blocks available then

    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        if self.refused.get(request.id) == self.available_blocks:
            return None
        allocation, hits = super().allocate(request, num_tokens), request.id not in self._tables and self._hits(request)
        if allocation is None and hits:
            self.refused[request.id] = self.available_blocks
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
        end = -(-upto // self._block_size)
        last = end >= self._table(request, "uncommit").num_committed
        super().uncommit(request, upto if last else end * self._block_size)


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
    """A request that held blocks but had committed none publishes K and V computed before the reset."""

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
    def take_copies(self) -> Sequence[BlockCopy]:
        copies = super().take_copies()
        return sorted(copies, key=lambda copy: copy.dst) if len(copies) > 2 else copies


@mutant(caught_by="kv_cache.fork_copies")
class CopiesABlockOnce(PrefixCache):
    """If three samples fork one request, only the last gets a copy of the partial block."""

    def take_copies(self) -> Sequence[BlockCopy]:
        copies = super().take_copies()
        return list({copy.src: copy for copy in copies}.values()) if len(copies) > 2 else copies


@mutant(caught_by="kv_cache.lawful")
class TrimsForwardsOnly(PrefixCache):
    def trim(self, request: Request, first_needed_token: int) -> None:
        if first_needed_token // self._block_size < self._table(request, "trim").num_trimmed:
            raise DovetailError("trimmed backwards")
        super().trim(request, first_needed_token)


@mutant(caught_by="kv_cache.request_untouched")
class RewritesParameters(PrefixCache):
    def free(self, request: Request) -> None:
        super().free(request)
        object.__setattr__(request.params, "top_k", 1)
