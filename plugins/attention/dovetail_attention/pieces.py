"""Splits a ragged batch into parts for the `torch` backend, once per step for all layers.

A *piece* is what one scaled dot product computes, over K and V gathered through the block table:

- *decodes*: rows of one query each, of similar length. Their keys are gathered into [rows,
  longest]; shorter rows repeat their last token, masked.
- *fresh prefills*: rows that begin at token 0, of similar length, causal. A query sees only keys at
  its left, so nothing needs a mask: the filling lies at the right.
- *chunks*: up to `CHUNK` queries of one row that has tokens before them or a window. The mask is a
  part of one band matrix.
- *chunks of rows in both directions*: likewise, over keys up to the row's end. Only a window needs
  a mask.

Decodes in float32 on a CPU are `bags.Bags` instead, which gather nothing, except a single row with
contiguous blocks, which a piece reads in place.

Grouping pays off because a call costs about as much as some 100 KiB of K; filling up to the longest
row costs time as well, and a piece that outgrows the CPU's cache is read twice from memory. The two
constants below balance that (measured on a 2-core Xeon, heads of 32 and of 128).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from dovetail.api.attention import AttentionBatch, LayerSpec
from dovetail.nn.transfer import to_device
from dovetail_attention.bags import Bags, bags_work, make_bags
from dovetail_attention.layer_shape import LayerShape
from dovetail_attention.scaled import as_bytes
from dovetail_attention.units import Units

MAX_PIECE_BYTES = 2 << 20  # of gathered K, for more than one row
MAX_FILL_BYTES = 128 << 10  # of padding in K
CHUNK = 256  # queries

Where = slice | torch.Tensor  # consecutive indices, or an index [n] int64


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows attended in one call. Queries and keys are row by row, padded to the same number per
    row."""

    rows: int
    queries_per_row: int
    keys_per_row: int
    queries: Where  # [rows * queries_per_row] tokens of the batch
    keys: Where  # [rows * keys_per_row] entries of the caches
    # added to the scores, broadcast to [rows, heads, queries, keys]
    mask: torch.Tensor | None = None
    causal: bool = False  # a query sees the keys up to its own position in its row
    real: torch.Tensor | None = None  # which queries aren't padding; None: all

    def attend(
        self,
        spec: LayerSpec,
        k: torch.Tensor,
        v: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """k, v [entries, kv_heads, their size]: the caches, perhaps of a smaller dtype; q [tokens,
        heads, head_size]. Writes `out` [tokens, heads, out_size] at its own queries. sinks: [heads]
        float32."""
        shape = (self.rows, self.keys_per_row, spec.kv_heads, -1)
        # [rows, kv_heads, keys, size]
        k, v = (
            _take_numbers(cache, self.keys, q.dtype).view(shape).transpose(1, 2) for cache in (k, v)
        )
        q = _take(q, self.queries)
        if (
            self.queries_per_row == 1
        ):  # the heads that share a kv head become its queries: each K and V is read once
            q = q.reshape(self.rows, spec.kv_heads, spec.heads // spec.kv_heads, spec.head_size)
            values = self._attended(
                spec, q, k, v, None if sinks is None else sinks.view(spec.kv_heads, -1)
            )
        else:
            q = q.reshape(self.rows, self.queries_per_row, spec.heads, spec.head_size).transpose(
                1, 2
            )
            values = self._attended(
                spec, q, k, v, None if sinks is None else sinks[:, None]
            ).transpose(1, 2)
        self._put(out, values.reshape(-1, *out.shape[1:]))

    def _attended(
        self,
        spec: LayerSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """q [rows, heads, queries, size], k and v [rows, kv_heads, keys, their size] -> [rows,
        heads, queries, V's size]. sinks: broadcast to [rows, heads, queries]."""
        gqa = q.shape[1] != k.shape[1]
        if spec.softcap is None and sinks is None:
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=self.mask,
                is_causal=self.causal,
                scale=spec.scale,
                enable_gqa=gqa,
            )
        if gqa:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.matmul(q.float(), k.float().transpose(2, 3)) * spec.scale
        if spec.softcap is not None:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        if self.mask is not None:
            scores += self.mask
        if self.causal:
            scores.masked_fill_(
                torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf
            )
        if sinks is None:
            weights = scores.softmax(-1)
        else:
            weights = torch.cat(
                [scores, sinks[..., None].expand(*scores.shape[:3], 1)], dim=-1
            ).softmax(-1)[..., :-1]
        return torch.matmul(weights, v.float()).to(q.dtype)

    def _put(self, out: torch.Tensor, values: torch.Tensor) -> None:
        if isinstance(self.queries, slice):
            out[self.queries] = values
        elif self.real is None:
            out.index_copy_(0, self.queries, values)
        else:
            out.index_copy_(
                0, self.queries.index_select(0, self.real), values.index_select(0, self.real)
            )


class BandMask:
    """Mask of the keys that each of up to `CHUNK` consecutive queries of a row attends to: all up
    to itself, or the last `window` of them.

    One matrix serves all: cut so that its last column is the last query's own key.
    """

    def __init__(
        self, max_len: int, window: int | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.window = window
        # keys before a query that any cut may need
        self._reach = max_len if window is None else min(window, max_len)
        self._dtype = dtype
        self._device = device
        self._matrix: torch.Tensor | None = None  # [CHUNK, reach + CHUNK], made when first needed

    def hide(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return a mask to add to scores: -inf where `hidden` (bool) is true, 0 elsewhere."""
        return torch.zeros_like(hidden, dtype=self._dtype).masked_fill_(hidden, -torch.inf)

    def cut(self, queries: int, keys: int) -> torch.Tensor:
        """The mask [queries, keys] of `queries` queries that are the last of `keys` keys."""
        if self._matrix is None:
            query = torch.arange(CHUNK, device=self._device)[:, None]
            # distance from query back to key
            back = query + self._reach - torch.arange(self._reach + CHUNK, device=self._device)
            seen = back >= 0 if self.window is None else (back >= 0) & (back < self.window)
            self._matrix = self.hide(~seen)
        part = self._matrix[:queries, self._reach + queries - keys : self._reach + queries]
        # torch's kernels there read 16 bytes at once, from where such numbers may begin
        return part.clone() if part.is_cuda else part

    def left(self, queries: int, first: int, keys: int) -> torch.Tensor | None:
        """The mask [queries, keys] of consecutive queries that see all keys but those before their
        windows; the first query's own key is number `first`. None: they see all."""
        if self.window is None or first + queries <= self.window:
            return None
        query = torch.arange(first, first + queries, device=self._device)[:, None]
        return self.hide(torch.arange(keys, device=self._device) <= query - self.window)


Kind = tuple[LayerShape, Units]  # layers that are alike in both share a plan


@dataclass(slots=True)
class Planner:
    """Splits a batch into parts, for each kind of layer in the model."""

    bytes_per_token: int  # of K, in the widest layer
    masks: Mapping[int | None, BandMask]  # of each window
    kinds: Sequence[Kind]
    use_bags: bool

    @classmethod
    def of(
        cls,
        layers: Sequence[tuple[LayerSpec, Units]],
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Planner:
        """Create a planner for these layers and sequences of at most `max_len` tokens."""
        return cls(
            max((spec.kv_heads * spec.head_size * dtype.itemsize for spec, _ in layers), default=1),
            {
                window: BandMask(max_len, window, dtype, device)
                for window in dict.fromkeys(spec.window for spec, _ in layers)
            },
            tuple(dict.fromkeys((LayerShape.of(spec), units) for spec, units in layers)),
            device.type == "cpu" and dtype == torch.float32 and bags_work(),
        )

    def plan(self, batch: AttentionBatch) -> dict[Kind, list[Piece | Bags]]:
        return {kind: _BatchCutter(self, batch, *kind).cut() for kind in self.kinds}


class _BatchCutter:
    """Splits one batch for layers of one kind."""

    def __init__(
        self, planner: Planner, batch: AttentionBatch, shape: LayerShape, units: Units
    ) -> None:
        self.planner = planner
        self.batch = batch
        self.shape = shape
        self.units = units
        self.mask = planner.masks[shape.window]
        # latent layers have no separate V
        self.use_bags = planner.use_bags and not shape.latent and units.of_token == 1
        self.table = units.tables(batch)  # [rows, max_blocks]
        self.device = self.table.device
        self.queries = batch.host_query_lens.astype(np.int64)
        self.lens = batch.host_kv_lens.astype(np.int64)
        self.first_query = np.cumsum(self.queries) - self.queries  # of each row, in the batch
        self.both_ways = np.zeros(len(self.queries), np.bool_)
        if shape.both_ways and batch.host_both_ways is not None:
            self.both_ways = batch.host_both_ways & (self.queries > 1)

    def cut(self) -> list[Piece | Bags]:
        window = self.shape.window
        fresh = (self.queries == self.lens) & (self.queries > 1)
        fresh &= ~self.both_ways
        if window is not None:
            fresh &= self.lens <= window
        single = self.queries == 1
        others = ~single & ~fresh
        if self.shape.top_k is not None:  # longer rows are attended by `selected.Selections`
            whole = self.lens <= self.shape.top_k
            single &= whole
            fresh &= whole
            others &= whole
        parts = self._decodes(np.flatnonzero(single))
        parts += [self._fresh(rows) for rows in self._similar(np.flatnonzero(fresh), None)]
        for row in np.flatnonzero(others):
            parts += self._stretches(int(row))
        return parts

    def _decodes(self, rows: NDArray[np.int64]) -> list[Piece | Bags]:
        if len(rows) > 1 and self.batch.fixed_shapes:
            return [part for row in rows[:, None] for part in self._decodes(row)]
        if len(rows) == 1:
            piece = self._similar_decodes(rows)
            if isinstance(piece.keys, slice) or not self.use_bags:
                return [piece]
        if len(rows) and self.use_bags:
            return [self._bags(rows)]
        return [self._similar_decodes(group) for group in self._similar(rows, self.shape.window)]

    def _bags(self, rows: NDArray[np.int64]) -> Bags:
        units = self.units
        table = self.table.numpy()
        ends = self.lens[rows]
        lens = ends if self.shape.window is None else np.minimum(ends, self.shape.window)
        skipped = np.cumsum(lens) - ends  # so that position = index in the whole - skipped
        positions = np.arange(lens.sum()) - np.repeat(skipped, lens)
        blocks = table.ravel()[
            np.repeat(rows * table.shape[1], lens) + positions // units.block_size
        ]
        entries = blocks.astype(np.int64) * units.of_page + positions % units.block_size
        return make_bags(
            self.first_query[rows],
            entries,
            lens,
            self.shape.heads,
            self.shape.kv_heads,
            units.entries,
        )

    def _similar(self, rows: NDArray[np.int64], window: int | None) -> list[NDArray[np.int64]]:
        """`rows` in groups of similar length: see the two constants at the top. Each by itself if
        shapes are fixed."""
        if self.batch.fixed_shapes:
            return list(rows[:, None])
        lens = self.lens[rows] if window is None else np.minimum(self.lens[rows], window)
        order = np.argsort(-lens, kind="stable")
        ends = _group_ends(
            lens[order].tolist(),
            MAX_PIECE_BYTES // self.planner.bytes_per_token,
            MAX_FILL_BYTES // self.planner.bytes_per_token,
        )
        return np.split(rows[order], ends[:-1]) if ends else []

    def _similar_decodes(self, rows: NDArray[np.int64]) -> Piece:
        ends = self.lens[rows]
        lens = ends if self.shape.window is None else np.minimum(ends, self.shape.window)
        longest = int(lens.max())
        keys, seen = self._slots(rows, ends - lens, lens, longest)
        mask = None
        if seen is not None:
            mask = self.mask.hide(~seen)[:, None, None, :]
        return Piece(len(rows), 1, longest, self._where(self.first_query[rows]), keys, mask)

    def _fresh(self, rows: NDArray[np.int64]) -> Piece:
        lens = self.queries[rows]
        longest = int(lens.max())
        keys, seen = self._slots(rows, np.zeros_like(lens), lens, longest)
        if len(rows) == 1:
            first = int(self.first_query[rows[0]])
            return Piece(1, longest, longest, slice(first, first + longest), keys, causal=True)
        indices = np.minimum(
            self.first_query[rows][:, None] + np.arange(longest), self.batch.num_tokens - 1
        )
        real = (
            None
            if seen is None
            else self._to_device(np.flatnonzero(np.arange(longest) < lens[:, None]))
        )
        return Piece(
            len(rows),
            longest,
            longest,
            self._to_device(indices.ravel()),
            keys,
            causal=True,
            real=real,
        )

    def _stretches(self, row: int) -> list[Piece | Bags]:
        queries = int(self.queries[row])
        length = int(self.lens[row])
        window = self.shape.window
        before = length - queries
        pieces: list[Piece | Bags] = []
        for start in range(0, queries, CHUNK):
            count = min(CHUNK, queries - start)
            at = before + start
            end = length if self.both_ways[row] else at + count
            first = 0 if window is None else max(0, at + 1 - window)
            keys, _ = self._slots(
                np.array([row]), np.array([first]), np.array([end - first]), end - first
            )
            if self.both_ways[row]:
                mask = self.mask.left(count, at - first, end - first)
            else:
                mask = self.mask.cut(count, end - first)
            first_index = int(self.first_query[row]) + start
            pieces.append(
                Piece(
                    1,
                    count,
                    end - first,
                    slice(first_index, first_index + count),
                    keys,
                    mask,
                )
            )
        return pieces

    def _slots(
        self,
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        lens: NDArray[np.int64],
        longest: int,
    ) -> tuple[Where, torch.Tensor | None]:
        """Entries of tokens [start, start + len) of each row, [rows * longest], filled up with the
        row's last; and which are real, [rows, longest], None: all. No other block of a row is
        looked up, and no other token read: they may hold anything, NaN too."""
        last = self._to_device(starts + lens - 1)[:, None]
        # [rows, longest]
        positions = self._to_device(starts)[:, None] + torch.arange(longest, device=self.device)
        filled = torch.minimum(positions, last)
        tables = self.table.index_select(0, self._to_device(rows))
        entries = self.units.of_positions(tables, filled)
        if len(rows) == 1:
            return self._as_slice(entries[0]), None
        return entries.flatten(), None if bool((lens == longest).all()) else positions <= last

    def _as_slice(self, slots: torch.Tensor) -> Where:
        """Return a slice for a row with contiguous blocks, to read in place. Not on a GPU, where
        checking would synchronize; nor if the place mustn't matter: products add up in another
        order where memory is aligned differently."""
        if self.device.type == "cpu" and not self.batch.fixed_shapes:
            first = int(slots[0])
            count = len(slots)
            if int(slots[-1]) - first == count - 1 and bool((slots.diff() == 1).all()):
                return slice(first, first + count)
        return slots

    def _where(self, indices: NDArray[np.int64]) -> Where:
        first = int(indices[0])
        if bool((indices == np.arange(first, first + len(indices))).all()):
            return slice(first, first + len(indices))
        return self._to_device(indices)

    def _to_device(self, array: NDArray[np.int64]) -> torch.Tensor:
        return to_device(array, self.device)


def _take(tensor: torch.Tensor, where: Where) -> torch.Tensor:
    return tensor[where] if isinstance(where, slice) else tensor.index_select(0, where)


def _take_numbers(cache: torch.Tensor, where: Where, dtype: torch.dtype) -> torch.Tensor:
    if cache.dtype == dtype:
        return _take(cache, where)
    return _take(as_bytes(cache), where).view(cache.dtype).to(dtype)


def _group_ends(lens: Sequence[int], most: int, most_fill: int) -> list[int]:
    """Cut lengths, longest first, into groups: a group of several holds at most `most` tokens,
    filling included, and `most_fill` filling."""
    ends: list[int] = []
    start = fill = 0
    for i, length in enumerate(lens):
        longest = lens[start]
        if i > start and (fill + longest - length > most_fill or (i + 1 - start) * longest > most):
            ends.append(i)
            start = i
            fill = 0
            longest = length
        fill += longest - length
    return [*ends, len(lens)] if lens else ends
