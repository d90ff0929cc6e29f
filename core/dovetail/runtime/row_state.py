"""State of each row between steps: tokens, lengths, block table. A step sends only changes.

The tokens and tables live on the device, because the next step is planned before the host knows the ids that this one samples. Lengths need no
ids to be known, so the host counts them itself, in numpy, and never has to ask the device.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.executor import Batch, NewRow
from dovetail.api.sampler import RowHistory
from dovetail.errors import DovetailError
from dovetail.nn.kernels.launch import ALIGNMENT
from dovetail.runtime.transfer import all_to_device

Int64 = NDArray[np.int64]
Change = tuple[Int64, NDArray[np.int32]]  # indices in the memory of all rows, and values

ALIGNED = ALIGNMENT // 4  # numbers
MOST_UNSENT = 64  # maximum number of steps with unsent blocks


class RowState:
    """`max_rows` rows of at most `max_len` tokens, in blocks of `block_size`. Device tensors have fixed addresses."""

    def __init__(self, max_rows: int, max_len: int, block_size: int, device: torch.device) -> None:
        self.max_rows, self.max_len, self.block_size, self.device = max_rows, max_len, block_size, device
        self.max_blocks = -(-max_len // block_size)
        self.row_width = max_len + 1  # so that a row at its end may sample once more, into an unused place
        # One extra row as padding of CUDA graphs. All is one allocation, so that one copy updates it.
        count = max_rows + 1
        sizes = [-(-numbers // ALIGNED) * ALIGNED for numbers in (count, count, count * self.row_width, count * self.max_blocks)]
        self._all = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        num_tokens, prompt_lens, token_ids, block_table = torch.split(self._all, sizes)
        self.num_tokens, self.prompt_lens = num_tokens[:count], prompt_lens[:count]  # known: their ids are in `token_ids`
        self.num_tokens[max_rows] = 1
        self.token_ids = token_ids[: count * self.row_width].view(count, self.row_width)
        self._block_table = block_table[: count * self.max_blocks].view(count, self.max_blocks)
        self._prompt_lens_at, self._token_ids_at, self._block_table_at = np.cumsum(sizes[:3]).tolist()
        # Host copies of the tables, and counts in int64
        self.host_blocks = np.zeros((max_rows, self.max_blocks), np.int32)  # equals block_table
        self._unsent: list[Int64] = []  # flat indices into it that haven't been sent to the device
        self.known = np.zeros(max_rows, np.int64)  # equals num_tokens
        self.computed = np.zeros(max_rows, np.int64)  # tokens with K and V computed or enqueued
        self.num_blocks = np.zeros(max_rows, np.int64)
        self.logprobs = np.full(max_rows, -1, np.int64)  # requested alternatives per sampled token; -1: none
        self.prompt_logprobs = np.full(max_rows, -1, np.int64)  # likewise per prompt token
        self.request_ids = [""] * max_rows  # replaced when changed: steps in flight keep theirs

    @property
    def history(self) -> RowHistory:
        return RowHistory(self.token_ids, self.num_tokens, self.prompt_lens)

    @property
    def block_table(self) -> torch.Tensor:
        """[max_rows + 1, max_blocks] int32. New blocks are sent on access, since many steps send a small table of their own."""
        if self._unsent:
            self._send([])
        return self._block_table

    def update(self, batch: Batch) -> None:
        """Apply removed rows, added rows and new blocks. Raises `DovetailError` if they don't fit."""
        self._check_added(batch.added)
        if len(batch.removed):
            self.known[batch.removed] = self.computed[batch.removed] = self.num_blocks[batch.removed] = 0
        changes = self._add(batch.added) if batch.added else []
        if len(batch.new_blocks):
            self._append_blocks(batch.new_block_rows.astype(np.int64), batch.new_blocks)
        if changes or len(self._unsent) > MOST_UNSENT:
            self._send(changes)

    def check(self, batch: Batch) -> None:
        """Raise `DovetailError` that names a request with too few tokens or blocks for the batch."""
        ends = self.computed[batch.rows] + batch.num_tokens
        wrong = (batch.num_tokens < 1) | (ends > self.known[batch.rows]) | (ends > self.num_blocks[batch.rows] * self.block_size)
        wrong |= (ends > self.max_len) | (batch.yields_token & (ends != self.known[batch.rows]))
        if wrong.any():
            row, count = (int(values[wrong.argmax()]) for values in (batch.rows, batch.num_tokens))
            raise DovetailError(
                f"step {batch.step}: request {self.request_ids[row]!r} (row {row}) can't compute {count} tokens after {self.computed[row]}: "
                f"{self.known[row]} are known, {self.num_blocks[row]} blocks hold {self.num_blocks[row] * self.block_size}, a row holds "
                f"{self.max_len}, and only the last known token can sample"
            )

    def slots(self, rows: Int64, positions: Int64) -> Int64:
        """Return the slots in the paged cache of the K and V of these tokens of these rows: block id * block size + offset. [n] each."""
        blocks = self.host_blocks[rows, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size

    def advance(self, rows: NDArray[np.int32], num_tokens: NDArray[np.int32]) -> None:
        """Record that `num_tokens` more tokens of each row are computed."""
        self.computed[rows] += num_tokens

    def append(self, token_ids: torch.Tensor, rows: torch.Tensor, host_rows: Int64) -> None:
        """Append one sampled token to each row, [n] int64 on the device. `host_rows`: the same rows."""
        known = self.known[host_rows]
        indices, grown = all_to_device([host_rows * self.row_width + known, (known + 1).astype(np.int32)], self.device)
        self.token_ids.view(-1).index_copy_(0, indices, token_ids.to(torch.int32))
        self.num_tokens.index_copy_(0, rows, grown)
        self.known[host_rows] += 1

    def _check_added(self, added: tuple[NewRow, ...]) -> None:
        for new in added:
            if not 0 <= new.row < self.max_rows:
                raise DovetailError(f"request {new.request_id!r} was given row {new.row}; there are {self.max_rows}")
            if len(new.token_ids) > self.max_len or len(new.blocks) > self.max_blocks:
                raise DovetailError(
                    f"request {new.request_id!r} has {len(new.token_ids)} tokens in {len(new.blocks)} blocks; a row holds {self.max_len} tokens in "
                    f"{self.max_blocks} blocks"
                )

    def _add(self, added: tuple[NewRow, ...]) -> list[Change]:
        rows = np.array([new.row for new in added], np.int64)
        self.known[rows] = [len(new.token_ids) for new in added]
        self.computed[rows] = [new.computed for new in added]
        self.num_blocks[rows] = [len(new.blocks) for new in added]
        self.request_ids = self.request_ids.copy()
        for new in added:
            self.request_ids[new.row] = new.request_id
            self.host_blocks[new.row, : len(new.blocks)] = new.blocks
            self._unsent.append(new.row * self.max_blocks + np.arange(len(new.blocks)))
            self.logprobs[new.row] = -1 if new.sampling.logprobs is None else new.sampling.logprobs
            self.prompt_logprobs[new.row] = -1 if new.sampling.prompt_logprobs is None else new.sampling.prompt_logprobs
        return [
            (rows, self.known[rows].astype(np.int32)),
            (self._prompt_lens_at + rows, np.array([new.prompt_len for new in added], np.int32)),
            _laid_out(self._token_ids_at + rows * self.row_width, [new.token_ids for new in added]),
        ]

    def _append_blocks(self, rows: Int64, blocks: NDArray[np.int32]) -> None:
        order = np.argsort(rows, kind="stable")  # group by row, keeping order
        rows = rows[order]
        columns = self.num_blocks[rows] + counts_within(rows)
        if (columns >= self.max_blocks).any():
            row = int(rows[(columns >= self.max_blocks).argmax()])
            raise DovetailError(f"request {self.request_ids[row]!r} was given more than the {self.max_blocks} blocks that a row holds")
        np.add.at(self.num_blocks, rows, 1)
        self.host_blocks[rows, columns] = blocks[order]
        self._unsent.append(rows * self.max_blocks + columns)

    def _send(self, changes: list[Change]) -> None:
        """Return these changes plus unsent blocks."""
        if self._unsent:
            indices = np.concatenate(self._unsent)  # may contain duplicates, if a row was reused meanwhile, with the same value
            changes = [*changes, (self._block_table_at + indices, self.host_blocks.reshape(-1)[indices])]
            self._unsent = []
        where, numbers = (np.concatenate(parts) for parts in zip(*changes, strict=True))
        self._all.index_copy_(0, *all_to_device([where, numbers], self.device))


def counts_within(groups: Int64) -> Int64:
    """Return each element's index within its group of equal neighbours: [0, 1, 2, 0, 1] for [2, 2, 2, 5, 5]."""
    index = np.arange(len(groups))
    begins = np.concatenate([[True], groups[1:] != groups[:-1]])
    return index - np.maximum.accumulate(np.where(begins, index, 0))


def _laid_out(starts: Int64, values: list[NDArray[np.int32]]) -> Change:
    """Return indices and values to write each of `values` at its start, one after the other."""
    lens = np.array([len(part) for part in values])
    indices = np.repeat(starts - (np.cumsum(lens) - lens), lens) + np.arange(lens.sum())
    return indices, np.concatenate(values).astype(np.int32, copy=False)
