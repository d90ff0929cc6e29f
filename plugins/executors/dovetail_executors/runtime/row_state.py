"""State of each row between steps: tokens, lengths, block tables. A step sends only changes.

The tokens and tables live on the device, because the next step is planned before the host knows the
ids that this one samples. Lengths need no ids to be known, so the host counts them itself, in
numpy, and never has to ask the device.

A block of a cache group is one or more pages; each page of it has a table of its own here, in which
a block is one number. The tables of a group lie behind each other, those of all groups in one
array: a step gathers its rows of all of them at once. Slots and small tables are made from the
host's copy, without asking the device. It can't be the manager's, which is a step ahead and, with
several ranks, in another process. Slots of many tokens in several groups are computed on the device
(`slots_on_device`): there a kernel takes as long for many tables as for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.executor import Batch, Drafts, NewRow, RowChanges
from dovetail.api.kv_cache import KVLayout
from dovetail.api.sampler import RowHistory, RowSampling
from dovetail.errors import DovetailError
from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.nn.state.states import States
from dovetail.nn.transfer import all_to_device

Int64 = NDArray[np.int64]
Column = Callable[[Batch], Sequence[int]]  # values of the batch's new rows, in their order
Change = tuple[Int64, NDArray[np.int32]]  # indices in the memory of all rows, and values
Pieces = tuple[Int64, NDArray[np.int32]]  # [n] indices of pieces in it, and values [n, PIECE]

# Tokens that are written together, since an index of each costs more than the tokens. Every column
# begins at a multiple, which is also more than kernels want.
PIECE = 64
PADDING = [np.zeros(size, np.int32) for size in range(PIECE)]  # by size
NO_SAMPLING = RowSampling()
MOST_UNSENT = 64  # maximum number of steps with unsent blocks


class RowState:
    """`max_rows` rows of at most `max_len` tokens, in blocks of `layout`.

    Device tensors have fixed addresses. `states`: if the layout has a recurrent group, which has no
    tables here. `max_lines`: most that a step samples (see `dovetail.api.executor.Batch`); at least
    `max_rows`. `columns`: numbers of features, int32 of each row, and how a batch's new rows get
    theirs.
    """

    def __init__(
        self,
        max_rows: int,
        max_len: int,
        layout: KVLayout,
        device: torch.device,
        states: States | None = None,
        max_lines: int = 0,
        columns: Mapping[str, Column] | None = None,
    ) -> None:
        self.max_lines = max(max_rows, max_lines)
        self.max_rows = max_rows
        self.max_len = max_len
        self.layout = layout
        self.device = device
        self.states = states
        self._columns = dict(columns or {})  # how new rows get theirs
        self.block_size = layout.block_size
        self.max_blocks = -(-max_len // self.block_size)
        self._paged = [group for group in layout.groups if not group.recurrent]
        ends = list(accumulate(group.pages_per_block for group in self._paged))
        # by group
        self._tables_of = [
            slice(end - group.pages_per_block, end)
            for end, group in zip(ends, self._paged, strict=True)
        ]
        self._most_pages = [self.max_blocks * group.pages_per_block for group in self._paged]
        self.num_tables = ends[-1] if ends else 0
        # by table
        self.block_tokens = np.array(
            [group.block_tokens for group in self._paged for _ in range(group.pages_per_block)],
            np.int64,
        )
        self.waste_page = 0  # where padding tokens are written; see `pool_allocated`
        self.slots_on_device = len(self._paged) > 1  # of other steps than decodes
        self._block_tokens = torch.from_numpy(self.block_tokens).to(device)
        # so that a row at its end may sample once more, into an unused place
        self.row_width = _rounded_up(max_len + 1)
        # One extra row as padding of CUDA graphs. All is one allocation, so that one copy updates
        # it.
        count = max_rows + 1
        numbers = (
            count,
            count,
            *(count for _ in self._columns),
            count * self.row_width,
            self.num_tables * count * self.max_blocks,
        )
        sizes = [_rounded_up(each) for each in numbers]
        self._all = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._pieces = self._all.view(-1, PIECE)
        num_tokens, prompt_lens, *own, token_ids, tables = torch.split(self._all, sizes)
        # known: their ids are in `token_ids`
        self.num_tokens = num_tokens[:count]
        self.prompt_lens = prompt_lens[:count]
        self.num_tokens[max_rows] = 1
        self.columns = {
            name: values[:count] for name, values in zip(self._columns, own, strict=True)
        }  # [max_rows + 1] each
        self.token_ids = token_ids[: count * self.row_width].view(count, self.row_width)
        self._tables = tables[: self.num_tables * count * self.max_blocks].view(
            self.num_tables, count, self.max_blocks
        )
        *columns_at, self._token_ids_at, self._tables_at = accumulate(sizes[:-1], initial=0)
        self._columns_at = np.array(columns_at)[:, None]  # of `num_tokens`, `prompt_lens`, features
        self._first_pieces = np.arange(self._token_ids_at, self._tables_at, self.row_width) // PIECE
        # Host copies of the tables, and counts in int64
        # equals `tables`
        self.host_tables = np.zeros((self.num_tables, count, self.max_blocks), np.int32)
        self._unsent: list[Int64] = []  # flat indices into it that haven't been sent to the device
        self.known = np.zeros(max_rows, np.int64)  # equals num_tokens
        self.computed = np.zeros(max_rows, np.int64)  # tokens with K and V computed or enqueued
        # in the tables of each group
        self.num_pages = np.zeros((len(self._paged), max_rows), np.int64)
        # requested alternatives per sampled token; -1: none
        self.logprobs = np.full(max_rows, -1, np.int64)
        self.prompt_logprobs: dict[int, int] = {}  # the same of prompt tokens, of rows that ask
        # rows whose results must not depend on the others; of rows that have gone, undefined
        self.deterministic = np.zeros(max_rows, np.bool_)
        # of such rows, whose logits are computed together: of few, and of many with the same bits
        self.fixed_lines = self.many_lines = 1
        self.history = RowHistory(self.token_ids, self.num_tokens, self.prompt_lens)
        self.request_ids = [""] * max_rows  # replaced when changed: steps in flight keep theirs

    @property
    def tables(self) -> torch.Tensor:
        """[tables, max_rows + 1, max_blocks] int32.

        New pages are sent on access, since many steps send small tables of their own.
        """
        if self._unsent:
            self._send([])
        return self._tables

    def by_group(self, of_tables: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return of_tables [tables, ...] as views, one per group: [pages_per_block, ...] each."""
        return (
            (of_tables,)
            if len(self._tables_of) == 1
            else tuple(of_tables[tables] for tables in self._tables_of)
        )

    def pool_allocated(self, num_pages: int) -> None:
        """Note that the pool has `num_pages` pages, and the waste page behind them."""
        self.waste_page = num_pages

    @property
    def waste_slots(self) -> Int64:
        """[tables] where padding tokens are written."""
        return self.waste_page * self.block_tokens

    def update(self, batch: Batch) -> None:
        """Apply removed, added and changed rows, and new pages.

        Raises `DovetailError` if they, or the batch's drafts, don't fit.
        """
        self._check_added(batch.added)
        if len(batch.removed):
            self.known[batch.removed] = self.computed[batch.removed] = 0
            self.num_pages[:, batch.removed] = 0
            if self.prompt_logprobs:
                for row in batch.removed.tolist():
                    self.prompt_logprobs.pop(row, None)
        changes: list[Change] = []
        pieces: Pieces | None = None
        if batch.added:
            changes, pieces = self._add(batch)
        if batch.changes is not None:
            changes += self._change(batch.changes)
        if len(batch.new_pages):
            for group, tables in enumerate(self._tables_of):
                new = (
                    batch.new_pages
                    if len(self._tables_of) == 1
                    else batch.new_pages[batch.new_pages[:, 0] == group]
                )
                if len(new):
                    self._append_pages(group, tables, new[:, 1].astype(np.int64), new[:, 2])
        if changes or len(self._unsent) > MOST_UNSENT:
            self._send(changes, pieces)

    def put_drafts(self, rows: NDArray[np.int32], drafts: Drafts) -> None:
        """Write drafts after the known tokens of `rows` [b].

        Those of recorded steps come with their inputs.
        """
        starts = self._token_ids_at + rows.astype(np.int64) * self.row_width + self.known[rows]
        self._send([(ranges(starts, drafts.counts), drafts.token_ids)])

    def check(self, batch: Batch) -> None:
        """Raise `DovetailError` that names a request with too few tokens or blocks for the batch,
        or says what is wrong with its drafts."""
        ends = self.computed[batch.rows] + batch.num_tokens
        known = self.known[batch.rows]
        if batch.drafts is not None:
            known = known + self._checked_drafts(batch, batch.drafts)
        capacity = self._capacity(batch.rows)
        wrong = (batch.num_tokens < 1) | (ends > known) | (ends > capacity)
        wrong |= (ends > self.max_len) | (batch.yields_token & (ends != known))
        if wrong.any():
            row, count = (int(values[wrong.argmax()]) for values in (batch.rows, batch.num_tokens))
            drafts = int(known[wrong.argmax()] - self.known[row])
            raise DovetailError(
                f"step {batch.step}: request {self.request_ids[row]!r} (row {row}) can't compute "
                f"{count} tokens after {self.computed[row]}: {self.known[row]} are known"
                f"{f' and {drafts} drafted' if drafts else ''}, its blocks hold "
                f"{capacity[wrong.argmax()]}, a row holds {self.max_len}, and only the last known "
                "token and drafts can sample"
            )

    def slots(self, rows: Int64, positions: Int64) -> Int64:
        """Return the slots in the paged cache of the K and V of these tokens [n] of these rows [n]:
        page * block size + offset. [tables, n]."""
        slots = np.empty((self.num_tables, len(rows)), np.int64)
        for tables, group in zip(self._tables_of, self._paged, strict=True):
            blocks, offsets = np.divmod(positions, group.block_tokens)
            for table in range(tables.start, tables.stop):
                slots[table] = self.host_tables[table, rows, blocks]
                slots[table] *= group.block_tokens
                slots[table] += offsets
        return slots

    def are_deterministic(self, rows: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Return which of `rows` [n] must have the same results in any company."""
        result: NDArray[np.bool_] = self.deterministic[rows]
        return result

    def tables_to_read(
        self, rows: Int64, starts: Int64, ends: Int64, uptos: Int64
    ) -> NDArray[np.int32]:
        """Return the tables of `rows` [n] with the blocks of `uptos` tokens, [tables, n, blocks],
        to compute their tokens [starts, ends); [n] each. In place of blocks that a row need not
        hold for that, which lie beyond `ends` or before the window of `starts`, there is that of
        its last token: what attention masks is read, too, and must be finite."""
        number = np.arange(-(-int(uptos.max()) // self.block_size))
        result = np.empty((self.num_tables, len(rows), len(number)), np.int32)
        for tables, group in zip(self._tables_of, self._paged, strict=True):
            last = (ends - 1)[:, None] // group.block_tokens
            places = np.minimum(number, last)
            if group.window is not None:
                first = [[group.first_visible_block(start)] for start in starts.tolist()]
                places = np.where(number >= np.array(first), places, last)
            places += rows[:, None] * self.max_blocks
            for table in range(tables.start, tables.stop):
                self.host_tables[table].reshape(-1).take(places, out=result[table])
        return result

    def put_slots(self, token_indices: torch.Tensor, count: int, slots: torch.Tensor) -> None:
        """Enqueue the computation of slots [tables, n] int64, of the first `count` of token_indices
        [n] int64 (flat, in `token_ids`). The others are padding; their slots are in the waste page.
        """
        tables = self.tables
        if use_kernels(token_indices):
            from dovetail_executors.runtime import slots_kernel

            with suppress(KernelUnavailable):
                slots_kernel.put_slots(
                    token_indices,
                    tables,
                    self._block_tokens,
                    slots,
                    count,
                    self.waste_page,
                    self.row_width,
                )
                return
        rows = token_indices[:count] // self.row_width
        positions = token_indices[:count] % self.row_width
        sizes = self._block_tokens[:, None]
        pages = tables[
            torch.arange(self.num_tables, device=self.device)[:, None], rows, positions // sizes
        ]
        slots[:, :count] = pages * sizes + positions % sizes
        slots[:, count:] = self.waste_page * sizes

    def _capacity(self, rows: NDArray[np.int32]) -> Int64:
        """Return how many tokens the blocks of these rows hold."""
        capacity: Int64 | None = None
        for group, pages in zip(self._paged, self.num_pages, strict=True):
            own = pages[rows] // group.pages_per_block * group.block_tokens
            capacity = own if capacity is None else np.minimum(capacity, own)
        return np.full(len(rows), self.max_len) if capacity is None else capacity

    def _check_added(self, added: tuple[NewRow, ...]) -> None:
        num_groups = len(self.layout.groups)
        for new in added:
            pages = new.pages
            if not 0 <= new.row < self.max_rows:
                raise DovetailError(
                    f"request {new.request_id!r} was given row {new.row}; there are {self.max_rows}"
                )
            if len(pages) != num_groups:
                raise DovetailError(
                    f"request {new.request_id!r} has {len(pages)} block tables; the layout has "
                    f"{num_groups} groups"
                )
            if self.states is not None and len(pages[-1]) != self.layout.state_pages:
                raise DovetailError(
                    f"request {new.request_id!r} has a state of {len(pages[-1])} pages, not "
                    f"{self.layout.state_pages}"
                )
            num_tokens = len(new.token_ids)
            for group, most in enumerate(self._most_pages):
                if num_tokens > self.max_len or len(pages[group]) > most:
                    raise DovetailError(
                        f"request {new.request_id!r} has {num_tokens} tokens in "
                        f"{len(pages[group])} pages of a group; a row holds {self.max_len} tokens "
                        f"in {most} pages"
                    )

    def _checked_drafts(self, batch: Batch, drafts: Drafts) -> NDArray[np.int32]:
        """Return the number of each row's drafts."""
        counts = drafts.counts
        count = len(drafts.token_ids)
        if counts.shape != batch.rows.shape or (counts < 0).any() or counts.sum() != count:
            raise DovetailError(
                f"step {batch.step} has {count} drafts for {len(batch.rows)} rows; by its counts "
                f"there should be {counts.tolist()}"
            )
        if ((counts > 0) & ~(batch.yields_token & (batch.num_tokens == 1 + counts))).any():
            raise DovetailError(
                f"step {batch.step}: a row with drafts computes these and its last known token, "
                "and samples"
            )
        # those of deterministic rows are sampled in parts of a fixed size
        lines = batch.num_lines[~self.are_deterministic(batch.rows)].sum()
        if lines > self.max_lines:
            raise DovetailError(
                f"step {batch.step} samples {lines} lines; there is memory for {self.max_lines}"
            )
        return counts

    def _add(self, batch: Batch) -> tuple[list[Change], Pieces]:
        added = batch.added
        rows = np.array([new.row for new in added], np.int64)
        token_ids = [new.token_ids for new in added]
        known = [*map(len, token_ids)]
        self.known[rows] = known
        self.computed[rows] = [new.computed for new in added]
        self.request_ids = self.request_ids.copy()
        for new in added:
            self.request_ids[new.row] = new.request_id
        self._note(rows, [new.sampling or NO_SAMPLING for new in added])
        columns = [
            known,
            [new.prompt_len for new in added],
            *(values(batch) for values in self._columns.values()),
        ]
        where = (self._columns_at + rows).ravel()
        changes = [(where, np.array(columns, np.int32).ravel())]
        for group, tables in enumerate(self._tables_of):
            pages = [new.pages[group] for new in added]
            counts = np.array([*map(len, pages)])
            self.num_pages[group, rows] = counts
            # what isn't held is never read
            held = np.maximum(np.concatenate(pages, dtype=np.int32), 0)
            where = self._put_pages(tables, rows.repeat(counts), ranges(0, counts), held)
            changes.append((self._tables_at + where, held))
        if self.states is not None:
            self.states.put(rows.tolist(), [new.pages[-1] for new in added])
        return changes, self._pieces_of(rows, token_ids)

    def _change(self, asked: RowChanges) -> list[Change]:
        """Let rows go on with other tokens and sampling parameters."""
        rows = asked.rows.astype(np.int64)
        known = asked.known + asked.counts
        wrong = (
            (asked.known > self.known[rows]) | (known > self.max_len) | (asked.computed >= known)
        )
        if wrong.any():
            at = int(wrong.argmax())
            raise DovetailError(
                f"request {self.request_ids[rows[at]]!r} (row {rows[at]}) can't go on with "
                f"{asked.computed[at]} of {known[at]} tokens computed after {asked.known[at]} of "
                f"its {self.known[rows[at]]}; a row holds {self.max_len}"
            )
        self.known[rows] = known
        self.computed[rows] = asked.computed
        self._note(rows, asked.samplings)
        starts = self._token_ids_at + rows * self.row_width + asked.known
        return [
            (int(self._columns_at[0, 0]) + rows, known),
            (ranges(starts, asked.counts), asked.token_ids),
        ]

    def _note(self, rows: Int64, samplings: Sequence[RowSampling]) -> None:
        """Note what the host must know of the sampling of these rows."""
        self.logprobs[rows] = [-1 if each.logprobs is None else each.logprobs for each in samplings]
        self.deterministic[rows] = [each.deterministic for each in samplings]
        for index, each in enumerate(samplings):
            if each.prompt_logprobs is not None:
                self.prompt_logprobs[int(rows[index])] = each.prompt_logprobs
            elif self.prompt_logprobs:
                self.prompt_logprobs.pop(int(rows[index]), None)

    def _pieces_of(self, rows: Int64, token_ids: list[NDArray[np.int32]]) -> Pieces:
        """Return the pieces that hold the tokens of each of `rows`. What follows these in the last
        one is set to 0: nobody reads it before it is written."""
        parts = []
        for part in token_ids:
            parts.append(part)
            parts.append(PADDING[-len(part) % PIECE])
        values = np.concatenate(parts, dtype=np.int32).reshape(-1, PIECE)
        counts = -(-self.known[rows] // PIECE)
        return ranges(self._first_pieces[rows], counts), values

    def _append_pages(
        self, group: int, tables: slice, rows: Int64, pages: NDArray[np.int32]
    ) -> None:
        """Append pages [n] to the tables of `group` of rows [n]."""
        order = np.argsort(rows, kind="stable")  # by row, keeping order
        rows = rows[order]
        nth = self.num_pages[group, rows] + counts_within(rows)
        excess = nth >= self.max_blocks * (tables.stop - tables.start)
        if excess.any():
            row = int(rows[excess.argmax()])
            raise DovetailError(
                f"request {self.request_ids[row]!r} was given more than the {self.max_blocks} "
                "blocks that a row holds"
            )
        np.add.at(self.num_pages[group], rows, 1)
        self._unsent.append(self._put_pages(tables, rows, nth, pages[order]))

    def _put_pages(self, tables: slice, rows: Int64, nth: Int64, pages: NDArray[np.int32]) -> Int64:
        """Set the pages of rows [n] at these places [n] in their order within `tables`, on the
        host. Returns their flat indices in all tables."""
        per_block = tables.stop - tables.start
        columns, first = (
            (nth, tables.start)
            if per_block == 1
            else (nth // per_block, tables.start + nth % per_block)
        )
        where: Int64 = (first * (self.max_rows + 1) + rows) * self.max_blocks + columns
        self.host_tables.reshape(-1)[where] = pages
        return where

    def _send(self, changes: list[Change], pieces: Pieces | None = None) -> None:
        """Enqueue these changes, those of unsent blocks and the pieces."""
        if self._unsent:
            # may contain duplicates, if a row was reused meanwhile, with the same value
            indices = np.concatenate(self._unsent)
            changes = [*changes, (self._tables_at + indices, self.host_tables.reshape(-1)[indices])]
            self._unsent = []
        where = np.concatenate([indices for indices, _ in changes])
        numbers = np.concatenate([values for _, values in changes])
        arrays = [where, numbers] if pieces is None else [where, numbers, *pieces]
        of_all, values, *of_pieces = all_to_device(arrays, self.device)
        self._all.index_copy_(0, of_all, values)
        if of_pieces:
            self._pieces.index_copy_(0, *of_pieces)


def ranges(starts: Int64 | int, counts: NDArray[np.integer[Any]]) -> Int64:
    """Return the ranges of `counts` [n] numbers from `starts` [n] on, one after the other: [5, 6,
    7, 0, 1] for [5, 0] and [3, 2]."""
    if len(counts) == 1:  # so often that it is worth it
        return starts + np.arange(counts[0])
    result: Int64 = (starts - (counts.cumsum() - counts)).repeat(counts)
    result += np.arange(len(result))
    return result


def counts_within(groups: Int64) -> Int64:
    """Return each element's index within its group of equal neighbours: [0, 1, 2, 0, 1] for [2, 2,
    2, 5, 5]."""
    index = np.arange(len(groups))
    begins = np.concatenate([[True], groups[1:] != groups[:-1]])
    return index - np.maximum.accumulate(np.where(begins, index, 0))


def _rounded_up(numbers: int) -> int:
    """Return `numbers` up to a whole number of pieces."""
    return -(-numbers // PIECE) * PIECE
