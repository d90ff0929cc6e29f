"""Attention backend `torch`: PyTorch's own operations over a paged cache.

It runs wherever torch does, with every head size, window and block size, and is the default on the
CPU. `plan` sorts a ragged batch into parts, once for all layers: *pieces* (`pieces.py`: gather K
and V through the block table, then a scaled dot product) and *bags* (`bags.py`: many decodes on a
CPU, nothing gathered).

An FP8 cache is converted to the activations' dtype piece by piece: the oracle of kernels that read
FP8.

      a page of a layer    [block_size, kv_heads, head_size], K and V apart; V may be a part of K
"""

from __future__ import annotations

import torch
from pydantic import BaseModel

from dovetail.api.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionCapabilities,
    AttentionContext,
    AttentionLayer,
    LayerCache,
    LayerSpec,
)
from dovetail.errors import DovetailError
from dovetail_attention.bags import Bags
from dovetail_attention.layer_shape import LayerShape, sinks_of
from dovetail_attention.memory import all_bytes, cache_of, rows_of, selects, without_index
from dovetail_attention.pieces import Piece, Planner
from dovetail_attention.scaled import CACHE_DTYPES, ONE, as_bytes, stored
from dovetail_attention.selected import IndexKeys, Selections, kept_by
from dovetail_attention.units import Units


class TorchAttention(AttentionBackend):
    """Creates layers, and plans steps for all of them."""

    capabilities = AttentionCapabilities(
        cache_dtypes=CACHE_DTYPES,
        sinks=True,
        softcap=True,
        v_in_k=True,
        groups=True,
        window=True,
        causal=True,
        both_ways=True,
        indexer=True,
        fixed_shapes=True,
    )

    def __init__(self, options: BaseModel, context: AttentionContext) -> None:
        super().__init__(options, context)
        self.device = torch.device(context.device)
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        self.cache_dtype: torch.dtype = getattr(torch, context.cache_dtype or context.dtype)
        # of this step's tokens, in such units of a cache
        self.slots: dict[Units, torch.Tensor] = {}
        self.parts: dict[tuple[LayerShape, Units], list[Piece | Bags]] = {}  # of this step
        self.num_tokens = 0  # of this step, without padding
        self.selections = Selections()
        self._layers: list[TorchLayer] = []
        self._planner: Planner | None = None

    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        layer = TorchLayer(spec, self)
        self._layers.append(layer)
        return layer

    def tensor_bytes(self, spec: LayerSpec, block_size: int) -> tuple[int, ...]:
        return all_bytes(spec, block_size, self.cache_dtype, self.dtype)

    def prepare(self, max_rows: int, max_tokens: int, max_len: int) -> None:
        kinds = [(layer.spec, layer.units) for layer in self._layers if cache_of(layer)]
        self._planner = Planner.of(kinds, max_len, self.dtype, self.device)
        # they multiply directly with the cache
        self._planner.use_bags &= self.cache_dtype == self.dtype

    def plan(self, batch: AttentionBatch) -> None:
        if self._planner is None:
            raise DovetailError("attention backend 'torch': plan() was called before prepare()")
        self.num_tokens = batch.num_tokens
        self.slots = {
            units: units.of_slots(batch.slots[units.group][units.page])
            for units in {units for _, units in self._planner.kinds}
        }
        self.parts = self._planner.plan(batch)
        self.selections.batch = batch


class TorchLayer(AttentionLayer):
    """Cache of one layer, and attention over it."""

    units: Units  # set by `bind`

    def __init__(self, spec: LayerSpec, backend: TorchAttention) -> None:
        self.spec = spec
        self._shape = LayerShape.of(spec)
        self._backend = backend
        self._own: list[torch.Tensor] = []  # K and V; only K if V is in it
        self._k = self._v = torch.empty(0)
        self._index = IndexKeys(spec, backend.dtype) if selects(spec) else None

    def bind(self, cache: LayerCache) -> None:
        self.cache = cache
        cache, of_index = without_index(cache, self.spec)
        if self._index is not None:
            self._index.bind(of_index)
        rows = rows_of(cache, self.spec, self._backend.cache_dtype)
        self.units = Units.of(cache, rows[0], self.spec)
        self._own = [self.units.view(of_pages, self.spec) for of_pages in rows]
        self._k = self._own[0]
        self._v = self._own[-1][..., : self.spec.out_size]

    def write(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        scales = self.kv_scales or ONE
        slots = self._backend.slots[self.units]
        for cache, values, scale in zip(self._own, (k, v), (scales.k, scales.v), strict=False):
            if values is not None and values.dtype == cache.dtype:
                cache.index_copy_(0, slots, values)
            elif values is not None:
                narrow = stored(values, scale, cache.dtype)
                as_bytes(cache).index_copy_(0, slots, as_bytes(narrow))

    def write_index(self, keys: torch.Tensor) -> None:
        kept_by(self.spec.index, self._index).write(keys, self._backend.selections.batch)

    def select(self, q: torch.Tensor, weights: torch.Tensor) -> None:
        index = kept_by(self.spec.index, self._index)
        assert self.spec.indexer is not None
        self._backend.selections.select(self.spec.indexer, index, q, weights)

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        out = q.new_empty(*q.shape[:2], self._shape.head_size)
        if self._backend.num_tokens < len(q):
            out[self._backend.num_tokens :] = 0
        if self.kv_scales is not None:
            q = q * self.kv_scales.k  # instead of each K
        sinks = sinks_of(self) if self.spec.sinks else None
        sinks = None if sinks is None else sinks.detach().float()
        for part in self._backend.parts[self._shape, self.units]:
            part.attend(self.spec, self._k, self._v, q, out, sinks)
        if self.spec.indexer is not None:
            for piece in self._backend.selections.pieces(self.units, self.spec.head_size, q.dtype):
                piece.attend(self.spec, self._k, self._v, q, out, sinks)
        if self.kv_scales is not None:
            out *= self.kv_scales.k if self.spec.v_in_k else self.kv_scales.v
        return out
