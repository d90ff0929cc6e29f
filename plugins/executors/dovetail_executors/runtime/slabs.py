"""Tokens whose results must not depend on what else a step computes (`RowSampling.deterministic`).

Kernels and matrix products choose the order of their additions by the shapes of their inputs, so a
token's bits depend on its company. Here a forward always computes one row's `SLAB` consecutive
positions from a multiple of `SLAB` on. Those that the step doesn't ask for are filled up:

      a step computes tokens 40 to 69 of a row:    slab 32..63            slab 64..95
                                                   [fill 8 | 40 .. 63]    [64 .. 69 | fill 26]

Every operation then has shapes that depend on the position alone, and a token is always in the same
place of its slab. Its bits depend on itself, and on K and V of the tokens before it, which were
computed likewise. Nothing is required of kernels but that they compute each token by itself, and in
an order that follows from the shapes. The fill costs time: a decode computes `SLAB` tokens.

The normal step runs before, for all rows; slabs overwrite K, V and the final states of those that
are deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dovetail_executors.runtime.row_state import RowState
from dovetail_executors.runtime.step_inputs import HostInputs, Int64

SLAB = 32  # tokens


@dataclass(frozen=True, slots=True)
class Slab:
    """Tokens [start, end) of a row, which a step computes, in the slab [first, upto)."""

    row: int
    first: int
    upto: int  # less than first + SLAB at the end of the longest sequence
    start: int
    end: int
    index: int  # of token `start`, among the step's tokens

    @property
    def fill_before(self) -> int:
        """Tokens of the slab before `start`."""
        return self.start - self.first

    def inputs(self, state: RowState) -> HostInputs:
        """Return the inputs of the slab's forward. K and V of its fill go to the waste page, or
        where later tokens of the row will be written, since attention reads that place, too."""
        slab = np.arange(self.first, self.upto)
        positions = np.clip(slab, self.start, self.end - 1)
        tables = state.tables_to_read(self.row, self.start, self.end, self.upto)
        blocks, offsets = np.divmod(slab, state.block_tokens[:, None])
        own = (slab >= self.start) & (blocks <= (self.end - 1) // state.block_tokens[:, None])
        pages = np.take_along_axis(tables[:, 0].astype(np.int64), blocks, axis=1)
        slots = pages * state.block_tokens[:, None] + offsets
        return HostInputs(
            token_indices=self.row * state.row_width + positions,
            positions=positions,
            slots=np.where(own, slots, state.waste_slots[:, None]),
            rows=np.array([self.row]),
            query_starts=np.array([0, len(slab)], np.int32),
            kv_lens=np.array([self.upto], np.int32),
            line_ends=np.zeros(0, np.int64),
            max_blocks=tables.shape[2],
            tables=tables,
        )


def slabs_of(host: HostInputs, state: RowState) -> Iterator[Slab]:
    """Yield the slabs of a step's deterministic rows, in an order in which they can be computed: a
    row follows those whose prefixes it shares, which were granted before it."""
    for index in np.flatnonzero(state.are_deterministic(host.rows)).tolist():
        row = int(host.rows[index])
        end = int(host.kv_lens[index])
        at = int(host.query_starts[index])
        start = end - (int(host.query_starts[index + 1]) - at)
        for first in range(start - start % SLAB, end, SLAB):
            upto = min(first + SLAB, state.max_len)
            own = Slab(row, first, upto, max(start, first), min(end, upto), at)
            at += own.end - own.start
            yield own


def wanted_in(slab: Slab, tokens: Int64) -> tuple[Int64, Int64]:
    """Return which of `tokens` [n], of a step, are in a slab: their indices in `tokens`, and their
    places in the slab."""
    indices = np.flatnonzero((tokens >= slab.index) & (tokens < slab.index + slab.end - slab.start))
    return indices, tokens[indices] - slab.index + slab.fill_before


def why_not(
    ranks: int,
    max_tokens: int,
    attention: str,
    *,
    recurrent: bool,
    fixed_shapes: bool,
    calibrates: bool,
) -> str:
    """Return why rows of an engine can't be deterministic: see `Capacity.not_deterministic`.
    `max_tokens`: of a step. `fixed_shapes`: the capability of the attention backend. `calibrates`:
    the first step's prompts determine the scales of K and V."""
    if recurrent:
        return "recurrent layers add up a chunk of tokens in another order than single ones"
    if ranks > 2:
        return f"it runs on {ranks} ranks, whose sums have no fixed order; at most 2 are supported"
    if max_tokens < SLAB:
        return f"max_num_batched_tokens is {max_tokens}, and must be at least {SLAB}"
    if calibrates:
        return "kv_cache_scales: calibrate fits the scales of K and V to the first prompts"
    if not fixed_shapes:
        return f"attention backend {attention} doesn't offer it (its capability `fixed_shapes`)"
    return ""
