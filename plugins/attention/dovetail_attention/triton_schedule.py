"""Schedules: work of each program of the `triton` kernels, computed on the host in numpy once per
step and read by the kernels as int32 records.

Each step has a new schedule, but the sizes of all tables are fixed at creation: a CUDA graph
replays the same grids over them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

BOUNDS = 5  # numbers
BEGINNING_KEYS = 64  # additional cost of starting a segment, in keys
TILE_NUMBERS = 11
# of a part of a prefill's tile: with fewer, putting it together costs more than it saves
LEAST_STEPS = 4
# Of a share, if there are too few for all: putting a row together again costs more than what finer
# shares save.
LEAST_KEYS = 64
LEAST_KEYS_OF_HALF = 32  # while no more than half of the shares have any


@dataclass(frozen=True, slots=True)
class StepRows:
    """Rows of a batch without padding: first query token in the batch, number of queries, tokens to
    attend to, and whether each query attends to all of them. [n] each."""

    index: Int64  # of the row, in the batch
    tokens: Int64
    queries: Int64
    lens: Int64
    both_ways: NDArray[np.bool_]

    @classmethod
    def of(
        cls, queries: Int32, lens: Int32, both_ways: NDArray[np.bool_] | None = None
    ) -> StepRows:
        counts = queries.astype(np.int64)
        return cls(
            np.arange(len(counts)),
            np.cumsum(counts) - counts,
            counts,
            lens.astype(np.int64),
            np.zeros(len(counts), np.bool_) if both_ways is None else both_ways,
        )

    def where(self, chosen: NDArray[np.bool_]) -> StepRows:
        return StepRows(
            self.index[chosen],
            self.tokens[chosen],
            self.queries[chosen],
            self.lens[chosen],
            self.both_ways[chosen],
        )

    @property
    def causal(self) -> StepRows:
        """The same rows, in which each query attends to the tokens up to itself."""
        return replace(self, both_ways=np.zeros_like(self.both_ways))


@dataclass(frozen=True, slots=True)
class Split:
    """How tiles of prefills may be cut over their keys, `step` of which are visited at a time: into
    `most` parts in all, but for whole tiles. With `of_row`, the tiles of each row are cut into so
    many at most, whatever the other rows."""

    step: int
    most: int
    of_row: int | None = None


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens that all decode rows begin with, attended by all of them together, in `parts` parts.
    No parts: each row by itself."""

    tokens: int = 0
    parts: int = 0


@dataclass(frozen=True, slots=True)
class OwnSteps:
    """For each row, return the first token that it reads by itself, the step of that token, and its
    number of steps. [n] each."""

    begins: Int64
    base: Int64
    steps: Int64

    @classmethod
    def of(cls, rows: StepRows, window: int | None, step: int, prefix: Prefix) -> OwnSteps:
        begins = (
            np.full_like(rows.lens, prefix.tokens)
            if window is None
            else np.maximum(rows.lens - window, 0)
        )
        base = begins // step
        return cls(begins, base, -(-rows.lens // step) - base)


@dataclass(frozen=True, slots=True)
class Filled:
    """Tables of an earlier step, and their inputs."""

    made_of: tuple[object, ...]
    buffer: Int32
    ends: Int64  # [rows] where in the buffer each row's last segment has its end


@dataclass(slots=True)
class DecodeTables:
    """Views of one int32 buffer, [shares + 1 | BOUNDS | max_rows * 3 | (max_rows + shares) * 5]:
    `triton_decode` says what they hold."""

    shares: int
    max_rows: int
    _filled: Filled | None = None

    @property
    def size(self) -> int:
        return self.segments_at + self.slots * 5

    @property
    def slots(self) -> int:
        """Upper bound: one per segment."""
        return self.max_rows + self.shares

    @property
    def bounds_at(self) -> int:
        return self.shares + 1

    @property
    def rows_at(self) -> int:
        return self.bounds_at + BOUNDS

    @property
    def segments_at(self) -> int:
        return self.rows_at + self.max_rows * 3

    def fill(
        self,
        rows: StepRows,
        window: int | None,
        step: int,
        prefix: Prefix,
        padding: int,
        first_padding: int,
    ) -> Int32:
        """Return the used prefix of the buffer, for `rows` of one query each, with keys processed
        `step` tokens at a time; `padding` tokens, from `first_padding` on, become zeros. The next
        call may change it.

        Unless a row starts another step, which is rare with few rows, only the ends of the rows
        change between calls."""
        seen = OwnSteps.of(rows, window, step, prefix)
        made_of = (
            rows.index.tobytes(),
            rows.tokens.tobytes(),
            seen.begins.tobytes(),
            seen.steps.tobytes(),
            step,
            prefix,
            padding,
            first_padding,
        )
        if self._filled is None or self._filled.made_of != made_of:
            buffer, ends = self._fill(rows, seen, step, prefix)
            buffer[self.bounds_at : self.rows_at] = (
                prefix.parts,
                prefix.tokens,
                len(rows.lens),
                first_padding,
                padding,
            )
            self._filled = Filled(made_of, buffer, ends)
        self._filled.buffer[self._filled.ends] = rows.lens
        return self._filled.buffer

    def _fill(
        self, rows: StepRows, seen: OwnSteps, step: int, prefix: Prefix
    ) -> tuple[Int32, Int64]:
        """Fill everything except the bounds and the rows' ends (`Filled.ends`)."""
        keys = int(seen.steps.sum()) * step
        shares = self._worth_having(keys)  # the rest have nothing to do
        # or beginning would be all that some have to do
        beginning = min(BEGINNING_KEYS, keys // shares // 2)
        cut = cut_evenly(seen.steps, shares, max(1, beginning // step))
        count = len(rows.lens)
        parts = np.bincount(cut.row, minlength=count)
        buffer = np.zeros(self.segments_at + len(cut.row) * 5, np.int32)
        buffer[: shares + 1] = cut.share_starts
        buffer[shares + 1 : self.shares + 1] = len(cut.row)
        records = buffer[self.rows_at : self.rows_at + count * 3].reshape(-1, 3)
        records[:, 0] = rows.tokens
        records[:, 1] = np.cumsum(parts) - parts
        records[:, 2] = parts
        table = buffer[self.segments_at :].reshape(-1, 5)
        table[:, 0] = rows.index[cut.row]
        table[:, 1] = rows.tokens[cut.row]
        table[:, 2] = np.maximum((seen.base[cut.row] + cut.first) * step, seen.begins[cut.row])
        # in a row's last segment, past its end
        table[:, 3] = (seen.base[cut.row] + cut.last) * step
        # the latter needs no merging
        table[:, 4] = np.where(parts[cut.row] > 1, cut.row, -1 - cut.row)
        return buffer, self.segments_at + (np.cumsum(parts) - 1) * 5 + 3

    def _worth_having(self, keys: int) -> int:
        """Return the number of shares for `keys` keys over all rows."""
        finest = max(min(keys // LEAST_KEYS_OF_HALF, self.shares // 2), keys // LEAST_KEYS)
        return max(1, min(self.shares, finest))


@dataclass(frozen=True, slots=True)
class Cut:
    """Segments in order: segment i is steps [first, last) of a row; share s is segments
    [share_starts[s], share_starts[s + 1])."""

    row: Int64
    first: Int64
    last: Int64
    share_starts: Int64


def cut_evenly(steps: Int64, shares: int, beginning: int) -> Cut:
    """Return the segments of rows with these numbers of steps, concatenated and cut into shares of
    equal cost; starting a row costs `beginning` additional steps."""
    ends = np.cumsum(steps)
    total = int(ends[-1]) if len(ends) else 0
    share_starts = np.zeros(shares + 1, np.int64)
    if not total:
        nothing = np.zeros(0, np.int64)
        return Cut(nothing, nothing, nothing, share_starts)
    starts = ends - steps
    cost_ends = np.cumsum(steps + beginning)
    marks = np.arange(1, shares) * int(cost_ends[-1]) // shares
    at = cost_ends.searchsorted(marks, side="right")
    cuts = starts[at] + np.minimum(np.maximum(marks - (cost_ends - steps)[at], 0), steps[at])
    bounds = np.concatenate([starts, cuts, [total]])
    bounds.sort()
    bounds = bounds[np.concatenate([[True], bounds[1:] > bounds[:-1]])]
    row = ends.searchsorted(bounds[:-1], side="right")
    share_starts[1:-1] = bounds.searchsorted(cuts)
    share_starts[-1] = len(row)
    return Cut(row, bounds[:-1] - starts[row], bounds[1:] - starts[row], share_starts)


def prefill_tiles(rows: StepRows, group: int, tile: int, split: Split | None = None) -> Int32:
    """Records [tiles, TILE_NUMBERS] of (row, first token, queries, kv_len, first flat query, first
    key, end of the keys, part, parts, first slot, last key that all queries see; 0: each sees the
    keys up to its own): the rows that take longest first, and of each row the last tile, which sees
    most, first; so tiles that run together share K and V, and the short ones fill up the end.
    `split`: a tile may come in parts, over some of its keys each, that have consecutive slots."""
    order = np.argsort(-(rows.queries * rows.lens), kind="stable")
    counts = -(-rows.queries[order] * group // tile)
    which = np.repeat(order, counts)
    ends = np.cumsum(counts)
    back = np.repeat(ends, counts) - 1 - np.arange(len(which))  # the place in its row
    queries = rows.queries[which]
    lens = rows.lens[which]
    both_ways = rows.both_ways[which]
    # of the last query
    seen = lens - queries + np.minimum(((back + 1) * tile - 1) // group, queries - 1) + 1
    seen = np.where(both_ways, lens, seen)
    of_all = np.where(both_ways, lens - 1, 0)
    records = np.empty((len(which), TILE_NUMBERS), np.int32)
    columns: tuple[Int64 | int, ...] = (
        *(rows.index[which], rows.tokens[which], queries, lens, back * tile),
        *(0, seen, 0, 1, 0, of_all),
    )
    for column, values in enumerate(columns):
        records[:, column] = values
    return records if split is None else _in_parts(records, seen, split)


def _in_parts(tiles: Int32, seen: Int64, split: Split) -> Int32:
    """Split each tile into parts of equal length, as many as fit on the GPU; one part each, if
    there are enough tiles."""
    steps = -(-seen // split.step)
    least = -(-steps.sum() // split.most)  # of a part
    if split.of_row is not None:
        rows = np.unique(tiles[:, 0], return_inverse=True)[1]
        least = -(-np.bincount(rows, steps).astype(np.int64)[rows] // max(1, split.of_row))
    parts = np.maximum(steps // np.maximum(least, LEAST_STEPS), 1)
    if not (parts > 1).any():
        return tiles
    starts = np.cumsum(parts) - parts
    records = np.repeat(tiles, parts, axis=0)
    of_part = np.arange(len(records)) - np.repeat(starts, parts)
    steps = np.repeat(steps, parts)
    parts = np.repeat(parts, parts)
    records[:, 5] = of_part * steps // parts * split.step
    records[:, 6] = np.minimum((of_part + 1) * steps // parts * split.step, records[:, 6])
    records[:, 7], records[:, 8] = of_part, parts
    records[:, 9] = np.cumsum(parts > 1) - 1 - of_part
    return records


def most_prefill_tiles(
    max_rows: int, max_tokens: int, group: int, tile: int, split: Split | None = None
) -> int:
    """Return an upper bound of the number of tiles of any batch."""
    return -(-max_tokens * group // tile) + max_rows + (0 if split is None else split.most)
