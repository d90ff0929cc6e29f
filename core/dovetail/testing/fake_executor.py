"""Executor without a model that validates its batches: it records, for each slot of the paged
memory, which token prefix was written there, and fails if a request would ever read another's.

A request's next token is a function of all tokens before it and of its adapter's digest, so that
any bookkeeping error changes the tokens, or is detected at once.

With `deterministic_window`, a row without the mark of a request that had it computes provisionally:
beside some numbers of other rows it samples a wrong token, and no other row may read what it wrote.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from dovetail.api.clock import VirtualClock
from dovetail.api.executor import (
    AdapterCapacity,
    AdapterRows,
    Batch,
    Capacity,
    Executor,
    ExecutorCapabilities,
    ExecutorContext,
    Masks,
    NewRow,
    Pooled,
    PoolingCapacity,
    PoolingRows,
    Result,
    RowChanges,
    RowPooling,
)
from dovetail.api.kv_cache import CacheGroup, KVLayout
from dovetail.errors import DovetailError
from dovetail.testing.fake_pages import FakePages, Written
from dovetail.testing.timed_transfers import TimedTransfers

ADAPTED = {
    "model.layers.0.self_attn.q_proj": (8, 8),
    "model.layers.0.mlp.down_proj": (16, 8),
}  # modules that adapters may change


class FakeExecutorOptions(BaseModel):
    """Options of the fake: the simulated device and model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_pages: int = Field(64, ge=1, description="Pages of the pool.")
    block_size: int = Field(4, ge=1)
    window: int | None = Field(default=None, ge=1, description="Sliding window of all layers.")
    groups: tuple[tuple[int, int | None, int], ...] = Field(
        (),
        description="Cache groups (block_tokens, window, pages_per_block), instead of one with "
        "`block_size` and `window`.",
    )
    state_pages: int = Field(
        0,
        ge=0,
        description="Pages of the state of recurrent layers, in one more group; 0: there are none.",
    )
    max_in_flight: int = Field(2, ge=1)
    vocab_size: int = Field(97, ge=2)
    max_model_len: int = Field(128, ge=2)
    seconds_per_step: float = Field(0.01, gt=0)
    seconds_per_token: float = Field(0.001, ge=0)
    seconds_per_page: float = Field(
        default=0.0005,
        ge=0,
        description="Time of a transfer for each page that it saves or restores.",
    )
    max_lines: int = Field(
        default=0, ge=0, description="Lines of a step with drafts; 0: it can't check drafts."
    )
    pooling: PoolingCapacity | None = Field(
        default=None, description="How it pools; None: it only generates."
    )
    deterministic_window: int = Field(
        default=0,
        ge=0,
        description="The window of deterministic rows; 0: it doesn't offer such rows.",
    )
    changes_rows: bool = Field(
        default=False, description="It takes changes of how rows sample: `Batch.changes`."
    )
    wrong_provisional: bool = Field(
        default=True,
        description="In company, samples every fifth provisional token wrong.",
    )


def prefix_ids(tokens: tuple[int, ...] | list[int], digest: str = "") -> list[int]:
    """Return, for each position, a number that identifies all tokens up to it, and the adapter of
    this digest ("": none)."""
    return _ids_after(zlib.crc32(digest.encode()), tokens)


def _ids_after(value: int, tokens: Iterable[int]) -> list[int]:
    """Return `prefix_ids` of tokens after those that `value` identifies."""
    values = []
    for token in tokens:
        value = zlib.crc32(int(token).to_bytes(4, "little"), value)
        values.append(value)
    return values


def expected_tokens(
    prompt: list[int], count: int, seed: int = 0, vocab_size: int = 97, digest: str = ""
) -> list[int]:
    """Return the tokens that the fake generates for a prompt with the adapter of this digest,
    independent of other requests; the oracle of tests."""
    known = _last_id(prompt, digest)
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(_token_after(known, seed, vocab_size))
        known = zlib.crc32(tokens[-1].to_bytes(4, "little"), known)
    return tokens


def next_token(tokens: list[int], seed: int, vocab_size: int, digest: str = "") -> int:
    return _token_after(_last_id(tokens, digest), seed, vocab_size)


def _last_id(tokens: list[int], digest: str) -> int:
    """Return the last of `prefix_ids`, in less time."""
    return zlib.crc32(struct.pack(f"<{len(tokens)}I", *tokens), zlib.crc32(digest.encode()))


def _token_after(prefix_id: int, seed: int, vocab_size: int) -> int:
    return zlib.crc32(seed.to_bytes(8, "little", signed=False), prefix_id) % vocab_size


def next_allowed(token: int, words: NDArray[np.uint32], vocab_size: int) -> int:
    """Return the first token allowed by a mask [ceil(vocab_size / 32)], searching from `token` and
    wrapping around."""
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size])
    if not len(allowed):
        raise DovetailError("fake executor: a mask allows no token")
    return int(allowed[np.searchsorted(allowed, token) % len(allowed)])


def guessed_tokens(
    tokens: list[int], count: int, seed: int, vocab_size: int, digest: str = ""
) -> list[int]:
    """Return the drafts of the fake's draft model for `tokens`: the tokens that the fake would
    generate, except at every fifth position."""
    known = list(tokens)
    for _ in range(count):
        known.append(
            (next_token(known, seed, vocab_size, digest) + (len(known) % 5 == 0)) % vocab_size
        )
    return known[len(tokens) :]


def expected_pooled(
    prompt: list[int], pooling: RowPooling, capacity: PoolingCapacity
) -> NDArray[np.float32]:
    """Return what the fake pools of a prompt, independent of other requests; the oracle of
    tests."""
    embeds = pooling.task.endswith("embed")
    ids = np.array(prefix_ids(prompt), np.uint64)[:, None]
    factors = np.arange(1, 1 + capacity.size_of(pooling.task), dtype=np.uint64)
    states: NDArray[Any] = (ids * factors % 1009 + 1).astype(np.float32) / 1009  # [tokens, size]
    if not pooling.task.startswith("token_"):
        states = {"last": states[-1:], "cls": states[:1], "mean": states.mean(0, keepdims=True)}[
            capacity.method
        ]
    result = states[:, : pooling.dimensions]
    if pooling.activate and embeds:
        result = result / np.linalg.norm(result, axis=1, keepdims=True)
    elif pooling.activate:
        result = (
            1 / (1 + np.exp(-result))
            if len(capacity.labels) == 1
            else np.exp(result) / np.exp(result).sum(1, keepdims=True)
        )
    result = result.astype(np.float32, copy=False)
    return result if pooling.task.startswith("token_") else result[0]


PROVISIONAL = 1 << 20  # in the place of what is written


@dataclass
class _Row:
    tokens: list[int]
    computed: int
    tables: list[list[int]]  # pages, by group
    seed: int
    adapter: tuple[int, str] = 0, ""  # slot and digest
    drafts: list[int] = field(default_factory=list)  # of a step that isn't sampled yet
    pooling: RowPooling | None = None
    deterministic: bool = False
    provisional: bool = False  # its request has had a deterministic row
    is_wrong: bool = False  # the step samples a wrong token for it
    ids: list[int] = field(default_factory=list)  # `prefix_ids` of its tokens, which only grow

    def prefix_ids(self) -> list[int]:
        """Return the numbers of its tokens and drafts. The caller must not modify the list."""
        known = len(self.ids)
        if known < len(self.tokens):
            value = self.ids[-1] if known else zlib.crc32(self.adapter[1].encode())
            self.ids += _ids_after(value, self.tokens[known:])
        return self.ids + _ids_after(self.ids[-1], self.drafts) if self.drafts else self.ids


class FakeExecutor(Executor):
    """Computes at `submit` and returns results at `collect`, which advances a virtual clock. Raises
    `DovetailError` on any violation of the contract."""

    capabilities = ExecutorCapabilities(virtual_clock=True, masks=True)
    options: FakeExecutorOptions
    writes_nan = False
    """While a test sets it, K and V are written as NaN. So are those of rows that read NaN; a row
    that would yield a token from NaN fails. Recurrent states never have NaN."""

    def __init__(self, options: FakeExecutorOptions, context: ExecutorContext) -> None:
        super().__init__(options, context)
        self._rows: dict[int, _Row] = {}
        groups = options.groups or ((options.block_size, options.window, 1),)
        layout = tuple(
            CacheGroup((index,), tokens, window, pages)
            for index, (tokens, window, pages) in enumerate(groups)
        )
        if options.state_pages:
            every = math.lcm(*(group.block_tokens for group in layout))
            layout = (
                *layout,
                CacheGroup((len(layout),), every, None, options.state_pages, recurrent=True),
            )
        self._layout = KVLayout(layout, 1, "none")
        self._paged = [(index, group) for index, group in enumerate(layout) if not group.recurrent]
        self._memory = FakePages(max(group.block_tokens for group in layout))
        self._adapters = {0: ""}  # slot -> digest of what it holds
        # step, tokens, seconds that it takes, when it was submitted
        self._pending: list[tuple[int, list[int], float, float]] = []
        # of a late step: its number, its rows, and which yield a token
        self._unsampled: tuple[int, list[_Row], list[bool]] | None = None
        # of each pending step with drafts: tokens that each row yielded
        self._counts: dict[int, list[int]] = {}
        # results of each pending step with pooled rows
        self._pooled: dict[int, dict[int, NDArray[np.float32]]] = {}
        self._failed: dict[int, dict[int, str]] = {}  # of each pending step with NaN, its rows
        self._marked: set[str] = set()  # requests that had a deterministic row
        self._broken: str | None = None  # the violated rule: its state may be inconsistent
        self._last_step = -1
        self._last_ended = 0.0
        self.batches = 0

    def start(self) -> Capacity:
        options = self.options
        limits = (
            options.num_pages,
            options.max_in_flight,
            self._layout,
            options.vocab_size,
            options.max_model_len,
        )
        sizes = sorted({1, options.max_lines}) if options.max_lines else ()
        costs = tuple(
            (lines, options.seconds_per_step + options.seconds_per_token * lines) for lines in sizes
        )
        config = self.context.config
        adapters = (
            AdapterCapacity(config.max_adapters, config.max_adapter_rank, ADAPTED)
            if config.max_adapters
            else None
        )
        return Capacity(
            *limits,
            shared_prefix=True,
            max_lines=options.max_lines,
            line_costs=costs,
            pooling=options.pooling,
            adapters=adapters,
            not_deterministic="" if options.deterministic_window else "the fake doesn't offer it",
            deterministic_window=options.deterministic_window,
            changes_rows=options.changes_rows,
        )

    def submit(self, batch: Batch) -> int:
        self.check()
        self._require(
            self._unsampled is None, "a late step must be sampled before the next is submitted"
        )
        self._require(
            len(self._pending) < self.options.max_in_flight,
            "more steps in flight than max_in_flight",
        )
        self._require(batch.step > self._last_step, "steps must be submitted in order")
        self._require(
            len(set(batch.rows.tolist())) == len(batch.rows), "a row occurs twice in a batch"
        )
        self._last_step = batch.step
        self._change_rows(batch)
        for copy in batch.copies:
            self._require_restored(copy.dst)
            self._memory.copy(copy.src, copy.dst)
        rows = [self._rows[row] for row in batch.rows.tolist()]
        self._require(
            all(self._adapters[row.adapter[0]] == row.adapter[1] for row in rows),
            "a slot keeps its adapter while a row uses it",
        )
        prefix = batch.shared_prefix_blocks * self._layout.groups[0].pages_per_block
        shared = {tuple(row.tables[0][:prefix]) for row in rows}
        self._require(
            len(shared) == 1 and len(shared.pop()) == prefix,
            "shared_prefix_blocks aren't shared by all rows",
        )
        self._require(
            not prefix or self._layout.groups[0].window is None,
            "a prefix is shared only in a group without a window",
        )
        self._take_drafts(batch, rows)
        for row, count in zip(rows, batch.num_tokens.tolist(), strict=True):
            self._write(row, count)
        self._replace_states(batch)
        self._pool(batch, rows)
        for row, count in zip(rows, batch.num_tokens.tolist(), strict=True):
            self._read(row, count)
        yields_token = batch.yields_token.tolist()
        if self.writes_nan or self._memory.nan:
            self._spread_nan(batch, rows)
        tokens: list[int] = []
        if batch.late:
            self._unsampled = batch.step, rows, yields_token
        else:
            self._sample_all(batch.step, rows, yields_token, {}, tokens)
        seconds = self.options.seconds_per_step + self.options.seconds_per_token * int(
            batch.num_tokens.sum()
        )
        self._pending.append((batch.step, tokens, seconds, self.context.clock.now()))
        self.batches += 1
        return batch.step

    def sample(self, handle: int, masks: Masks) -> None:
        self._require(
            self._unsampled is not None and self._unsampled[0] == handle,
            "only a late step is sampled, and once",
        )
        self._require(
            [pending[0] for pending in self._pending] == [handle],
            "a step is sampled when all before it are collected",
        )
        if self._unsampled is None:
            return
        _, rows, yields_token = self._unsampled
        self._unsampled = None
        self._sample_all(
            handle,
            rows,
            yields_token,
            dict(zip(masks.lines.tolist(), masks.words, strict=True)),
            self._pending[0][1],
        )

    def collect(self, handle: int) -> Result:
        self._require(
            self._unsampled is None or self._unsampled[0] != handle,
            "a late step must be sampled before it is collected",
        )
        step, tokens, seconds, submitted = self._pending.pop(0)
        self._require(step == handle, "results must be collected in order")
        # like a device, which starts a step when the previous one has ended
        started = max(submitted, self._last_ended)
        self._last_ended = started + seconds
        if isinstance(self.context.clock, VirtualClock):
            self.context.clock.wait_until(self._last_ended)
        counts = np.array(self._counts.pop(step), np.int32) if step in self._counts else None
        return Result(
            step,
            np.array(tokens, np.int64),
            started,
            self._last_ended,
            failed=self._failed.pop(step, {}),
            counts=counts,
            parts=(Pooled(self._pooled.pop(step)),) if step in self._pooled else (),
        )

    def transfers(self) -> TimedTransfers:
        size = self._memory.page_bytes
        seconds = self.options.seconds_per_page
        rate = size / seconds if seconds else math.inf
        return TimedTransfers(self.context.clock, "fake", size, rate, self._memory)

    def check(self) -> None:
        if self._broken is not None:
            raise DovetailError(f"fake executor: {self._broken}; it can't continue after that")

    def stop(self) -> None:
        self._pending.clear()
        self._rows.clear()

    def _change_rows(self, batch: Batch) -> None:
        for row in batch.removed.tolist():
            self._require(row in self._rows, f"row {row} was removed but not in use")
            del self._rows[row]
        adapters = batch.part(AdapterRows) or AdapterRows((), {})
        pooling = (batch.part(PoolingRows) or PoolingRows({}, batch.removed)).added
        for load in adapters.loads:
            self._require(
                1 <= load.slot <= self.context.config.max_adapters,
                f"an adapter is loaded to slot {load.slot}, which there isn't",
            )
            self._adapters[load.slot] = load.digest
        for new in batch.added:
            self._require(new.row not in self._rows, f"row {new.row} was added but is in use")
            self._require(
                0 <= new.computed < len(new.token_ids), "a new row has no token left to compute"
            )
            self._require(
                len(new.pages) == len(self._layout.groups), "a new row has a table for each group"
            )
            tables = [pages.tolist() for pages in new.pages]
            pools = pooling.get(new.row)
            slot = adapters.slots.get(new.row, 0)
            self._require((pools is None) != (new.sampling is None), "a row samples or pools")
            if pools is not None:
                self._require_poolable(new, pools)
            self._require(
                slot in self._adapters, f"a new row's adapter is in slot {slot}, which holds none"
            )
            seed = 0 if new.sampling is None else new.sampling.seed
            adapter = slot, self._adapters[slot]
            row = self._rows[new.row] = _Row(
                new.token_ids.tolist(), new.computed, tables, seed, adapter, pooling=pools
            )
            if new.sampling is not None and new.sampling.deterministic:
                self._marked.add(new.request_id)
                row.deterministic = True
            row.provisional = not row.deterministic and new.request_id in self._marked
        if batch.changes is not None:
            self._change_sampling(batch.changes)
        for group, row, page in batch.new_pages.tolist():
            self._rows[row].tables[group].append(page)

    def _change_sampling(self, changes: RowChanges) -> None:
        self._require(self.options.changes_rows, "no row changes without changes_rows")
        self._require(not self._pending, "rows change while nothing is in flight")
        numbers = changes.rows, changes.known, changes.counts, changes.computed
        token_ids = changes.token_ids.tolist()
        for number, known, count, computed, sampling in zip(
            *(each.tolist() for each in numbers), changes.samplings, strict=True
        ):
            row = self._rows.get(number)
            self._require(row is not None, f"row {number} changes but is not in use")
            assert row is not None
            self._require(known <= len(row.tokens), "a row keeps tokens that it knows")
            self._require(sampling.seed == row.seed, "a row keeps its request's seed")
            row.tokens[known:] = token_ids[:count]
            del row.ids[known:]
            del token_ids[:count]
            row.computed = computed
            self._require(
                0 <= computed < len(row.tokens), "a row that changes has a token left to compute"
            )
            row.provisional = row.deterministic and not sampling.deterministic
            row.deterministic = sampling.deterministic
        self._require(not token_ids, "each id belongs to a row that changes")

    def _take_drafts(self, batch: Batch, rows: list[_Row]) -> None:
        """Note the drafts of each row; those left to the executor are proposed here."""
        self._require(not self._counts, "nothing is submitted while drafts are in flight")
        if batch.drafts is None:
            return
        self._require(not self._pending, "drafts are submitted while nothing is in flight")
        counts = batch.drafts.counts.tolist()
        token_ids = batch.drafts.token_ids.tolist()
        self._require(
            len(counts) == len(rows) and sum(counts) == len(token_ids) > 0,
            "each row has a number of drafts, and as many ids",
        )
        others = [
            lines
            for row, lines in zip(rows, batch.num_lines.tolist(), strict=True)
            if not self._is_in_window(row, lines)
        ]
        self._require(
            max(others, default=0) < 2 or sum(others) <= self.options.max_lines,
            "more lines than max_lines",
        )
        for row, yields, tokens, count in zip(
            rows, batch.yields_token.tolist(), batch.num_tokens.tolist(), counts, strict=True
        ):
            ids = token_ids[:count]
            token_ids = token_ids[count:]
            if count:
                self._require(
                    yields and tokens == 1 + count,
                    "a row with drafts yields a token, and computes its last known one and the "
                    "drafts",
                )
                self._require(
                    row.computed + 1 == len(row.tokens),
                    "a row with drafts has computed all tokens but the last",
                )
                self._require(
                    len(row.tokens) + count < self.options.max_model_len,
                    "the tokens of a row fit the model's length",
                )
            if -1 in ids:
                self._require(
                    set(ids) == {-1}, "the draft model proposes all drafts of a row, or none"
                )
                ids = guessed_tokens(
                    row.tokens, count, row.seed, self.options.vocab_size, row.adapter[1]
                )
            self._require(
                all(0 <= token < self.options.vocab_size for token in ids),
                "drafts are ids of the vocabulary",
            )
            row.drafts = ids
        self._counts[batch.step] = []

    def _is_in_window(self, row: _Row, lines: int) -> bool:
        size = self.options.deterministic_window
        return row.deterministic and size > 0 and row.computed % size + lines <= size

    def _require_poolable(self, new: NewRow, pooling: RowPooling) -> None:
        can = self.options.pooling
        self._require(
            can is not None and pooling.task in can.tasks,
            "a row pools by a task that the model can serve",
        )
        self._require(
            len(new.token_ids) == new.prompt_len, "a row that pools has no token but its prompt's"
        )
        if can is not None:
            all_states = can.needs_all_states(pooling.task) or can.indivisible
            self._require(
                not all_states or not new.computed,
                "a row that pools all states starts without computed tokens",
            )

    def _pool(self, batch: Batch, rows: list[_Row]) -> None:
        """Pool the rows whose results are due, once their tokens are computed."""
        can = self.options.pooling
        generates = [
            not yields or row.pooling is None
            for row, yields in zip(rows, batch.yields_token.tolist(), strict=True)
        ]
        self._require(all(generates), "a row that pools yields no token")
        if can is not None and not can.generates:
            self._require(
                all(row.pooling is not None for row in rows), "the model generates nothing"
            )
        due = [
            index
            for index, row in enumerate(rows)
            if row.pooling is not None and row.computed == len(row.tokens)
        ]
        part = batch.part(PoolingRows)
        self._require(
            due == ([] if part is None else part.due.tolist()),
            "rows pool exactly when they end their prompts",
        )
        for row, count in zip(rows, batch.num_tokens.tolist(), strict=True):
            whole = (
                row.pooling is None
                or can is None
                or not can.indivisible
                or count == len(row.tokens)
            )
            self._require(whole, "an indivisible prompt is computed in one step")
        if can is not None and due:
            found = [(index, rows[index]) for index in due]
            self._pooled[batch.step] = {
                index: expected_pooled(row.tokens, row.pooling, can)
                for index, row in found
                if row.pooling is not None
            }

    def _write(self, row: _Row, count: int) -> None:
        tokens = len(row.tokens) + len(row.drafts)
        end = row.computed + count
        self._require(count >= 1 and end <= tokens, "more tokens to compute than are known")
        values = row.prefix_ids()
        mark = PROVISIONAL if row.provisional else 0
        for index, group in self._paged:
            for pages, offset, position in self._blocks(row, index, row.computed, end):
                if len(pages) != group.pages_per_block:
                    self._break(f"token {position} of {tokens} has no block in group {index}")
                for place, page in enumerate(pages):
                    if not 0 <= page < self.options.num_pages:
                        self._break(
                            f"token {position} is written to page {page}, which isn't in the pool"
                        )
                    self._require_restored(page)
                    self._memory[page, offset] = index, place + mark, values[position]
        row.computed = end

    def _read(self, row: _Row, count: int) -> None:
        values = row.prefix_ids()
        for index, group in self._paged:
            # seen by the first of its tokens
            first = 0 if group.window is None else max(0, row.computed - count - group.window + 1)
            for pages, offset, position in self._blocks(row, index, first, row.computed):
                expected = values[position]
                right = len(pages) == group.pages_per_block
                for place, page in enumerate(pages):
                    found = self._memory[page, offset]
                    if row.provisional:
                        found = _unmarked(found)
                    right = right and found == (index, place, expected)
                if not right:
                    self._break(
                        f"position {position} of {len(row.tokens)} would read another sequence's K "
                        f"and V, or another group's"
                    )

    def _spread_nan(self, batch: Batch, rows: list[_Row]) -> None:
        """Let rows write NaN, if they read any or `writes_nan`; of these, those that yield a token
        fail."""
        nan = self._memory.nan
        for number, (row, count) in enumerate(zip(rows, batch.num_tokens.tolist(), strict=True)):
            seen = [*self._places(row, count)]
            if self.writes_nan or not nan.isdisjoint(place for place, _ in seen):
                nan.update(place for place, is_new in seen if is_new)
                if batch.yields_token[number]:
                    self._failed.setdefault(batch.step, {})[number] = "NaN"

    def _places(self, row: _Row, count: int) -> Iterator[tuple[tuple[int, int], bool]]:
        """Yield the places that a row reads, and whether its last `count` tokens write them."""
        start = row.computed - count
        for index, group in self._paged:
            first = 0 if group.window is None else max(0, start - group.window + 1)
            for pages, offset, position in self._blocks(row, index, first, row.computed):
                for page in pages:
                    yield (page, offset), position >= start

    def _replace_states(self, batch: Batch) -> None:
        """Advance the live state of each row of the batch, which has been written, and write its
        checkpoints."""
        if not self._layout.recurrent:
            self._require(
                not batch.checkpoints, "a checkpoint is written where there are no states"
            )
            return
        index = len(self._layout.groups) - 1
        saved = {checkpoint.row: checkpoint for checkpoint in batch.checkpoints}
        self._require(
            len(saved) == len(batch.checkpoints) and saved.keys() <= set(batch.rows.tolist()),
            "one checkpoint a row of the batch",
        )
        for number, count in zip(batch.rows.tolist(), batch.num_tokens.tolist(), strict=True):
            row = self._rows[number]
            pages = row.tables[index]
            values = row.prefix_ids()
            before = row.computed - count
            self._require(
                len(pages) == self._layout.state_pages, "a row has exactly one live state"
            )
            self._require(
                all(0 <= page < self.options.num_pages for page in pages),
                "the live state is in pages of the pool",
            )
            if before:
                expected = [(index, place, values[before - 1]) for place in range(len(pages))]
                found = [self._memory[page, 0] for page in pages]
                self._require(
                    found == expected,
                    f"the state after {before} of {len(row.tokens)} tokens would be another one",
                )
            # drafts change it when they are accepted
            self._keep_state(pages, values[min(row.computed, len(row.tokens)) - 1])
            if number in saved:
                checkpoint = saved[number]
                self._require(not row.drafts, "a row with drafts has no checkpoint")
                self._require(
                    before < checkpoint.tokens <= row.computed,
                    "a checkpoint is of tokens that its step computes",
                )
                self._keep_state(checkpoint.pages.tolist(), values[checkpoint.tokens - 1])

    def _keep_state(self, pages: list[int], value: int) -> None:
        for place, page in enumerate(pages):
            self._require_restored(page)
            self._memory[page, 0] = len(self._layout.groups) - 1, place, value

    def _require_restored(self, page: int) -> None:
        if page in self._memory.restoring:
            self._break(f"page {page} is written while it is restored")

    def _blocks(
        self, row: _Row, index: int, start: int, end: int
    ) -> Iterator[tuple[list[int], int, int]]:
        """Yield, for each position from `start` to before `end`, the pages of its block of group
        `index`, its offset in the block, and the position."""
        group = self._layout.groups[index]
        table = row.tables[index]
        size = group.pages_per_block
        for position in range(start, end):
            block, offset = divmod(position, group.block_tokens)
            yield table[block * size : (block + 1) * size], offset, position

    def _sample_all(
        self,
        step: int,
        rows: list[_Row],
        yields_token: list[bool],
        words: dict[int, NDArray[np.uint32]],
        tokens: list[int],
    ) -> None:
        """Sample the lines of all rows, add the tokens that they yield to `tokens`, and count them
        if the step has drafts."""
        line = 0
        counts = self._counts.get(step)
        for row, yields in zip(rows, yields_token, strict=True):
            masks = (
                [words.pop(line + index, None) for index in range(1 + len(row.drafts))]
                if yields
                else []
            )
            line += len(masks)
            beside = len(rows) > 1 and (len(row.tokens) + len(rows)) % 5 == 0
            row.is_wrong = row.provisional and beside and self.options.wrong_provisional
            found = self._check(row, masks)
            if counts is not None:
                counts.append(len(found))
            tokens += found if found or counts is not None else [-1]
        self._require(not words, "a mask is for a line of a row that yields a token")

    def _check(self, row: _Row, masks: list[NDArray[np.uint32] | None]) -> list[int]:
        """Sample the lines of a row, each with its mask, up to the first that differs from its
        draft."""
        drafts = row.drafts
        row.drafts = []
        row.computed -= len(drafts)
        found: list[int] = []
        for words, draft in zip(masks, [*drafts, -1], strict=False):
            found.append(self._sample(row, words))
            if found[-1] != draft:
                break
            row.computed += 1
        if drafts and self._layout.recurrent:
            self._keep_state(row.tables[-1], row.prefix_ids()[row.computed - 1])
        return found

    def _sample(self, row: _Row, words: NDArray[np.uint32] | None = None) -> int:
        self._require(
            row.computed == len(row.tokens), "a row samples before its last token is computed"
        )
        token = _token_after(row.prefix_ids()[-1], row.seed, self.options.vocab_size)
        token = (token + row.is_wrong) % self.options.vocab_size
        if words is not None:
            token = next_allowed(token, words, self.options.vocab_size)
        row.tokens.append(token)
        return token

    def _require(self, condition: bool, rule: str) -> None:
        if not condition:
            self._break(rule)

    def _break(self, rule: str) -> NoReturn:
        self._broken = rule
        raise DovetailError(f"fake executor: {rule}")


def _unmarked(written: Written | None) -> Written | None:
    return None if written is None else (written[0], written[1] % PROVISIONAL, written[2])
