"""`DeviceChanges`: biases, bans and penalties of rows on the device, to change logits without the
host. Needs Triton kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.sampler import Lines, SamplerContext
from dovetail.nn.transfer import all_to_device
from dovetail_samplers.table import Needs, RowTable

RECORD = np.dtype(
    [
        ("address", np.int64),  # of the row's `RowRules.packed`; 0: none
        ("num_biases", np.int32),
        ("num_allowed", np.int32),  # -1: all are
        ("num_stops", np.int32),
        ("num_bad_words", np.int32),
        ("num_prefix_tokens", np.int32),
        ("min_tokens", np.int32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("logprobs", np.int32),  # -1: none
    ]
)
NONE = np.array([(0, 0, -1, 0, 0, 0, 0, 1, 0, 0, -1)], RECORD)
# changed logits of 4 bytes; further lines are processed afterwards, in the same memory
AT_ONCE = 1 << 26
FEW_LINES = 64  # so many at once, even of fewer rows


class DeviceChanges:
    """Records of `max_rows` rows plus one for padding, and memory for changed logits. Tensors keep
    their addresses."""

    def __init__(self, max_rows: int, context: SamplerContext) -> None:
        self._history, device, vocab_size = (
            context.history,
            torch.device(context.device),
            context.vocab_size,
        )
        # [max_rows + 1, 12] int32
        self._records = torch.from_numpy(_words(NONE.repeat(max_rows + 1))).to(device)
        self.asked_logprobs = self._records[:, RECORD.itemsize // 4 - 1]  # [max_rows + 1]
        # lines at once
        most = min(max_rows * (1 + context.max_drafts), max(max_rows, FEW_LINES))
        self.most = max(1, min(most, AT_ONCE // vocab_size))
        self._changed = torch.empty((self.most, vocab_size), dtype=torch.float32, device=device)
        self._kept = torch.empty_like(self._history.token_ids)

    def send(self, table: RowTable, rows: NDArray[np.int64]) -> None:
        """Set these rows' parameters, without synchronizing. The table keeps the packed rules as
        long as the row."""
        records = NONE.repeat(len(rows))
        for record, row in zip(records, rows.tolist(), strict=True):
            if (rules := table.rules.get(row)) is not None:
                record["address"] = rules.packed.data_ptr()
                for name in (
                    "num_biases",
                    "num_allowed",
                    "num_stops",
                    "num_bad_words",
                    "num_prefix_tokens",
                    "min_tokens",
                ):
                    record[name] = getattr(rules, name)
        for name in ("repetition", "presence", "frequency"):
            records[name] = getattr(table, name)[rows]
        records["logprobs"] = np.where(table.needs[rows] & Needs.LOGPROBS, table.logprobs[rows], -1)
        self._records.index_copy_(0, *all_to_device([rows, _words(records)], self._records.device))

    def change(self, logits: torch.Tensor, lines: Lines) -> torch.Tensor:
        """logits [n, vocab], n <= `most`, and lines [n] -> [n, vocab] float32, which the next call
        overwrites."""
        from dovetail_samplers import changes_kernels

        return changes_kernels.change(
            logits, lines, self._records, self._history, self._changed, self._kept
        )


def _words(records: NDArray[Any]) -> NDArray[np.int32]:
    """[n] of RECORD -> [n, 12]."""
    return records.view(np.int32).reshape(len(records), -1)
