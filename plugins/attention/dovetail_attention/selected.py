"""Attention of the `torch` backend to the tokens that an indexer selects; the oracle of other
backends' kernels.

A row of up to `top_k` tokens attends to all of them, like in any other layer: only longer rows are
selected for. Their queries are scored and attended in tiles of at most `MOST_NUMBERS` numbers, so
that memory doesn't grow with the length of a prompt:

      scores     [queries, keys] of a tile, summed over heads of [queries, heads, some keys]
      selected   [queries, top_k] positions, ascending; -1 after those of a query that sees fewer
      attention  a piece of decodes (`pieces.py`) over K gathered at these positions
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dovetail.api.attention import AttentionBatch, Indexer, LayerCache, LayerSpec
from dovetail.errors import DovetailError
from dovetail_attention.memory import index_layer, rows_of
from dovetail_attention.pieces import Piece
from dovetail_attention.units import Units

MOST_NUMBERS = 4 << 20  # of a temporary tensor
MOST_QUERIES = 64  # of a tile


class Row(NamedTuple):
    """A row of a step: its number, its first token in the batch, its queries, and the tokens that
    it sees."""

    number: int
    first: int
    queries: int
    seen: int


@dataclass(frozen=True, slots=True)
class Selected:
    """Tokens [first, first + len(positions)) of the batch, and the positions that they attend to,
    [queries, keys] int32, with -1 for none."""

    row: int
    first: int
    positions: torch.Tensor


class Selections:
    """Holds the tokens that a backend's layers select in a step. Each layer that selects replaces
    the selection of the one before it."""

    batch: AttentionBatch  # of this step, set by `plan` of the backend

    def __init__(self) -> None:
        self._selected: list[Selected] = []

    def _rows(self) -> Iterator[Row]:
        batch = self.batch
        first = 0
        lengths = zip(batch.host_query_lens.tolist(), batch.host_kv_lens.tolist(), strict=True)
        for number, (queries, seen) in enumerate(lengths):
            yield Row(number, first, queries, seen)
            first += queries

    def select(
        self, indexer: Indexer, keys: IndexKeys, q: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """q [tokens, heads, size], weights [tokens, heads] float32: as of `AttentionLayer`."""
        self._selected = []
        for row in self._rows():
            if row.seen <= indexer.top_k:
                continue
            step = min(MOST_QUERIES, max(1, MOST_NUMBERS // row.seen))
            for start in range(0, row.queries, step):
                count = min(step, row.queries - start)
                at = row.first + start
                own = slice(at, at + count)
                end = row.seen - row.queries + start + count
                table = keys.units.tables(self.batch)[row.number, None]
                scores = keys.scores(table, end, q[own], weights[own])
                positions = _best(scores, indexer.top_k)
                last = torch.arange(end - count, end, device=q.device)[:, None]
                positions = positions.masked_fill(positions > last, -1)
                self._selected.append(Selected(row.number, at, positions.to(torch.int32)))

    def pieces(self, units: Units, numbers: int, dtype: torch.dtype) -> Iterator[Piece]:
        """Yield the work of a layer whose K has `numbers` numbers a token; `dtype`: of q."""
        for part in self._selected:
            keys = part.positions.shape[1]
            step = max(1, MOST_NUMBERS // (keys * numbers))
            table = units.tables(self.batch)[part.row, None]
            for start in range(0, len(part.positions), step):
                positions = part.positions[start : start + step].long()
                rows = len(positions)
                hidden = positions < 0
                # read the first token in place of none
                entries = units.of_positions(table, positions.masked_fill(hidden, 0))
                mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
                yield Piece(
                    rows,
                    1,
                    keys,
                    slice(part.first + start, part.first + start + rows),
                    entries.flatten(),
                    mask.masked_fill_(hidden, -torch.inf)[:, None, None, :],
                )


class IndexKeys:
    """Index keys of a layer, in its cache."""

    units: Units  # set by `bind`

    def __init__(self, spec: LayerSpec, dtype: torch.dtype) -> None:
        self._spec = index_layer(spec)
        self._dtype = dtype
        self._keys = torch.empty(0)  # [entries, 1, size]

    def bind(self, cache: LayerCache) -> None:
        """`cache`: the tensor of index keys alone."""
        [rows] = rows_of(cache, self._spec, self._dtype)
        self.units = Units.of(cache, rows, self._spec)
        self._keys = self.units.view(rows, self._spec)

    def write(self, keys: torch.Tensor, batch: AttentionBatch) -> None:
        """keys [tokens, size]: of the batch's tokens."""
        slots = batch.slots[self.units.group][self.units.page]
        self._keys.index_copy_(0, self.units.of_slots(slots), keys[:, None])

    def scores(
        self, table: torch.Tensor, end: int, q: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the scores [queries, end] float32 of a row's first `end` tokens for q [queries,
        heads, size], the last of these. Tokens after a query have -inf. table [1, blocks]:
        the row's."""
        queries, heads, _ = q.shape
        scores = torch.empty((queries, end), dtype=torch.float32, device=q.device)
        step = max(1, MOST_NUMBERS // (queries * heads))
        for start in range(0, end, step):
            positions = torch.arange(start, min(start + step, end), device=q.device)[None]
            entries = self.units.of_positions(table, positions)
            keys = self._keys.index_select(0, entries[0])
            products = torch.einsum("qhd,kd->qhk", q.float(), keys[:, 0].float()).relu_()
            scores[:, start : start + step] = torch.einsum("qh,qhk->qk", weights, products)
        later = torch.ones_like(scores, dtype=torch.bool).triu_(end - queries + 1)
        return scores.nan_to_num_(nan=0.0).masked_fill_(later, -torch.inf)


def kept_by(layer: int, keys: IndexKeys | None) -> IndexKeys:
    """Return a layer's index keys. Raises `DovetailError` if it has none."""
    if keys is None:
        raise DovetailError(f"attention layer {layer} has no index keys: it selects no tokens")
    return keys


def _best(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the positions of the `top_k` highest of scores [queries, keys], or of all, ascending;
    of equals, the earliest."""
    queries, keys = scores.shape
    if keys <= top_k:
        return torch.arange(keys, device=scores.device).expand(queries, keys)
    least = scores.topk(top_k, dim=1).values[:, -1:]
    above = scores > least
    equal = scores == least
    room = top_k - above.sum(1, keepdim=True)
    taken = above | (equal & (equal.cumsum(1) <= room))
    return taken.nonzero()[:, 1].view(queries, top_k)
