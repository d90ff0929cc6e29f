"""Attention backend `flash_attn`: kernels of FlashAttention's packages (`flash_library.py`) over a paged cache.

A step's leading rows of one token are decodes, which split long contexts over the GPU; all rows after them go through the ragged call, decodes
among them too: the core lists running requests first, so that there are few. A CUDA graph may be captured of a step of decodes alone, and
replayed after any `plan` of as many (padded) rows of that kind.

      cache of a layer    [2, num_blocks + 1, kv_heads, block_size, head_size]; the last block is waste: where padding tokens are written

Heads lie outside of a block's tokens, though the packages speak of [block_size, kv_heads]: so what one of their programs reads is in one piece, and
FlashAttention 2 reads it some 2 % quicker.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from pydantic import BaseModel

from dovetail.api.attention import AttentionBackend, AttentionBatch, AttentionCapabilities, AttentionContext, AttentionLayer, FusedCache, LayerSpec
from dovetail.errors import DovetailError
from dovetail_attention.flash_library import PAGE, Paged, Ragged, find_library, reason_against


class FlashAttention(AttentionBackend):
    """Creates layers, and owns their memory and the buffers of a step."""

    capabilities = AttentionCapabilities(
        devices=("cuda",), dtypes=("float16", "bfloat16"), head_sizes=tuple(range(8, 257, 8)), block_size_multiple=PAGE, cuda_graph="decode"
    )

    def __init__(self, options: BaseModel, context: AttentionContext) -> None:
        super().__init__(options, context)
        self.device = torch.device(context.device)
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        self.library = find_library(self.device)
        self.step: FlashStep | None = None
        self._layers: list[FlashLayer] = []
        self._waste_slot = 0

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
        tried = (reason_against(library, device, getattr(torch, context.dtype), size) for size in sizes)
        return [reason for reason in tried if reason is not None]

    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        layer = FlashLayer(spec, self)
        self._layers.append(layer)
        return layer

    def bytes_per_block(self, spec: LayerSpec) -> int:
        return 2 * self.context.block_size * spec.kv_heads * spec.head_size * self.dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        self._waste_slot = num_blocks * self.context.block_size
        for layer in self._layers:
            layer.allocate(num_blocks)

    def prepare(self, max_rows: int, max_tokens: int, max_len: int) -> None:
        self.step = FlashStep(max_rows, max_tokens, -(-max_len // self.context.block_size), self.device)

    def plan(self, batch: AttentionBatch) -> None:
        self.planned.fill(batch, self._waste_slot)

    @property
    def planned(self) -> FlashStep:
        if self.step is None:
            raise DovetailError("attention backend 'flash_attn': plan() was called before allocate() and prepare()")
        return self.step

    def copy_blocks(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        for layer in self._layers:
            layer.copy_blocks(src, dst)


class FlashStep:
    """Inputs of a step that all layers read: buffers with fixed addresses, and on the host the number of rows of each call."""

    def __init__(self, max_rows: int, max_tokens: int, max_blocks: int, device: torch.device) -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.table, self.lens = zeros(max_rows, max_blocks), zeros(max_rows)
        self.slots = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._query_starts, self._kv_starts = zeros(max_rows + 1), zeros(max_rows + 1)
        self.decodes = 0  # rows, and tokens: the first of the step
        self.num_tokens = 0  # computed by any call
        self.ragged: Ragged | None = None  # the rows after the decodes
        self.ragged_rows = slice(0)

    def fill(self, batch: AttentionBatch, waste_slot: int) -> None:
        rows, tokens = len(batch.kv_lens), len(batch.slots)
        if rows > len(self.lens) or tokens > len(self.slots):
            raise DovetailError(
                f"attention backend 'flash_attn': a step of {rows} rows and {tokens} tokens, but prepare() made room for "
                f"{len(self.lens)} and {len(self.slots)}"
            )
        width = min(batch.block_table.shape[1], self.table.shape[1])
        self.table[:rows, :width].copy_(batch.block_table[:, :width])
        self.lens[:rows].copy_(batch.kv_lens)
        self.lens[batch.num_rows : rows] = 0  # so that no kernel reads the table of a padding row
        self.slots[: batch.num_tokens].copy_(batch.slots[: batch.num_tokens])
        self.slots[batch.num_tokens : tokens] = waste_slot
        longer = np.flatnonzero(batch.host_query_lens[: batch.num_rows] != 1)
        self.ragged = None
        if not len(longer):
            self.decodes = self.num_tokens = min(rows, tokens)  # including padding rows: each size has one shape
            return
        self.decodes, self.num_tokens = int(longer[0]), batch.num_tokens
        self.ragged_rows = slice(self.decodes, batch.num_rows)
        self.ragged = self._ragged(batch)

    def _ragged(self, batch: AttentionBatch) -> Ragged:
        count = batch.num_rows - self.decodes
        query_starts, kv_starts = self._query_starts[: count + 1], self._kv_starts[: count + 1]
        torch.sub(batch.query_starts[self.decodes : batch.num_rows + 1], self.decodes, out=query_starts)
        torch.cumsum(self.lens[self.ragged_rows], 0, dtype=torch.int32, out=kv_starts[1:])
        query_lens, kv_lens = (lens[self.ragged_rows] for lens in (batch.host_query_lens, batch.host_kv_lens))
        return Ragged(query_starts, kv_starts, int(query_lens.max()), int(kv_lens.max()))


class FlashLayer(AttentionLayer):
    """Cache of one layer."""

    def __init__(self, spec: LayerSpec, backend: FlashAttention) -> None:
        self.spec, self._backend = spec, backend
        self._kv = self._k = self._v = torch.empty(0)

    def allocate(self, num_blocks: int) -> None:
        self._kv = self._k = self._v = torch.empty(0)  # release the old memory before allocating new
        shape = (2, num_blocks + 1, self.spec.kv_heads, self._backend.context.block_size, self.spec.head_size)
        # FlashAttention 3 reads unwritten slots with a weight of 0: their content must not be NaN or infinite.
        self._kv = torch.zeros(shape, dtype=self._backend.dtype, device=self._backend.device)
        self._k, self._v = self._kv.transpose(2, 3)  # [num_blocks + 1, block_size, kv_heads, head_size] each

    def cache_for_fused_write(self) -> FusedCache:
        return FusedCache(self._k, self._v, self._backend.planned.slots)

    def write(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        slots, block_size = self._backend.planned.slots[: len(k)], self._backend.context.block_size
        places = slots // block_size, slots % block_size
        for cache, new in zip((self._k, self._v), (k, v), strict=True):
            if new is not None:
                cache.index_put_(places, new)

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        step, library, spec = self._backend.planned, self._backend.library, self.spec
        parts = []
        if step.decodes:
            parts.append(library.decode(q[: step.decodes], self._rows(step, slice(step.decodes)), spec.scale, spec.window))
        if step.ragged is not None:
            ragged = q[step.decodes : step.num_tokens]
            parts.append(library.prefill(ragged, self._rows(step, step.ragged_rows), step.ragged, spec.scale, spec.window))
        if step.num_tokens < len(q):
            parts.append(q.new_zeros((len(q) - step.num_tokens, *q.shape[1:])))
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty_like(q)

    def _rows(self, step: FlashStep, rows: slice) -> Paged:
        return Paged(self._k, self._v, step.table[rows], step.lens[rows])

    def copy_blocks(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        for i in range(len(src)):
            self._kv.index_copy_(1, dst[i : i + 1], self._kv.index_select(1, src[i : i + 1]))
