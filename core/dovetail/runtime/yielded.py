"""The tokens that a computed step has yielded, on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.api.executor import Batch, HostLogprobs
from dovetail.runtime.step import Step

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Yielded:
    """Tokens [n] of the lines of a step that its rows got: of drafts, those up to the first that
    was rejected."""

    token_ids: Int64
    broken: Int64  # [n] what is wrong with each: see `decode_rows.append`
    rows: Int64  # [n] indices in the batch
    lines: Int64  # [n] indices among the step's lines
    logprobs: HostLogprobs | None
    counts: NDArray[np.int32] | None  # [b] as of `Result`

    @classmethod
    def of(cls, step: Step) -> Yielded:
        """Read the results of a step that the device has passed."""
        batch, logprobs = step.batch, step.host_logprobs()
        token_ids, broken, gained = step.tokens()
        if batch.drafts is None:
            rows, lines = np.flatnonzero(batch.yields_token), np.arange(len(token_ids))
            return cls(token_ids, broken, rows, lines, logprobs, None)
        rows = np.arange(len(batch.rows)).repeat(batch.num_lines)
        counts = np.zeros(len(batch.rows), np.int32)
        np.add.at(counts, rows, gained.astype(np.int32))
        lines = np.flatnonzero(step.lines.ahead < counts[rows])
        if logprobs is not None:
            logprobs = HostLogprobs(
                logprobs.token_ids[lines], logprobs.logprobs[lines], logprobs.ranks[lines]
            )
        return cls(token_ids[lines], broken[lines], rows[lines], lines, logprobs, counts)

    def of_rows(self, batch: Batch) -> Int64:
        """Return the ids as of `Result.token_ids`."""
        if self.counts is not None:
            return self.token_ids
        token_ids = np.full(len(batch.rows), -1, np.int64)
        token_ids[self.rows] = self.token_ids
        return token_ids
