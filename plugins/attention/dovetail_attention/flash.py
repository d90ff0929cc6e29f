"""Attention backend `flash_attn`: kernels of FlashAttention's packages (`flash_library.py`) over a
paged cache.

A step's leading rows of one token are decodes, which split long contexts over the GPU; all rows
after them go through the ragged call, decodes among them too: the core lists running requests
first, so that there are few. A CUDA graph may be captured of a step of decodes alone, and replayed
after any `plan` of as many (padded) rows of that kind.

      a page of a layer    [kv_heads, block_size, head_size], K and V apart

Heads lie outside of a block's tokens, though the packages speak of [block_size, kv_heads]: so what
one of their programs reads is in one piece, and FlashAttention 2 reads it some 2 % quicker.

A tile of theirs may begin before a row's window, but in the same page, since sizes of tiles divide
`PAGE`: pages that no query sees aren't read. In the pages that are, FlashAttention 3 reads all
slots of a tile, unwritten ones with the weight 0: none may hold NaN, and so a pool is zeroed at
first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from pydantic import BaseModel

from dovetail.api.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionCapabilities,
    AttentionContext,
    AttentionLayer,
    FusedCache,
    LayerCache,
    LayerSpec,
)
from dovetail.api.graphs import GraphSupport
from dovetail.errors import DovetailError
from dovetail_attention.flash_library import PAGE, Paged, Ragged, find_library, reason_against
from dovetail_attention.memory import cache_of, pages_of, tensor_bytes


class FlashAttention(AttentionBackend):
    """Creates layers, and owns the buffers of a step."""

    capabilities = AttentionCapabilities(
        devices=("cuda",),
        dtypes=("float16", "bfloat16"),
        head_sizes=tuple(range(8, 257, 8)),
        block_size_multiple=PAGE,
        cuda_graph=GraphSupport.DECODE,
        groups=True,
        window=True,
        causal=True,
    )

    def __init__(self, options: BaseModel, context: AttentionContext) -> None:
        super().__init__(options, context)
        self.device = torch.device(context.device)
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        self.library = find_library(self.device)
        self.step: FlashStep | None = None
        self._layers: list[FlashLayer] = []

    @classmethod
    def reasons_against(cls, context: AttentionContext, layers: Sequence[LayerSpec]) -> list[str]:
        reasons = super().reasons_against(context, layers)
        if reasons:
            return reasons
        device = torch.device(context.device)
        try:
            library = find_library(device)
        except ImportError as error:
            return [str(error)]
        sizes = sorted({layer.head_size for layer in layers})
        tried = (
            reason_against(library, device, getattr(torch, context.dtype), size) for size in sizes
        )
        return [reason for reason in tried if reason is not None]

    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        layer = FlashLayer(spec, self)
        self._layers.append(layer)
        return layer

    def tensor_bytes(self, spec: LayerSpec, block_size: int) -> tuple[int, ...]:
        return tensor_bytes(spec, block_size, self.dtype)

    def prepare(self, max_rows: int, max_tokens: int, max_len: int) -> None:
        self.step = FlashStep(
            max_rows, max_tokens, max_len, [cache_of(layer) for layer in self._layers], self.device
        )

    def plan(self, batch: AttentionBatch) -> None:
        self.planned.fill(batch)

    @property
    def planned(self) -> FlashStep:
        if self.step is None:
            raise DovetailError(
                "attention backend 'flash_attn': plan() was called before prepare()"
            )
        return self.step


class FlashGroup:
    """Block tables and slots of a cache group, for each page of its blocks that a layer uses."""

    def __init__(
        self,
        max_rows: int,
        max_tokens: int,
        max_len: int,
        caches: Sequence[LayerCache],
        device: torch.device,
    ) -> None:
        block_size = caches[0].block_size
        pages = 1 + max(cache.page for cache in caches)
        waste_slot = (len(caches[0].memory[0]) - 1) * block_size
        self.tables = torch.zeros(
            (pages, max_rows, -(-max_len // block_size)), dtype=torch.int32, device=device
        )
        self.slots = torch.full((pages, max_tokens), waste_slot, dtype=torch.int64, device=device)

    def fill(self, table: torch.Tensor, slots: torch.Tensor) -> None:
        """table [pages_per_block, rows, max_blocks], slots [pages_per_block, tokens]."""
        pages = len(self.tables)
        rows = table.shape[1]
        width = min(table.shape[2], self.tables.shape[2])
        self.tables[:, :rows, :width].copy_(table[:pages, :, :width])
        self.slots[:, : slots.shape[1]].copy_(slots[:pages])


class FlashStep:
    """Inputs of a step that all layers read: buffers with fixed addresses, and on the host the
    number of rows of each call."""

    def __init__(
        self,
        max_rows: int,
        max_tokens: int,
        max_len: int,
        caches: Sequence[LayerCache],
        device: torch.device,
    ) -> None:
        """`caches`: of all layers."""

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        by_group = {
            cache.group: [other for other in caches if other.group == cache.group]
            for cache in caches
        }
        self.groups = {
            group: FlashGroup(max_rows, max_tokens, max_len, members, device)
            for group, members in by_group.items()
        }
        self.lens = zeros(max_rows)
        self._max_tokens = max_tokens
        self._query_starts, self._kv_starts = zeros(max_rows + 1), zeros(max_rows + 1)
        self.decodes = 0  # rows, and tokens: the first of the step
        self.num_tokens = 0  # computed by any call
        self.ragged: Ragged | None = None  # the rows after the decodes
        self.ragged_rows = slice(0)

    def fill(self, batch: AttentionBatch) -> None:
        rows = len(batch.kv_lens)
        tokens = batch.slots[0].shape[1]
        if rows > len(self.lens) or tokens > self._max_tokens:
            raise DovetailError(
                f"attention backend 'flash_attn': a step of {rows} rows and {tokens} tokens, but "
                f"prepare() made room for "
                f"{len(self.lens)} and {self._max_tokens}"
            )
        for index, group in self.groups.items():
            group.fill(batch.block_tables[index], batch.slots[index])
        self.lens[:rows].copy_(batch.kv_lens)
        self.lens[batch.num_rows : rows] = 0  # so that no kernel reads the table of a padding row
        longer = np.flatnonzero(batch.host_query_lens[: batch.num_rows] != 1)
        self.ragged = None
        if not len(longer):
            # including padding rows: each size has one shape
            self.decodes = self.num_tokens = min(rows, tokens)
            return
        self.decodes = int(longer[0])
        self.num_tokens = batch.num_tokens
        self.ragged_rows = slice(self.decodes, batch.num_rows)
        self.ragged = self._ragged(batch)

    def _ragged(self, batch: AttentionBatch) -> Ragged:
        count = batch.num_rows - self.decodes
        query_starts = self._query_starts[: count + 1]
        kv_starts = self._kv_starts[: count + 1]
        torch.sub(
            batch.query_starts[self.decodes : batch.num_rows + 1], self.decodes, out=query_starts
        )
        torch.cumsum(self.lens[self.ragged_rows], 0, dtype=torch.int32, out=kv_starts[1:])
        query_lens, kv_lens = (
            lens[self.ragged_rows] for lens in (batch.host_query_lens, batch.host_kv_lens)
        )
        return Ragged(query_starts, kv_starts, int(query_lens.max()), int(kv_lens.max()))


class FlashLayer(AttentionLayer):
    """Cache of one layer."""

    def __init__(self, spec: LayerSpec, backend: FlashAttention) -> None:
        self.spec = spec
        self._backend = backend
        self._k = self._v = torch.empty(0)

    def bind(self, cache: LayerCache) -> None:
        self.cache = cache
        shape = self.spec.kv_heads, cache.block_size, self.spec.head_size
        own = pages_of(cache, self.spec, self._backend.dtype, shape)
        # [num_pages + 1, block_size, kv_heads, head_size] each
        self._k, self._v = (of_pages.transpose(1, 2) for of_pages in own)

    def cache_for_fused_write(self) -> FusedCache:
        return FusedCache(self._k, self._v, self._slots)

    @property
    def _slots(self) -> torch.Tensor:
        cache = cache_of(self)
        return self._backend.planned.groups[cache.group].slots[cache.page]

    def write(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        slots = self._slots[: len(k)]
        block_size = self._k.shape[1]
        places = slots // block_size, slots % block_size
        for cache, new in zip((self._k, self._v), (k, v), strict=True):
            if new is not None:
                cache.index_put_(places, new)

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        step = self._backend.planned
        library = self._backend.library
        spec = self.spec
        parts = []
        if step.decodes:
            parts.append(
                library.decode(
                    q[: step.decodes],
                    self._rows(step, slice(step.decodes)),
                    spec.scale,
                    spec.window,
                )
            )
        if step.ragged is not None:
            ragged = q[step.decodes : step.num_tokens]
            parts.append(
                library.prefill(
                    ragged, self._rows(step, step.ragged_rows), step.ragged, spec.scale, spec.window
                )
            )
        if step.num_tokens < len(q):
            parts.append(q.new_zeros((len(q) - step.num_tokens, *q.shape[1:])))
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty_like(q)

    def _rows(self, step: FlashStep, rows: slice) -> Paged:
        cache = cache_of(self)
        return Paged(
            self._k, self._v, step.groups[cache.group].tables[cache.page, rows], step.lens[rows]
        )
