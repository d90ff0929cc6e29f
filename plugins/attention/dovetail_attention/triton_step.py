"""Inputs and schedules of a step for the layers of the `triton` backend, in buffers with fixed
addresses.

`prepare` allocates them and `plan` fills them; kernels read them on the device, launches read the
number of programs on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from dovetail.api.attention import AttentionBatch, LayerCache
from dovetail.errors import DovetailError
from dovetail.nn.transfer import Mirror
from dovetail_attention.layer_shape import LayerShape, power_of_two
from dovetail_attention.triton_schedule import (
    TILE_NUMBERS,
    DecodeTables,
    Int32,
    Prefix,
    Split,
    StepRows,
    most_prefill_tiles,
    prefill_tiles,
)
from dovetail_attention.triton_tuning import Shape, Tilings

PREFIX_PARTS = 8  # of a shared prefix, at most
LEAST_TOGETHER = 16  # parts of a row that one program puts together
MERGE_NUMBERS = 4096  # numbers of partial results that a program merges at once
LEAST_M = 16  # rows of a tile for matrix units
LEVELS = 3  # groups of parts, groups of these, …: no row is cut into more than 16**3 parts


class LayerKind(NamedTuple):
    """Layers that share a schedule."""

    shape: LayerShape
    block_size: int  # tokens
    # distance of pages, in rows of a head's numbers; 0: not a whole number, so that no descriptor
    # of tiles fits
    page_rows: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum sizes, from `prepare`, and the device."""

    rows: int
    tokens: int
    length: int  # tokens of a row
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: torch.device
    processors: int
    tilings: Tilings

    def blocks(self, block_size: int) -> int:
        """Return the blocks of a row."""
        return -(-self.length // block_size)

    def shape_of(self, kind: LayerKind) -> Shape:
        """Return the properties of a step that determine tilings."""
        return Shape.of(
            kind.shape, self.dtype, self.cache_dtype, kind.block_size, in_tiles=kind.page_rows > 0
        )

    @property
    def on_matrix_units(self) -> bool:
        """Return True if matrix units multiply q, k and v: they would round float32."""
        return self.tilings.matrix_units and self.dtype != torch.float32

    def tile_rows(self, rows: int) -> int:
        """Return the rows of a tile that holds `rows`: a power of two that the device multiplies."""
        return max(LEAST_M if self.on_matrix_units else 1, power_of_two(rows))


class GroupBuffers:
    """Block tables and slots of a cache group, for each page of its blocks that a layer uses. Each
    page's begin at aligned addresses, for which kernels are compiled."""

    def __init__(self, limits: Limits, caches: Sequence[LayerCache]) -> None:
        block_size = caches[0].block_size
        pages = 1 + max(cache.page for cache in caches)
        waste_slot = (len(caches[0].memory[0]) - 1) * block_size
        rows, tokens = (
            size if pages == 1 else -(-size // 4) * 4 for size in (limits.rows, limits.tokens)
        )
        self.tables = torch.zeros(
            (pages, rows, limits.blocks(block_size)), dtype=torch.int32, device=limits.device
        )
        self.slots = torch.full(
            (pages, tokens), waste_slot, dtype=torch.int64, device=limits.device
        )

    def fill(self, table: torch.Tensor, slots: torch.Tensor) -> None:
        """table [pages_per_block, rows, max_blocks], slots [pages_per_block, tokens]."""
        pages = len(self.tables)
        rows = table.shape[1]
        width = min(table.shape[2], self.tables.shape[2])
        self.tables[:, :rows, :width].copy_(table[:pages, :, :width])
        self.slots[:, : slots.shape[1]].copy_(slots[:pages])


class StepBuffers:
    """Inputs of a step, and a schedule for each kind of layer. `caches`: of all layers."""

    def __init__(
        self, limits: Limits, kinds: Iterable[LayerKind], caches: Sequence[LayerCache]
    ) -> None:
        self.limits = limits
        by_group = {
            cache.group: [other for other in caches if other.group == cache.group]
            for cache in caches
        }
        self._groups = {group: GroupBuffers(limits, members) for group, members in by_group.items()}
        places = {(cache.group, cache.page) for cache in caches}
        self.tables = {
            (group, page): self._groups[group].tables[page] for group, page in places
        }  # [rows, blocks] each
        self.slots = {
            (group, page): self._groups[group].slots[page] for group, page in places
        }  # [tokens] each
        self.schedules = {kind: Schedule(limits, kind) for kind in kinds}

    def fill(self, batch: AttentionBatch) -> None:
        limits = self.limits
        rows = len(batch.kv_lens)
        tokens = batch.slots[0].shape[1]
        if rows > limits.rows or tokens > limits.tokens:
            raise DovetailError(
                f"attention backend 'triton': a step of {rows} rows and {tokens} tokens, but "
                f"prepare() made room for "
                f"{limits.rows} and {limits.tokens}"
            )
        for group, buffers in self._groups.items():
            buffers.fill(batch.block_tables[group], batch.slots[group])
        step_rows = StepRows.of(
            batch.host_query_lens[: batch.num_rows],
            batch.host_kv_lens[: batch.num_rows],
            batch.host_both_ways,
        )
        for schedule in self.schedules.values():
            schedule.fill(step_rows, batch)


@dataclass(frozen=True, slots=True)
class TileParts:
    """Results of the parts of split tiles, kept until one program merges them."""

    values: torch.Tensor  # [slots, kv_heads, queries, head_size] float32
    lse: torch.Tensor  # [slots, kv_heads, queries] float32, base 2
    arrived: torch.Tensor  # [slots, kv_heads, 2] int32: parts of each half that are done

    @classmethod
    def room(
        cls, slots: int, kv_heads: int, queries: int, head_size: int, device: torch.device
    ) -> TileParts:
        values = torch.empty(
            (slots, kv_heads, queries, head_size), dtype=torch.float32, device=device
        )
        lse = torch.empty((slots, kv_heads, queries), dtype=torch.float32, device=device)
        return cls(values, lse, torch.zeros((slots, kv_heads, 2), dtype=torch.int32, device=device))


class Schedule:
    """The work of each program in the layers of one kind, on the device; and how many programs that
    takes, on the host."""

    def __init__(self, limits: Limits, kind: LayerKind) -> None:
        self.limits = limits
        self.kind = kind
        self.shape = kind.shape
        shape = kind.shape
        tuned = limits.shape_of(kind)
        self.decode_tiling, self.prefill_tiling = (
            limits.tilings.decode(tuned),
            limits.tilings.prefill(tuned),
        )
        self.tables = DecodeTables(
            max(1, limits.processors * self.decode_tiling.programs // shape.kv_heads), limits.rows
        )
        slots = self.tables.slots + PREFIX_PARTS * limits.rows
        tiling = self.prefill_tiling
        most_parts = max(1, limits.processors // shape.kv_heads)
        self._split = Split(tiling.keys, most_parts) if tiling.loads_apart else None
        tiles = self._most_tiles(limits.rows, limits.tokens)
        device = limits.device
        self._mirror = Mirror(
            [np.zeros(numbers, np.int32) for numbers in (self.tables.size, tiles * TILE_NUMBERS)],
            device,
        )
        self.decode, self.tiles = self._mirror.tensors
        self.bounds = self.decode[self.tables.bounds_at :]
        self.rows = self.decode[self.tables.rows_at :]
        self.segments = self.decode[self.tables.segments_at :]
        self.tile_parts = TileParts.room(
            most_parts if self._split else 0,
            shape.kv_heads,
            tiling.queries,
            shape.head_size,
            device,
        )
        self.partial = torch.empty(
            (slots, shape.heads, shape.head_size), dtype=torch.float32, device=device
        )
        self.partial_lse = torch.empty((slots, shape.heads), dtype=torch.float32, device=device)
        self.arrived = torch.zeros(
            (LEVELS, self.tables.slots, shape.kv_heads), dtype=torch.int32, device=device
        )
        self.decodes = 0  # rows of one query, padding included
        self.prefix = Prefix()
        # the step, or another replay of its graph, attends to a shared prefix
        self.may_share = False
        self.mixed_graph = False  # launches must serve any step with the same number of tokens
        # programs of prefills a kv head; in a mixed graph some have nothing to do
        self.num_tiles = 0
        self.zero_from: int | None = None  # padding tokens that no kernel zeroes

    @property
    def prefix_queries(self) -> int:
        """Return the queries of a tile that attends to a shared prefix."""
        return (
            (32 if self.shape.latent or self.shape.padded_size > 256 else 64)
            if self.limits.on_matrix_units
            else 16
        )

    def fill(self, rows: StepRows, batch: AttentionBatch) -> None:
        if not self.shape.both_ways:
            rows = rows.causal
        single = rows.queries == 1
        only_decodes = bool(single.all())
        decodes = rows if only_decodes else rows.where(single)
        tokens = batch.slots[0].shape[1]
        padding = tokens - batch.num_tokens
        self.mixed_graph = batch.mixed_graph
        if self.mixed_graph:
            self.decodes = min(self.limits.rows, tokens)
        else:
            self.decodes = len(decodes.index) + (padding if only_decodes else 0)
        zeroed = padding if only_decodes or self.mixed_graph else 0  # by the kernel of decodes
        self.zero_from = batch.num_tokens if padding > zeroed else None
        self.may_share = batch.shared_prefix_blocks > 0 and self.shape.window is None
        self.prefix = self._prefix(decodes, batch)
        of_decodes, of_tiles = self._mirror.arrays
        used = 0
        if self.decodes:
            step = self.decode_tiling.keys
            filled = self.tables.fill(
                decodes, self.shape.window, step, self.prefix, zeroed, batch.num_tokens
            )
            used = len(filled)
            of_decodes[:used] = filled
        self.num_tiles = (
            0
            if only_decodes and not self.mixed_graph
            else self._fill_tiles(of_tiles, rows.where(~single), tokens, batch)
        )
        if self.num_tiles:
            self._mirror.send(1, self.num_tiles * TILE_NUMBERS)
        elif used:
            self._mirror.send(0, used)

    def _fill_tiles(
        self, records: Int32, prefills: StepRows, tokens: int, batch: AttentionBatch
    ) -> int:
        """Write the tiles on the host. Mixed graphs get empty ones, up to the maximum for a step of
        this many tokens (two queries each)."""
        split = self._split
        if split is not None and batch.fixed_shapes:
            # So many rows may be in such a step, padding included.
            rows = -(-tokens // max(1, int(batch.host_query_lens.max(initial=1))))
            split = replace(split, of_row=split.most // rows)
        tiles = prefill_tiles(prefills, self.shape.group, self.prefill_tiling.queries, split)
        count = (
            self._most_tiles(min(self.limits.rows, tokens // 2), tokens)
            if self.mixed_graph
            else len(tiles)
        )
        records[: tiles.size] = tiles.reshape(-1)
        records[tiles.size : count * TILE_NUMBERS] = 0
        return count

    def _most_tiles(self, rows: int, tokens: int) -> int:
        return most_prefill_tiles(
            rows, tokens, self.shape.group, self.prefill_tiling.queries, self._split
        )

    def _prefix(self, decodes: StepRows, batch: AttentionBatch) -> Prefix:
        """The blocks that all rows share; of each row something is left to read by itself."""
        rows = len(decodes.index)
        if not self.may_share or rows < 2:
            return Prefix()
        step = self.decode_tiling.keys
        tokens = (
            min(batch.shared_prefix_blocks * self.kind.block_size, int(decodes.lens.min()) - 1)
            // step
            * step
        )
        if not tokens:
            return Prefix()
        tiles = self.shape.kv_heads * -(-rows * self.shape.group // self.prefix_queries)
        parts = max(1, min(PREFIX_PARTS, self.limits.processors * 2 // tiles, tokens // step))
        steps = -(-tokens // step // parts)
        return Prefix(tokens, -(-(tokens // step) // steps))  # so that no part is empty
