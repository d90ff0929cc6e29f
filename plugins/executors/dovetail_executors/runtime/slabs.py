"""Tokens whose results must not depend on what else a step computes (`RowSampling.deterministic`).

Kernels and matrix products choose the order of their additions by the shapes of their inputs, so a
token's bits depend on its company. Here a forward computes a fixed number of *slabs*, each of one
row's `SLAB` consecutive positions from a multiple of `SLAB` on. Positions that the step
doesn't ask for are filled up, and slabs that it doesn't need are padding:

      a step computes tokens 40 to 69 of a row:    slab 32..63            slab 64..95            padding
                                                   [fill 8 | 40 .. 63]    [64 .. 69 | fill 26]   [32] …

Every operation then has shapes that nothing in the step changes. Attention computes each slab by
itself (`AttentionBatch.fixed_shapes`). A token's bits depend on itself, and on K and V of the
tokens before it, which were computed likewise. Required of kernels is that they compute each token
by itself, in an order that follows from the shapes; and, where a forward has several slabs, that
this order is the same in each place. `SlabSteps` tries that before it relies on it. Forwards of
other sizes are used only if a trial shows that they compute the same bits: products of plain
weights do, on matrix units that multiply the inputs in their order (`format.dense`).

This file says which tokens a slab has; `slab_steps` computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail_executors.runtime.row_state import RowState, ranges
from dovetail_executors.runtime.step_inputs import HostInputs, Int64

SLAB = 32  # tokens
# Slabs of a forward by type of device; 1 on others. A GPU takes about as long for 256 tokens as for
# 32: it reads all weights in both. On a CPU, 4 of them halved the time of 12 requests of a tiny
# model, and doubled that of a single one; a forward of one needs no trial of its places.
PLACES = {"cuda": 8}
# Other numbers that are tried against it, so that few slabs take less time, and many fewer forwards
MORE_PLACES: dict[str, tuple[int, ...]] = {"cuda": (1, 2, 16, 64)}
READING = 4  # slabs that take as long as reading the weights, roughly
# Lines whose logits are computed together, likewise
LINES = {"cuda": 256}
# Another number that is tried against it, for many lines: launching either takes the host as long
MANY_LINES = {"cuda": 1024}
MOST_LOGITS = 1 << 28  # which that many lines may have


@dataclass(frozen=True, slots=True)
class Slabs:
    """Tokens [starts, ends) of rows, which a step computes, in slabs [firsts, firsts + SLAB); [s]
    each. Their order is one in which they can be computed, one after the other or together: rows
    come after those whose prefixes they share, which were granted before them."""

    rows: Int64
    firsts: Int64
    starts: Int64
    ends: Int64
    indices: Int64  # of tokens `starts`, among the step's tokens

    @classmethod
    def of(cls, host: HostInputs, chosen: NDArray[np.bool_]) -> Slabs:
        """Return the slabs of the chosen rows [b] of a step."""
        ends = host.kv_lens[chosen].astype(np.int64)
        indices = host.query_starts[:-1][chosen].astype(np.int64)
        starts = ends - np.diff(host.query_starts)[chosen]
        counts = -(-ends // SLAB) - starts // SLAB
        firsts = ranges(starts // SLAB, counts) * SLAB
        own_starts = np.maximum(firsts, starts.repeat(counts))
        return cls(
            host.rows[chosen].repeat(counts),
            firsts,
            own_starts,
            np.minimum(firsts + SLAB, ends.repeat(counts)),
            indices.repeat(counts) + own_starts - starts.repeat(counts),
        )

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, index: slice | Int64) -> Slabs:
        """Return the slabs at `index`."""
        return Slabs(
            self.rows[index],
            self.firsts[index],
            self.starts[index],
            self.ends[index],
            self.indices[index],
        )

    def inputs(self, state: RowState, unstored: int = 0) -> HostInputs:
        """Return the inputs of these slabs in one forward. K and V of fill go to the waste page, or
        where later tokens of its row will be written, since attention reads that place, too. Those
        of the first `unstored` slabs all go to the waste page."""
        rows = self.rows[:, None]
        starts, ends = self.starts[:, None], self.ends[:, None]
        tokens = self.firsts[:, None] + np.arange(SLAB)  # [s, SLAB]
        positions = np.minimum(np.maximum(tokens, starts), ends - 1)
        tables = state.tables_to_read(self.rows, self.starts, self.ends, self.firsts + SLAB)
        sizes = state.block_tokens[:, None, None]
        blocks, offsets = np.divmod(tokens, sizes)  # [tables, s, SLAB]
        own = (tokens >= starts) & (blocks <= (ends - 1) // sizes)
        own[:, :unstored] = False
        before = np.arange(0, tables.size, tables.shape[2]).reshape(*tables.shape[:2], 1)
        slots = tables.reshape(-1)[before + blocks] * sizes + offsets
        return HostInputs(
            token_indices=(rows * state.row_width + positions).ravel(),
            positions=positions.ravel(),
            slots=np.where(own, slots, state.waste_slots[:, None, None]).reshape(len(slots), -1),
            rows=self.rows,
            query_starts=np.arange(0, tokens.size + 1, SLAB, dtype=np.int32),
            kv_lens=(self.firsts + SLAB).astype(np.int32),
            line_ends=np.zeros(0, np.int64),
            max_blocks=tables.shape[2],
            tables=tables,
        )

    def find(self, tokens: Int64) -> tuple[Int64, Int64]:
        """Return the slab of each of `tokens` [n], of the step, or -1, and its place in there."""
        slabs = np.searchsorted(self.indices, tokens, side="right") - 1
        into = tokens - self.indices[slabs]
        found = (slabs >= 0) & (into < (self.ends - self.starts)[slabs])
        return np.where(found, slabs, -1), into + (self.starts - self.firsts)[slabs]


def sizes_of_forwards(device: str, max_tokens: int) -> list[int]:
    """Return the ascending numbers of slabs that forwards may have, with at most `max_tokens`
    tokens; of `MORE_PLACES`, those that no trial has excluded. `device`: its type."""
    sizes = {PLACES.get(device, 1), *MORE_PLACES.get(device, ())}
    return sorted(size for size in sizes if size * SLAB <= max_tokens)


def cheapest(sizes: Sequence[int], slabs: int) -> int:
    """Return the size of a forward that takes the least time for each of up to `slabs` slabs."""
    return min(sizes, key=lambda size: (READING + size) / min(size, slabs))


def rounded_up(tokens: int) -> int:
    """Return `tokens` up to the end of their last slab."""
    return -(-tokens // SLAB) * SLAB


def why_not(
    device: str,
    ranks: int,
    max_tokens: int,
    attention: str,
    *,
    recurrent: bool,
    fixed_shapes: bool,
    calibrates: bool,
) -> str:
    """Return why rows of an engine can't be deterministic: see `Capacity.not_deterministic`.
    `device`: its type. `max_tokens`: of a step. `fixed_shapes`: the capability of the attention
    backend. `calibrates`: the first step's prompts determine the scales of K and V."""
    if recurrent:
        return "recurrent layers add up a chunk of tokens in another order than single ones"
    if ranks > 2:
        return f"it runs on {ranks} ranks, whose sums have no fixed order; at most 2 are supported"
    least = SLAB * PLACES.get(device, 1)
    if max_tokens < least:
        return f"max_num_batched_tokens is {max_tokens}, and must be at least {least}"
    if calibrates:
        return "kv_cache_scales: calibrate fits the scales of K and V to the first prompts"
    if not fixed_shapes:
        return f"attention backend {attention} doesn't offer it (its capability `fixed_shapes`)"
    return ""
