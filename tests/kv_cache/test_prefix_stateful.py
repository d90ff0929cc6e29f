"""A KV-cache manager under random plans, preemptions, forks, trims and resets, against a memory that remembers what was written where.

The model knows nothing of hashes, reference counts or eviction: it keeps, for each slot of each block, the tokens whose K and V were
written there last, and checks that whatever a request believes to be computed is what its blocks hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, precondition, rule

from dovetail.request import Request
from tests.kv_cache.helpers import manager, request
from tests.support import examples

Content = tuple[tuple[str, ...], tuple[int, ...]]  # cache keys, and all tokens up to this one


@dataclass(eq=False)
class Row:
    """What the model knows of a request: all its tokens (the last perhaps unknown to the manager), its table, what is computed or planned."""

    request: Request
    tokens: list[int]
    table: list[int] = field(default_factory=list)
    computed: int = 0
    planned_from: int | None = None  # computed before this step's grant
    admitted_now: bool = False
    trimmed: int = 0  # blocks

    @property
    def content(self) -> list[Content]:
        return [(self.request.cache_keys, tuple(self.tokens[: position + 1])) for position in range(self.computed)]

    @property
    def settled(self) -> int:
        """Tokens written by steps submitted before."""
        return self.computed if self.planned_from is None else self.planned_from


class PrefixMachine(RuleBasedStateMachine):
    rows = Bundle("rows")

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 16]), num_blocks=st.integers(1, 16), reuse=st.sampled_from([True, True, True, False]),
        window=st.sampled_from([None, None, 1, 5]),
    )  # fmt: skip
    def start(self, block_size: int, num_blocks: int, reuse: bool, window: int | None) -> None:
        self.kv = manager(num_blocks, block_size, reuse=reuse, window=window)
        self.block_size, self.num_blocks, self.reuse, self.window = block_size, num_blocks, reuse, window
        self.memory: dict[tuple[int, int], Content] = {}
        self.live: list[Row] = []
        self.committed: set[Content] = set()  # the last token of each full block, unless forgotten since
        self.nothing_lost = reuse  # until a block may have been evicted or a chain broken: then lookups may find less

    # Requests come …

    @precondition(lambda self: len(self.live) < 6)
    @rule(
        target=rows,
        base=st.sampled_from([(0,), (0,), (0, 1), (0, 0, 0, 1)]),
        blocks=st.integers(0, 4),
        tail=st.integers(0, 3),
        keys=st.sampled_from([(), (), (), ("salt",)]),
        logprobs=st.sampled_from([None, None, None, 0]),
    )
    def arrive(self, base: tuple[int, ...], blocks: int, tail: int, keys: tuple[str, ...], logprobs: int | None) -> Row:
        length = max(1, blocks * self.block_size + tail)
        tokens = [base[position // self.block_size % len(base)] for position in range(length)]
        self.live.append(Row(request(tokens, keys=keys, prompt_logprobs=logprobs), tokens))
        return self.live[-1]

    # … are planned …

    @rule(row=rows, chunk=st.integers(1, 40), spare=st.sampled_from([0, 0, 0, 5]))
    def grant(self, row: Row, chunk: int, spare: int) -> None:
        waiting = not row.table
        if row.planned_from is not None or (waiting and len(row.tokens) > row.request.num_tokens):
            return
        start = self.check_lookup(row) if waiting else row.computed
        end = min(start + chunk, len(row.tokens))
        room = max(end + spare, len(row.table) * self.block_size)
        if end <= start:
            return
        needed, available = self.kv.blocks_needed(row.request, room), self.kv.available_blocks
        before = self.snapshot()
        allocation = self.kv.allocate(row.request, room)
        assert (allocation is not None) == (needed <= available), "allocate fails exactly when blocks_needed exceeds the available"
        if allocation is None:
            assert self.snapshot() == before, "a failed allocation changed something"
            return
        assert self.kv.available_blocks == available - needed
        assert allocation.cached == (start if waiting else 0)
        new = allocation.blocks[start // self.block_size :] if waiting else allocation.blocks
        assert not set(new) & self.held_blocks(), "a new block is somebody's"
        row.table += allocation.blocks
        assert len(row.table) == -(-room // self.block_size)
        row.planned_from, row.computed, row.admitted_now = start, end, waiting
        self.commit(row)
        self.nothing_lost &= self.kv.counts.free > 0

    @precondition(lambda self: len(self.live) < 8)
    @rule(target=rows, parent=rows, tokens=st.integers(1, 80))
    def fork(self, parent: Row, tokens: int) -> object:
        """A new request with the prompt of another."""
        child = Row(request(parent.request.prompt_token_ids, keys=parent.request.cache_keys), list(parent.request.prompt_token_ids))
        tokens = min(tokens, parent.settled, child.request.prompt_tokens - 1)
        visible_from = 0 if self.window is None else max(0, tokens - self.window + 1)
        if not parent.table or tokens < 1 or parent.trimmed * self.block_size > visible_from:
            return multiple()
        before, available = self.snapshot(), self.kv.available_blocks
        allocation = self.kv.fork(parent.request, child.request, tokens)
        if allocation is None:
            assert tokens % self.block_size, "a fork at a block's end needs no block"
            assert available == 0
            assert self.snapshot() == before, "a failed fork changed something"
            return multiple()
        assert allocation.cached == tokens
        full = tokens // self.block_size
        assert list(allocation.blocks[:full]) == parent.table[:full]
        assert len(allocation.blocks) == -(-tokens // self.block_size)
        assert not set(allocation.blocks[full:]) & self.held_blocks()
        child.table, child.computed, child.trimmed = list(allocation.blocks), tokens, parent.trimmed
        self.live.append(child)
        self.nothing_lost &= self.kv.counts.free > 0
        return child

    @rule(row=rows)
    def preempt(self, row: Row) -> None:
        self.release(row)

    @rule()
    def preempt_the_last_granted(self) -> None:
        granted = [row for row in self.live if row.planned_from is not None]
        if granted:
            self.release(granted[-1])

    @rule(row=consumes(rows))
    def finish(self, row: Row) -> None:
        self.release(row)
        self.live = [other for other in self.live if other is not row]
        self.kv.free(row.request)

    @precondition(lambda self: self.window is not None)
    @rule(row=rows)
    def trim(self, row: Row) -> None:
        if row.table and row.planned_from is None:
            self.kv.trim(row.request, max(0, row.computed - self.window + 1))
            row.trimmed = max(row.trimmed, max(0, row.computed - self.window + 1) // self.block_size)
            self.nothing_lost = False

    # … and run

    @rule(chunk=st.sampled_from([1, 7, 100, 100]), sampled=st.integers(0, 1))
    def step(self, chunk: int, sampled: int) -> None:
        """A plain step: everyone who can gets a grant."""
        for row in self.live:
            self.grant(row, chunk, 0)
        self.submit(sampled, deliver=True)

    @rule(sampled=st.integers(0, 1), deliver=st.booleans())
    def submit(self, sampled: int, deliver: bool) -> None:
        """Copies, then the writes of every request planned. Those that reached their last token get one more, known now or later."""
        for copy in self.kv.take_copies():
            for offset in range(self.block_size):
                self.memory.pop((copy.dst, offset), None)
                if (copy.src, offset) in self.memory:
                    self.memory[copy.dst, offset] = self.memory[copy.src, offset]
        for row in self.live:
            if row.planned_from is not None:
                for position in range(row.planned_from, row.computed):
                    self.memory[row.table[position // self.block_size], position % self.block_size] = row.content[position]
                if row.computed == len(row.tokens):
                    row.tokens.append(sampled)
            row.planned_from, row.admitted_now = None, False
        if deliver:
            self.deliver()
        self.check_memory()

    @rule()
    def deliver(self) -> None:
        """The ids in flight arrive."""
        for row in self.live:
            row.request._output_ids.extend(row.tokens[row.request.num_tokens :])
            if row.table:
                self.commit(row)

    @rule(really=st.sampled_from([False, False, True]))
    def reset(self, really: bool) -> None:
        if really and all(row.planned_from is None for row in self.live):
            self.kv.reset()
            self.committed.clear()
            self.nothing_lost = False
            assert self.kv.counts.cached == 0

    # What must hold

    @invariant()
    def counts_add_up(self) -> None:
        if not hasattr(self, "kv"):
            return
        counts, held = self.kv.counts, self.held_blocks()
        assert counts.held == len(held)
        assert counts.free + counts.held + counts.cached == self.num_blocks
        assert self.kv.available_blocks == counts.free + counts.cached
        assert self.reuse or counts.cached == 0
        self.kv.check_integrity()

    @invariant()
    def sharing_is_told_right(self) -> None:
        running = [row for row in getattr(self, "live", []) if row.table]
        for group in (running[:1], running[:2], running):
            others = {block for row in running if row not in group for block in row.table[row.trimmed :]}
            own = {block for row in group for block in row.table[row.trimmed :]}
            assert self.kv.held_only_by([row.request for row in group]) == len(own - others)
            columns = list(zip(*(row.table for row in group), strict=False))
            same = [len(set(column)) == 1 for column in columns]
            assert self.kv.common_prefix([row.request for row in group]) == (same.index(False) if False in same else len(same))

    def check_memory(self) -> None:
        for row in self.live:
            for position in range(row.trimmed * self.block_size, row.computed if row.table else 0):
                slot = row.table[position // self.block_size], position % self.block_size
                assert self.memory.get(slot) == row.content[position], f"token {position} of {row.request!r} is not in slot {slot}"

    def check_lookup(self, row: Row) -> int:
        found, known, size = self.kv.lookup(row.request), row.request.num_tokens, self.block_size
        computable = 0
        for end in range(size, known, size):
            if (row.request.cache_keys, tuple(row.tokens[:end])) not in self.committed:
                break
            computable = end
        if row.request.params.prompt_logprobs is not None or not self.reuse:
            assert found == 0
        elif self.nothing_lost:
            assert found == computable, "tokens were computed, nothing was evicted, and yet they aren't found"
        assert found <= computable, "a hit on tokens that nobody computed"
        assert found % size == 0
        return found

    # Helpers

    def commit(self, row: Row) -> None:
        known = min(row.computed, row.request.num_tokens)
        self.kv.commit(row.request, known)
        self.committed |= {(row.request.cache_keys, tuple(row.tokens[:end])) for end in range(self.block_size, known + 1, self.block_size)}

    def release(self, row: Row) -> None:
        """Preempt it; first those admitted in this step that share what it would have written in it."""
        if not row.table:
            return
        if row.planned_from is not None:
            certain = row.planned_from // self.block_size
            self.kv.uncommit(row.request, row.planned_from)
            row.planned_from = None
            self.nothing_lost = False
            for other in self.live:
                shares = any(a == b for a, b in zip(row.table[certain:], other.table[certain:], strict=False))
                if other is not row and other.admitted_now and shares:
                    self.release(other)
        comes_free = self.kv.held_only_by([row.request])
        available = self.kv.available_blocks
        self.kv.free(row.request)
        assert self.kv.available_blocks == available + comes_free
        row.table, row.computed, row.trimmed, row.admitted_now = [], 0, 0, False

    def held_blocks(self) -> set[int]:
        return {block for row in self.live for block in row.table[row.trimmed :]}

    def snapshot(self) -> object:
        return self.kv.counts, [self.kv.lookup(row.request) for row in self.live]


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = examples(quick=250, full=5000)
