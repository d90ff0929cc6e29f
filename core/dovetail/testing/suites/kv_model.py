"""`KVWorld`: drives a KV-cache manager like the engine does, with a model of memory that records which tokens were written where.

The model has no hashes, trees, reference counts or eviction. For each slot of each block, it keeps the tokens whose K and V were written there last,
and checks that everything a request believes to be computed is in its blocks. A twin of the manager gets the same actions but no queries.

A script (`kv_scripts`) is a list of actions, each (method of `KVWorld`, arguments); an action that is impossible in the current state is a no-op, so
that any list is a valid script.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.api.kv_cache import BlockCopy, KVCacheManager, KVContext, KVGroup, KVLayout
from dovetail.engine.live_request import LiveRequest
from dovetail.errors import describe
from dovetail.sampling_params import SamplingParams
from dovetail.testing.checks import CheckFailed

Act = tuple[str, tuple[Any, ...]]
Content = tuple[tuple[str, ...], tuple[int, ...]]  # content of a slot: cache keys, and all tokens up to it


class Broken(CheckFailed):
    """A manager violated a claim in this script."""

    def __init__(self, message: str, claim: str, shape: Shape, script: Sequence[Act]) -> None:
        super().__init__(message)
        self.claim, self.shape, self.script = claim, shape, script


class Ended(Exception):
    """A claim in `FATAL` that isn't watched was violated: the script can't continue."""


READ_ONLY = (  # attributes of a request
    *("id", "prompt_tokens", "max_tokens", "cache_keys", "num_computed", "blocks", "cached_tokens", "priority", "client", "params"),
    *("arrival_time", "deadline", "ttft_deadline", "tbt_s", "predicted_tokens", "parent", "stop_ids"),
)
FATAL = ("lawful", "table", "hit_length", "exclusive", "counts", "integrity")  # the state is inconsistent: the rest is meaningless, or may not end


@dataclass(frozen=True)
class Shape:
    """Shape of a pool."""

    block_size: int
    num_blocks: int
    window: int | None = None

    @property
    def context(self) -> KVContext:
        return KVContext(KVLayout((KVGroup((0,), self.window, 1),), self.block_size, "none"), self.num_blocks)


def make_request(id: str, tokens: Sequence[int], *, keys: tuple[str, ...] = (), prompt_logprobs: int | None = None) -> LiveRequest:
    """Make a request as the engine does."""
    return LiveRequest(id, tokens, SamplingParams(prompt_logprobs=prompt_logprobs), max_tokens=1000, cache_keys=keys)


def generate(request: LiveRequest, tokens: Sequence[int]) -> None:
    """Append tokens as the engine does when ids arrive."""
    request.output_token_ids.extend(tokens)


@dataclass(eq=False)
class Row:
    """The model's state of a request: all its tokens (the last may be unknown to the manager), its table, and the tokens computed or planned."""

    request: LiveRequest
    tokens: list[int]
    table: list[int] = field(default_factory=list)
    computed: int = 0
    prefill_end: int = 0  # tokens known when it was admitted
    planned_from: int | None = None  # computed before this step's grant
    admitted_now: bool = False
    copied: range = range(0)  # positions in a block copied by a fork, until the copy is verified
    trimmed: int = 0  # blocks
    disowned: bool = False  # by a reset: it depends on dropped values

    def __post_init__(self) -> None:
        self.given = {name: copy.deepcopy(getattr(self.request, name)) for name in READ_ONLY}  # before the manager saw it

    @property
    def settled(self) -> int:
        """Number of tokens written by earlier steps."""
        return self.computed if self.planned_from is None else self.planned_from

    @property
    def own(self) -> list[int]:
        return self.table[self.trimmed :]

    def content(self, position: int) -> Content:
        return self.request.cache_keys, tuple(self.tokens[: position + 1])


class KVWorld:
    """A manager, its requests and its memory. `watch`: claim whose violation is raised; None: record the first violation of each claim."""

    def __init__(self, make: Callable[[KVContext], KVCacheManager], shape: Shape, watch: str | None = None) -> None:
        self.kv, self.twin, self.shape, self.watch = make(shape.context), make(shape.context), shape, watch
        self.script: Sequence[Act] = ()
        self.breaches: dict[str, Broken] = {}  # by claim
        self.block_size, self.num_blocks, self.window = shape.block_size, shape.num_blocks, shape.window
        self.memory: dict[tuple[int, int], Content] = {}  # (block, offset) -> content written last
        self.committed: set[Content] = set()  # last token of each full block, unless dropped since
        self.nothing_lost = True  # False once a block may have been evicted, or a prefix interrupted: then lookups may find less
        self.live: list[Row] = []
        self.hogs = self.looks = 0
        self.copies: list[tuple[Sequence[BlockCopy], tuple[BlockCopy, ...]]] = []  # results of `take_copies`, and their values then
        self.probe = make_request("probe", [98])
        self.ids: list[str] = [f"r{number}" for number in range(7, -1, -1)]  # unused ids: reused once their request has ended

    def run(self, script: Sequence[Act]) -> None:
        """Run a script. Raises `Broken` if it breaks the watched claim."""
        self.script = script
        try:
            self._check_books()
            for name, arguments in script:
                getattr(self, name)(*arguments)
                self._check_books()
            self._end()
        except Ended:
            return

    # Requests come …

    def arrive(self, base: tuple[int, ...], blocks: int, tail: int, keys: tuple[str, ...], prompt_logprobs: int | None) -> None:
        if self.ids:
            length = max(1, blocks * self.block_size + tail)
            tokens = [base[position // self.block_size % len(base)] for position in range(length)]
            self.live.append(Row(make_request(self.ids.pop(), tokens, keys=keys, prompt_logprobs=prompt_logprobs), tokens))

    def hog(self, leave: int, goes: bool) -> None:
        """Add a request that shares nothing, and takes all but a few of the available blocks; at its end they hold K and V that no other wants."""
        blocks = self._ask("available_blocks") - leave
        if self.ids and blocks > 0:
            self.hogs += 1
            tokens = [1000 + self.hogs] * (blocks * self.block_size)
            self.live.append(Row(make_request(self.ids.pop(), tokens), tokens))
            self.grant(len(self.live) - 1, len(tokens), 0)
            if goes:
                self.submit(0, True)
                self.finish(len(self.live) - 1)

    # … are planned …

    def grant(self, who: int, chunk: int, spare: int) -> None:
        """Allocate blocks for the next `chunk` tokens plus `spare` more, and commit these tokens."""
        row = self._row(who)
        if row is None or row.planned_from is not None or (not row.table and len(row.tokens) > row.request.num_tokens):
            return
        waiting = not row.table
        start = self._lookup(row) if waiting else row.computed
        end = min(start + chunk, len(row.tokens))
        if end > start and not self._take_blocks(row, start, max(end + spare, len(row.table) * self.block_size)):
            end = start + (end - start) // 2  # fewer may fit
            if end == start or not self._take_blocks(row, start, max(end, len(row.table) * self.block_size)):
                return
        if end > start:
            row.planned_from, row.computed, row.admitted_now = start, end, waiting
            if waiting:
                row.prefill_end = row.request.num_tokens
            if start < row.prefill_end:
                self._commit(row)

    def evict(self, who: int, others: int, chunk: int) -> None:
        """Free some requests that aren't planned in this step for another, and check the forecast for that one."""
        waiting = [row for row in self.live if not row.table]
        if not waiting:
            return
        row = waiting[who % len(waiting)]
        victims = [other for other in self.live if other is not row and other.table and other.planned_from is None][:others]
        going = [victim.request for victim in victims]
        room = min(chunk, len(row.tokens))
        foretold, available = self._ask("blocks_needed", row.request, room, going), self._ask("available_blocks")
        for victim in victims:
            self._release(victim)
        freed, needed = self._ask("available_blocks") - available, self._ask("blocks_needed", row.request, room)
        told = (
            f"blocks_needed({row.request}, {room}, without={going}) was {foretold}; freeing them made {freed} available, and {needed} are needed now"
        )
        self._hold("blocks_needed_without", foretold == needed - freed, told)

    def fork(self, who: int, tokens: int) -> None:
        """Add a new request with the prompt of another."""
        parent = self._row(who)
        if parent is None or not self.ids or not self.kv.capabilities.fork:
            return
        prompt = list(parent.request.prompt_token_ids)
        tokens = min(tokens, parent.settled, len(prompt) - 1)
        visible_from = 0 if self.window is None else max(0, tokens - self.window + 1)
        if not parent.table or tokens < 1 or parent.trimmed * self.block_size > visible_from:
            return
        child = Row(make_request(self.ids[-1], prompt, keys=parent.request.cache_keys), prompt, prefill_end=len(prompt))
        child.trimmed, child.disowned = parent.trimmed, parent.disowned
        if self._fork_blocks(parent, child, tokens):
            child.computed = tokens
            child.copied = range(tokens // self.block_size * self.block_size, tokens)
            self.ids.pop()
            self.live.append(child)

    def preempt(self, who: int) -> None:
        row = self._row(who)
        if row is not None:
            self._release(row)

    def preempt_last_granted(self) -> None:
        granted = [row for row in self.live if row.planned_from is not None]
        if granted:
            self._release(granted[-1])

    def take_back_last_granted(self) -> None:
        """Revoke a grant; the request keeps its blocks."""
        granted = [row for row in self.live if row.planned_from is not None]
        if granted:
            self._take_back(granted[-1])

    def finish(self, who: int) -> None:
        row = self._row(who)
        if row is not None:
            self._release(row)
            self.live.remove(row)
            self._tell("free", row.request)  # the engine frees at every end, blocks or none
            self._check_request(row)
            self.ids.append(row.request.id)

    def trim(self, who: int) -> None:
        row = self._row(who)
        if self.window is None or row is None or not row.table or row.planned_from is not None:
            return
        needed = max(0, row.computed - self.window + 1)
        self._tell("trim", row.request, needed)
        self.nothing_lost = False
        self._tell("trim", row.request, needed // 2)  # no layer reads what was trimmed before
        if self.kv.capabilities.trim:
            row.trimmed = max(row.trimmed, needed // self.block_size)
        held, expected = self._ask("counts").held, len(self._held())
        told = f"trim({row.request}, {needed}) with blocks of {self.block_size} leaves {expected} blocks held; the counts say {held}"
        self._hold("trim", held == expected, told)

    # … and run

    def step(self, chunk: int, sampled: int) -> None:
        """Run a plain step, in which every request that can gets a grant."""
        for who in range(len(self.live)):
            self.grant(who, chunk, 0)
        self.submit(sampled, True)

    def submit(self, sampled: int, deliver: bool) -> None:
        """Run copies, then the writes of every planned request. Those that reached their last token get one more, known now or later."""
        copies = self._tell("take_copies")
        self.copies.append((copies, tuple(copies)))
        for src, dst in ((copied.src, copied.dst) for copied in copies):
            for offset in range(self.block_size):
                self.memory.pop((dst, offset), None)
                if (src, offset) in self.memory:
                    self.memory[dst, offset] = self.memory[src, offset]
        for row in self.live:
            if row.planned_from is not None:
                for position in range(row.planned_from, row.computed):
                    self.memory[self._slot(row, position)] = row.content(position)
                if row.computed == len(row.tokens):
                    row.tokens.append(sampled)
            row.planned_from, row.admitted_now = None, False
        if deliver:
            self.deliver()
        self._check_memory()

    def deliver(self) -> None:
        """Let the ids in flight arrive."""
        for row in self.live:
            generate(row.request, row.tokens[row.request.num_tokens :])
            if row.table:
                self._commit(row)

    def reset(self) -> None:
        if all(row.planned_from is None for row in self.live):
            self._tell("reset")
            self.committed.clear()
            self.nothing_lost = True  # of what is committed from now on
            for row in self.live:
                row.disowned = bool(row.table)

    # Calls of the manager

    def _tell(self, method: str, *arguments: Any) -> Any:
        """Call a method of both managers, whose results must be equal."""
        answers = [self._lawful(manager, method, *arguments) for manager in (self.kv, self.twin)]
        if answers[0] != answers[1]:
            self._broken("pure", f"{method}{arguments} answered {answers[0]}, and {answers[1]} where no question had been asked before")
        return answers[0]

    def _ask(self, question: str, *arguments: Any) -> Any:
        """Query one of the two managers, twice."""
        answers = [self._lawful(self.kv, question, *arguments) for _ in range(2)]
        if answers[0] != answers[1]:
            self._broken("pure", f"{question}{arguments} answered {answers[0]}, and {answers[1]} when asked again")
        return answers[0]

    def _lawful(self, manager: KVCacheManager, name: str, *arguments: Any) -> Any:
        try:
            member = getattr(manager, name)
            return member(*arguments) if callable(member) else member
        except Exception as error:
            self._broken("lawful", f"{name}{arguments} is a valid call but raised {describe(error)}")

    def _lookup(self, row: Row) -> int:
        """Look a request up, and judge the answer."""
        found, known, size = self._ask("lookup", row.request), row.request.num_tokens, self.block_size
        told = f"lookup found {found} of {known} known tokens of {row.request}, with blocks of {size}"
        self._hold("hit_length", 0 <= found < known and found % size == 0, told)
        computed = 0
        if self.kv.capabilities.reuse and row.request.params.prompt_logprobs is None:
            while computed + size < known and row.content(computed + size - 1) in self.committed:
                computed += size
        told = f"lookup found {found} tokens of {row.request}, of which at most {computed} were committed under its cache_keys and may be shared"
        self._hold("hit", found <= computed, told)
        told = f"lookup found {found} tokens of {row.request}, of which {computed} were committed, and no block has been given up since"
        self._hold("reuse", found >= computed or not self.nothing_lost, told)
        return int(found)

    def _take_blocks(self, row: Row, start: int, room: int) -> bool:
        """Give a request its first blocks, some of them hits up to `start`, or more blocks."""
        waiting, needed, available = not row.table, self._ask("blocks_needed", row.request, room), self._ask("available_blocks")
        before = self._snapshot()
        allocation = self._tell("allocate", row.request, room)
        answered = "None" if allocation is None else f"{len(allocation.blocks)} blocks"
        told = f"blocks_needed({row.request}, {room}) was {needed}, {available} were available, and allocate answered {answered}"
        self._hold("blocks_needed", (allocation is not None) == (needed <= available), told)
        if allocation is None:
            told = f"allocate({row.request}, {room}) returned None; counts, lookups and unshared blocks were {before} and are {self._snapshot()}"
            self._hold("failed_allocate", self._snapshot() == before, told)
            return False
        left = self._ask("available_blocks")
        self._hold("blocks_needed", left == available - needed, f"{told}; now {left} are available")
        cached = start if waiting else 0
        self._hold("hit", allocation.cached == cached, f"allocate says {allocation.cached} tokens of {row.request} are cached; lookup said {cached}")
        self._append(row, allocation.blocks, shared=cached // self.block_size, tokens=room)
        return True

    def _fork_blocks(self, parent: Row, child: Row, tokens: int) -> bool:
        available, before, full = self._ask("available_blocks"), self._snapshot(), tokens // self.block_size
        allocation = self._tell("fork", parent.request, child.request, tokens)
        told = f"fork({parent.request}, {child.request}, {tokens}) with blocks of {self.block_size}, {available} available, answered {allocation}"
        if allocation is None:
            self._hold("fork", bool(tokens % self.block_size) and not available, f"{told}, though it needs no block or has one")
            told = f"{told}; counts, lookups and unshared blocks were {before} and are {self._snapshot()}"
            self._hold("failed_fork", self._snapshot() == before, told)
            return False
        shares = list(allocation.blocks[:full]) == parent.table[:full]
        self._hold("fork", allocation.cached == tokens and shares, f"{told}; the parent's table is {parent.table}")
        self._append(child, allocation.blocks, shared=full, tokens=tokens)
        return True

    def _append(self, row: Row, blocks: Sequence[int], *, shared: int, tokens: int) -> None:
        """Append blocks to its table: the first `shared` are shared with others, the rest are new."""
        self._hold("answers", type(blocks) is tuple and all(type(block) is int for block in blocks), f"the blocks of an allocation are {blocks!r}")
        new, held, own = list(blocks[shared:]), self._held(), blocks if row.table else blocks[row.trimmed :]
        told = f"{row.request} was given blocks {list(blocks)} of {self.num_blocks}, of which {new} are new, while {sorted(held)} are held"
        sound = len(set(own)) == len(own) and not set(new) & held and all(block in range(self.num_blocks) for block in own)
        self._hold("exclusive", sound, told)
        row.table += blocks
        self.nothing_lost &= self._ask("counts").free > 0
        needed = -(-tokens // self.block_size)
        told = f"{row.request} asked for {tokens} tokens, {needed} blocks of {self.block_size}, and its table has {len(row.table)}"
        self._hold("table", len(row.table) == needed, told)

    def _commit(self, row: Row) -> None:
        known = min(row.computed, row.request.num_tokens)
        self._tell("commit", row.request, known)
        if not row.disowned:
            self.committed |= {row.content(end - 1) for end in range(self.block_size, known + 1, self.block_size)}

    def _release(self, row: Row) -> None:
        """Release its blocks, after revoking its grant."""
        if not row.table:
            return
        self._take_back(row)
        foretold, available = self._freed_by([row.request]), self._ask("available_blocks")
        self._tell("free", row.request)
        freed = self._ask("available_blocks") - available
        told = f"blocks_needed(…, without=[{row.request}]) counted off {foretold} blocks; freeing it made {freed} available"
        self._hold("blocks_needed_without", freed == foretold, told)
        row.table, row.computed, row.trimmed, row.admitted_now, row.copied, row.disowned = [], 0, 0, False, range(0), False

    def _take_back(self, row: Row) -> None:
        """Revoke its grant, if any; release requests admitted in this step that share tokens which it would have written."""
        if row.planned_from is None:
            return
        certain = row.planned_from // self.block_size
        if row.planned_from < row.request.num_tokens:  # known, so that it may have been committed
            self._tell("uncommit", row.request, row.planned_from)
        self.nothing_lost = False
        row.computed, row.planned_from, row.admitted_now = row.planned_from, None, False
        for other in self.live:
            shares = any(a == b for a, b in zip(row.table[certain:], other.table[certain:], strict=False))
            if other is not row and other.admitted_now and shares:
                self._release(other)

    # Invariants

    def _check_books(self) -> None:
        counts, held = self._ask("counts"), len(self._held())
        told = f"{counts}, {self._ask('available_blocks')} available, of {self.num_blocks} blocks; {held} are in tables"
        adds_up = counts.free + counts.held + counts.cached == self.num_blocks and min(counts.free, counts.held, counts.cached) >= 0
        self._hold("counts", adds_up and counts.held == held and self._ask("available_blocks") == counts.free + counts.cached, told)
        try:
            self.kv.check_integrity()
        except Exception as error:
            self._broken("integrity", f"check_integrity raised {describe(error)}, after valid calls")
        self.looks += 1
        if (asked := self._row(self.looks)) is not None:  # the same question again and again, whatever has changed since
            self._lookup(asked)
        running = [row for row in self.live if row.table]
        for group in (running[:1], running[:2], running):
            self._check_sharing(group, [row for row in running if row not in group])

    def _check_sharing(self, group: list[Row], rest: list[Row]) -> None:
        requests = [row.request for row in group]
        alone = {block for row in group for block in row.own} - {block for row in rest for block in row.own}
        foretold = self._freed_by(requests)
        told = f"blocks_needed(…, without={requests}) counts off {foretold} blocks; only in their tables are {sorted(alone)}"
        self._hold("blocks_needed_without", foretold == len(alone), told)

    def _check_request(self, row: Row) -> None:
        """Check that a request is as the model made it, and its tokens those that it generated."""
        request = row.request
        written = [name for name, value in row.given.items() if getattr(request, name) != value]
        known = [*request.prompt_array.tolist(), *request.output_token_ids]
        self._hold("request_untouched", not written, f"{request} was given another {', '.join(written)}")
        self._hold("request_untouched", known == row.tokens[: len(known)], f"{request} has the tokens {known}, and had {row.tokens}")

    def _check_memory(self) -> None:
        for row in self.live:
            for position in range(row.trimmed * self.block_size, row.computed if row.table else 0):
                found = self.memory.get(self._slot(row, position))
                if found != row.content(position):
                    told = f"token {position} of {row.request} reads slot {self._slot(row, position)}, which holds the K and V of {found}"
                    self._broken("fork_copies" if position in row.copied else "private", told)
            row.copied = range(0)

    def _end(self) -> None:
        """Let all requests end; then let one take the whole pool."""
        while self.live:
            self.finish(0)
        self._tell("free", self.probe)
        for copies, then in self.copies:
            self._hold("answers", tuple(copies) == then, f"take_copies returned {list(then)}, which is now {list(copies)}")
        counts, room = self._ask("counts"), self.num_blocks * self.block_size
        self._hold("no_leak", counts.held == 0, f"every request has ended, and {counts}")
        allocation = self._tell("allocate", make_request("last", [99] * room), room)
        whole = allocation is not None and sorted(allocation.blocks) == list(range(self.num_blocks))
        self._hold("no_leak", whole, f"every request has ended, and one that needs all {self.num_blocks} blocks gets {allocation}; {counts}")

    # Helpers

    def _hold(self, claim: str, truth: bool, message: str) -> None:
        if not truth:
            self._broken(claim, message)

    def _broken(self, claim: str, message: str) -> None:
        if self.watch == claim:
            raise Broken(message, claim, self.shape, self.script)
        if self.watch is None and claim not in self.breaches:
            self.breaches[claim] = Broken(message, claim, self.shape, self.script)
        if claim in FATAL:
            raise Ended

    def _row(self, who: int) -> Row | None:
        return self.live[who % len(self.live)] if self.live else None

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        return row.table[position // self.block_size], position % self.block_size

    def _held(self) -> set[int]:
        return {block for row in self.live for block in row.own}

    def _freed_by(self, requests: Sequence[LiveRequest]) -> int:
        """Return how many blocks freeing `requests` would make available, by what another request of one token would need."""
        return 1 - int(self._ask("blocks_needed", self.probe, 1, requests))

    def _snapshot(self) -> object:
        """Return all answers that a failing call must not change."""
        alone = [self._freed_by([row.request]) for row in self.live if row.table]
        return self._ask("counts"), [self._ask("lookup", row.request) for row in self.live], alone
