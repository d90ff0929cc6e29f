"""Inputs of a step that the host sends to the device: tokens and rows of a ragged batch, flattened."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.executor import Batch
from dovetail.runtime.row_state import RowState
from dovetail.runtime.transfer import Mirror, all_to_device

TABLE_ENTRIES = 4096  # up to this size, a step's block table is sent with its other inputs, which saves a gathering kernel
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """`HostInputs` on the device, where tokens may be padded."""

    token_indices: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    slots: torch.Tensor  # [tokens] int64
    rows: torch.Tensor  # [b] int64
    query_starts: torch.Tensor  # [b + 1] int32
    kv_lens: torch.Tensor  # [b] int32
    table: torch.Tensor | None = None  # [b, max_blocks] int32


@dataclass(frozen=True, slots=True)
class HostInputs:
    """Inputs of the b rows of a batch and their tokens, row by row."""

    token_indices: Int64  # [tokens] indices of the tokens' ids in the flat ids of all rows
    positions: Int64  # [tokens] within their sequences
    slots: Int64  # [tokens] slots of their K and V
    rows: Int64  # [b]
    query_starts: Int32  # [b + 1] start of each row's tokens, and the end
    kv_lens: Int32  # [b] tokens in a row's cache, including this step's
    max_blocks: int  # of a row
    table: Int32 | None  # [b, max_blocks] their blocks, if the table is small

    @classmethod
    def of(cls, batch: Batch, state: RowState) -> HostInputs:
        rows, counts = batch.rows.astype(np.int64), batch.num_tokens.astype(np.int64)
        computed, ends = state.computed[rows], counts.cumsum()
        row_of = rows.repeat(counts)
        positions = np.arange(len(row_of)) + (computed - ends + counts).repeat(counts)
        starts = np.zeros(len(rows) + 1, np.int32)
        starts[1:] = ends
        kv_lens = (computed + counts).astype(np.int32)
        max_blocks = -(-int(kv_lens.max()) // state.block_size)
        table = state.host_blocks[rows, :max_blocks] if len(rows) * max_blocks <= TABLE_ENTRIES else None
        slots = state.slots(row_of, positions)
        return cls(row_of * state.row_width + positions, positions, slots, rows, starts, kv_lens, max_blocks, table)

    @property
    def num_tokens(self) -> int:
        return len(self.token_indices)

    @property
    def ends(self) -> Int32:
        """[b] exclusive ends of the rows' tokens."""
        return self.query_starts[1:]

    def to_device(self, device: torch.device) -> DeviceInputs:
        table = [] if self.table is None else [self.table]
        return DeviceInputs(
            *all_to_device([self.token_indices, self.positions, self.slots, self.rows, self.query_starts, self.kv_lens, *table], device)
        )


class FixedInputs:
    """The same for a recorded step of up to `size` tokens of up to `max_rows` rows, where a graph finds it: the tensors keep their addresses. Padding
    tokens are the first token of row 0, and their K and V go nowhere.

    `wanted` [most_wanted] int64: indices, in the step, of the tokens whose states are computed to the end."""

    def __init__(self, size: int, max_rows: int, most_wanted: int, device: torch.device) -> None:
        self.size = size
        tokens, rows, short = np.zeros(size, np.int64), np.zeros(max_rows, np.int64), np.zeros(max_rows + 1, np.int32)
        wanted, table = np.zeros(most_wanted, np.int64), np.zeros(TABLE_ENTRIES, np.int32)
        self._mirror = Mirror([tokens, tokens, tokens - 1, rows, short, short[:-1], wanted, table], device)
        self._mirror.send()
        *inputs, self.wanted, self._table = self._mirror.tensors
        self._all = DeviceInputs(*inputs)

    @property
    def token_indices(self) -> torch.Tensor:
        return self._all.token_indices

    @property
    def positions(self) -> torch.Tensor:
        return self._all.positions

    def rows(self, count: int, table: torch.Tensor | None = None) -> DeviceInputs:
        """Return the inputs of `rows` rows, optionally with this table, and of all tokens."""
        every = self._all
        rows, query_starts, kv_lens = every.rows[:count], every.query_starts[: count + 1], every.kv_lens[:count]
        return DeviceInputs(every.token_indices, every.positions, every.slots, rows, query_starts, kv_lens, table)

    def fill(self, host: HostInputs, wanted: Int64) -> DeviceInputs:
        """Enqueue the copy of a step's inputs, and of the indices of wanted tokens, unless all are wanted."""
        token_indices, positions, slots, rows, query_starts, kv_lens, all_wanted, table = self._mirror.arrays
        tokens, count = host.num_tokens, len(host.rows)
        for padded, own, padding in ((token_indices, host.token_indices, 0), (positions, host.positions, 0), (slots, host.slots, -1)):
            padded[:tokens], padded[tokens:] = own, padding
        rows[:count], query_starts[: count + 1], kv_lens[:count] = host.rows, host.query_starts, host.kv_lens
        if len(all_wanted):
            all_wanted[: len(wanted)] = wanted
        if host.table is None:
            self._mirror.send(numbers=0)
            return self.rows(count)
        used = host.table.size
        table[:used] = host.table.reshape(-1)
        self._mirror.send(numbers=used)
        return self.rows(count, self._table[:used].view(host.table.shape))
