"""Inputs of a step that the host sends to the device: tokens and rows of a ragged batch,
flattened."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.attention import AttentionBatch
from dovetail.api.executor import Batch
from dovetail.api.sampler import Lines
from dovetail.api.state import StateBatch
from dovetail.nn.transfer import Mirror, all_to_device
from dovetail_executors.runtime.row_state import RowState, ranges

# Up to this size, a step's block table is sent with its other inputs, which saves a gathering
# kernel
TABLE_ENTRIES = 4096
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class HostLines(NamedTuple):
    """Lines that a step samples, row by row: see `dovetail.api.executor.Batch`."""

    rows: Int64  # [n]
    ahead: Int32  # [n] drafts of its row before each
    # [n] drafts that are the lines' last tokens, if they aren't in the rows yet; -1, or None for
    # all:
    # they are
    drafts: Int32 | None = None

    @classmethod
    def of(cls, batch: Batch) -> HostLines:
        counts = batch.num_lines
        rows = batch.rows.astype(np.int64).repeat(counts)
        if batch.drafts is None:
            return cls(rows, np.zeros(len(rows), np.int32))
        ahead = ranges(0, counts).astype(np.int32)
        drafts = np.full(len(rows), -1, np.int32)
        drafts[ahead > 0] = batch.drafts.token_ids
        return cls(rows, ahead, drafts)

    def sorted(self, order: Int64) -> HostLines:
        """Return the lines at the indices `order` [n]."""
        return HostLines(
            self.rows[order], self.ahead[order], None if self.drafts is None else self.drafts[order]
        )


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """`HostInputs` on the device, where tokens may be padded."""

    token_indices: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    slots: torch.Tensor  # [tables, tokens] int64
    rows: torch.Tensor  # [b] int64
    query_starts: torch.Tensor  # [b + 1] int32
    kv_lens: torch.Tensor  # [b] int32
    tables: torch.Tensor | None = None  # [tables, b, max_blocks] int32


@dataclass(frozen=True, slots=True)
class HostInputs:
    """Inputs of the b rows of a batch and their tokens, row by row."""

    token_indices: Int64  # [tokens] indices of the tokens' ids in the flat ids of all rows
    positions: Int64  # [tokens] within their sequences
    # [tables, tokens] slots of their K and V; [0, tokens] if these are computed on the device
    slots: Int64
    rows: Int64  # [b]
    query_starts: Int32  # [b + 1] start of each row's tokens, and the end
    kv_lens: Int32  # [b] tokens in a row's cache, including this step's
    line_ends: Int64  # [n] where the last token of each line is among these tokens
    max_blocks: int  # of a row
    tables: Int32 | None  # [tables, b, max_blocks] their pages, if the tables are small
    # [b] see `AttentionBatch.host_both_ways`; None: there are no such rows
    both_ways: NDArray[np.bool_] | None = None

    @classmethod
    def of(cls, batch: Batch, state: RowState) -> HostInputs:
        rows = batch.rows.astype(np.int64)
        counts = batch.num_tokens.astype(np.int64)
        return cls.of_tokens(rows, state.computed[rows], counts, state, batch.num_lines)

    @classmethod
    def of_tokens(
        cls,
        rows: Int64,
        first: Int64,
        counts: Int64,
        state: RowState,
        num_lines: Int32 | None = None,
    ) -> HostInputs:
        """Return the inputs of `counts` tokens of each of `rows` [b], from positions `first` on.

        `num_lines` [b]: those of the rows; None: each has one.
        """
        row_of = rows.repeat(counts)
        positions = ranges(first, counts)
        starts = np.zeros(len(rows) + 1, np.int32)
        starts[1:] = counts.cumsum()
        kv_lens = (first + counts).astype(np.int32)
        max_blocks = -(-int(kv_lens.max()) // state.block_size)
        tables = (
            state.host_tables[:, rows, :max_blocks]
            if state.num_tables * len(rows) * max_blocks <= TABLE_ENTRIES
            else None
        )
        slots = (
            np.empty((0, len(row_of)), np.int64)
            if state.slots_on_device
            else state.slots(row_of, positions)
        )
        line_ends = starts[1:].astype(np.int64) - 1
        if num_lines is not None:
            line_ends = ranges(line_ends + 1 - num_lines, num_lines)
        return cls(
            row_of * state.row_width + positions,
            positions,
            slots,
            rows,
            starts,
            kv_lens,
            line_ends,
            max_blocks,
            tables,
        )

    @property
    def ends(self) -> Int32:
        """[b] exclusive ends of the rows' tokens."""
        return self.query_starts[1:]

    def attention_batch(
        self,
        state: RowState,
        inputs: DeviceInputs,
        shared_blocks: int = 0,
        *,
        mixed_graph: bool = False,
        seen: Int32 | None = None,
        fixed_shapes: bool = False,
    ) -> AttentionBatch:
        """Return the step for attention; if it is replayed, including its padding. `inputs`: these
        on the device. `seen`: see `AttentionBatch.host_seen`."""
        tables = inputs.tables
        if tables is None:
            tables = state.tables[..., : self.max_blocks].index_select(1, inputs.rows)
        return AttentionBatch(
            num_rows=len(self.rows),
            num_tokens=len(self.token_indices),
            query_starts=inputs.query_starts,
            kv_lens=inputs.kv_lens,
            block_tables=state.by_group(tables),
            slots=state.by_group(inputs.slots),
            host_query_lens=np.diff(self.query_starts),
            host_kv_lens=self.kv_lens,
            shared_prefix_blocks=shared_blocks,
            mixed_graph=mixed_graph,
            host_both_ways=self.both_ways,
            host_seen=seen,
            fixed_shapes=fixed_shapes,
        )

    def divided(self, both_ways: NDArray[np.bool_]) -> HostInputs:
        """Return the step as attention gets it: rows are divided where `both_ways` [tokens]
        changes, and consecutive tokens of a row with it attend in both directions."""
        changes = np.flatnonzero(both_ways[1:] != both_ways[:-1]) + 1
        starts = np.union1d(self.query_starts[:-1], changes).astype(np.int32)
        parents = np.searchsorted(self.query_starts, starts, side="right") - 1
        ends = np.append(starts[1:], self.query_starts[-1:])
        return replace(
            self,
            rows=self.rows[parents],
            query_starts=np.append(starts, self.query_starts[-1:]),
            kv_lens=self.kv_lens[parents] - (self.ends[parents] - ends),
            tables=None if self.tables is None else self.tables[:, parents],
            both_ways=both_ways[starts],
        )

    def of_rows(self, chosen: NDArray[np.bool_]) -> tuple[HostInputs, Int64]:
        """Return the step of the chosen rows [b] only, without lines, and the indices of its
        tokens in this one."""
        counts = np.diff(self.query_starts)
        kept = np.flatnonzero(chosen.repeat(counts))
        starts = np.zeros(np.count_nonzero(chosen) + 1, np.int32)
        starts[1:] = counts[chosen].cumsum()
        of_rows = HostInputs(
            self.token_indices[kept],
            self.positions[kept],
            self.slots[:, kept],
            self.rows[chosen],
            starts,
            self.kv_lens[chosen],
            self.line_ends[:0],
            self.max_blocks,
            None if self.tables is None else self.tables[:, chosen],
        )
        return of_rows, kept

    def to_device(self, state: RowState) -> DeviceInputs:
        tables = [] if self.tables is None else [self.tables]
        arrays: list[NDArray[Any]] = [
            self.token_indices,
            self.positions,
            self.slots,
            self.rows,
            self.query_starts,
            self.kv_lens,
            *tables,
        ]
        inputs = DeviceInputs(*all_to_device(arrays, state.device))
        if len(self.slots) == state.num_tables:
            return inputs
        slots = inputs.slots.new_empty(state.num_tables, len(self.token_indices))
        state.put_slots(inputs.token_indices, len(self.token_indices), slots)
        return replace(inputs, slots=slots)


class _Slots:
    """Slots of up to `size` tokens of a recorded step, at fixed addresses: sent with its other
    inputs, or computed on the device from these."""

    def __init__(self, size: int, state: RowState, *, on_device: bool) -> None:
        self._state = state
        every = state.waste_slots[:, None]
        self._all = (
            torch.zeros((state.num_tables, size), dtype=torch.int64, device=state.device)
            if on_device
            else None
        )
        self.padding = every[:0] if on_device else every  # [tables sent, 1]
        self.sent: Int64 = self.padding.repeat(size, 1)  # [tables sent, size] of a step of padding

    def on_device(self, sent: torch.Tensor) -> torch.Tensor:
        """Return [tables, size] int64. `sent`: what was sent of them."""
        return sent if self._all is None else self._all

    def put(self, token_indices: torch.Tensor, count: int) -> None:
        """Compute those that aren't sent: see `RowState.put_slots`."""
        if self._all is not None:
            self._state.put_slots(token_indices, count, self._all)


class MixedInputs:
    """Inputs of a recorded step of up to `size` tokens of up to `max_rows` rows, at fixed
    addresses. Padding tokens are the first token of row 0, and their K and V go to the waste page.

    `wanted` [most_wanted] int64: indices, in the step, of the tokens with final states; empty if
    all have them.
    """

    def __init__(
        self,
        size: int,
        state: RowState,
        most_wanted: int,
        *,
        max_rows: int | None = None,
        table_entries: int | None = None,
    ) -> None:
        """`max_rows`: None: all. `table_entries`: steps come with tables of up to so many, and with
        slots. None: they do so as `HostInputs.of` makes them."""
        max_rows = max_rows or state.max_rows
        tokens = np.zeros(size, np.int64)
        rows = np.zeros(max_rows, np.int64)
        short = np.zeros(max_rows + 1, np.int32)
        wanted = np.zeros(most_wanted, np.int64)
        table = np.zeros(table_entries or TABLE_ENTRIES, np.int32)
        on_device = state.slots_on_device and table_entries is None
        self._slots = _Slots(size, state, on_device=on_device)
        self._mirror = Mirror(
            [tokens, tokens, self._slots.sent, rows, short, short[:-1], wanted, table], state.device
        )
        self._mirror.send()
        token_indices, positions, sent, *others, self.wanted, self._table = self._mirror.tensors
        self._all = DeviceInputs(token_indices, positions, self._slots.on_device(sent), *others)
        self._slots.put(token_indices, 0)

    @property
    def all_states(self) -> bool:
        """True if final states of all tokens are computed; False if only those of wanted tokens."""
        return len(self.wanted) == 0

    @property
    def token_indices(self) -> torch.Tensor:
        return self._all.token_indices

    @property
    def positions(self) -> torch.Tensor:
        return self._all.positions

    def rows(self, count: int, tables: torch.Tensor | None = None) -> DeviceInputs:
        """Return the inputs of `rows` rows, optionally with these tables, and of all tokens."""
        every = self._all
        rows = every.rows[:count]
        query_starts = every.query_starts[: count + 1]
        kv_lens = every.kv_lens[:count]
        return DeviceInputs(
            every.token_indices, every.positions, every.slots, rows, query_starts, kv_lens, tables
        )

    def fill(self, host: HostInputs, wanted: Int64) -> DeviceInputs:
        """Enqueue the copy of a step's inputs, and of the indices of wanted tokens, unless all are
        wanted."""
        token_indices, positions, slots, rows, query_starts, kv_lens, all_wanted, table = (
            self._mirror.arrays
        )
        tokens = len(host.token_indices)
        count = len(host.rows)
        for padded, own, padding in (
            (token_indices, host.token_indices, 0),
            (positions, host.positions, 0),
            (slots, host.slots, self._slots.padding),
        ):
            padded[..., :tokens], padded[..., tokens:] = own, padding
        rows[:count], query_starts[: count + 1], kv_lens[:count] = (
            host.rows,
            host.query_starts,
            host.kv_lens,
        )
        if len(all_wanted):
            all_wanted[: len(wanted)] = wanted
        used = 0 if host.tables is None else host.tables.size
        if host.tables is not None:
            table[:used] = host.tables.reshape(-1)
        self._mirror.send(numbers=used)
        self._slots.put(self._all.token_indices, tokens)
        return self.rows(
            count, None if host.tables is None else self._table[:used].view(host.tables.shape)
        )


class DecodeInputs:
    """Inputs of a recorded decode step of up to `size` lines of rows of `state`, at fixed
    addresses. To attention each line is a row with one query: K and V of all are written before any
    attends. Padding uses row `max_rows`, whose token goes to the waste page."""

    def __init__(self, size: int, state: RowState) -> None:
        self.size = size
        self._state = state
        numbers = np.zeros(size, np.int64)
        small = np.zeros(size, np.int32)
        table = np.zeros(TABLE_ENTRIES, np.int32)
        self._waste = state.waste_slots[:, None]
        self._mirror = Mirror(
            [numbers, small, self._waste.repeat(size, 1), small, small - 1, table], state.device
        )
        rows, ahead, self._slots, self._kv_lens, self.drafts, self._table = self._mirror.tensors
        self.lines = Lines(rows=rows, ahead=ahead)
        self._query_starts = torch.arange(size + 1, dtype=torch.int32, device=state.device)

    def fill(self, lines: HostLines, shared_prefix_blocks: int) -> AttentionBatch:
        """Enqueue the copy of a step in which each of `lines` [n], n <= size, computes its last
        token. Returns the step for attention. Block tables are copied with the other inputs if they
        fit, otherwise gathered on the device."""
        state = self._state
        count = len(lines.rows)
        host_rows = lines.rows
        kv_lens = state.known[host_rows] + lines.ahead
        all_rows, all_ahead, all_slots, all_lens, all_drafts, blocks = self._mirror.arrays
        for array, own, padding in (
            (all_rows, host_rows, state.max_rows),
            (all_ahead, lines.ahead, 0),
            (all_slots, state.slots(host_rows, kv_lens - 1), self._waste),
            (all_lens, kv_lens, 0),
            (all_drafts, -1 if lines.drafts is None else lines.drafts, -1),
        ):
            array[..., :count], array[..., count:] = own, padding
        width = -(-int(kv_lens.max(initial=1)) // state.block_size)
        shape = state.num_tables, self.size, width
        if (used := math.prod(shape)) <= TABLE_ENTRIES:
            step = blocks[:used].reshape(shape)
            step[:, :count], step[:, count:] = state.host_tables[:, host_rows, :width], 0
            self._mirror.send(numbers=used)
            tables = self._table[:used].view(shape)
        else:
            self._mirror.send(numbers=0)
            tables = state.tables[..., :width].index_select(1, self.lines.rows)
        return AttentionBatch(
            num_rows=count,
            num_tokens=count,
            query_starts=self._query_starts,
            kv_lens=self._kv_lens,
            block_tables=state.by_group(tables),
            slots=state.by_group(self._slots),
            host_query_lens=np.ones(count, np.int32),
            host_kv_lens=kv_lens.astype(np.int32),
            shared_prefix_blocks=shared_prefix_blocks,
        )

    @property
    def states(self) -> StateBatch:
        """The step for recurrent layers, including its padding."""
        states = self._state.states
        lens = np.ones(self.size, np.int32)
        ahead = self.lines.ahead if states is not None and states.max_lines else None
        return StateBatch(
            num_rows=self.size,
            num_tokens=self.size,
            places=self.lines.rows,
            query_starts=self._query_starts,
            kv_lens=self._kv_lens,
            host_query_lens=lens,
            decodes=True,
            ahead=ahead,
        )


class SamplingInputs:
    """Inputs of the recorded sampling of up to `size` lines, at fixed addresses. `nobody` is the
    index of padding rows."""

    def __init__(self, size: int, nobody: int, states: torch.Tensor) -> None:
        """`states` [any, hidden] are hidden states of the model, for their width and dtype."""
        rows = np.full(size, nobody)
        nothing = np.zeros(size, np.int64)
        none = np.full(size, -1)
        self._nobody = nobody
        self._mirror = Mirror([rows, nothing.astype(np.int32), nothing, none], states.device)
        self._mirror.send()
        self.hidden = states.new_zeros(size, states.shape[1])
        rows_of, ahead, self._indices, self.masked = self._mirror.tensors
        self.lines = Lines(rows=rows_of, ahead=ahead)

    def fill(
        self, hidden: torch.Tensor, host_indices: Int64, lines: HostLines, masked: Int64 | None
    ) -> None:
        """Enqueue the copy: each of `lines` [n], n <= size, is sampled from the hidden state
        hidden[host_indices]. `masked` [n] are indices of the lines' masks, or -1; None: no line is
        masked."""
        count = len(lines.rows)
        rows, ahead, indices, all_masked = self._mirror.arrays
        for array, own, padding in (
            (rows, lines.rows, self._nobody),
            (ahead, lines.ahead, 0),
            (indices, host_indices, 0),
        ):
            array[:count], array[count:] = own, padding
        all_masked[:] = -1
        if masked is not None:
            all_masked[:count] = masked
        self._mirror.send()
        torch.index_select(hidden, 0, self._indices, out=self.hidden)
