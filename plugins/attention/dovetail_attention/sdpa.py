"""Attention backend `torch`: PyTorch's own operations over a paged cache.

It runs wherever torch does, with every head size, window and block size, and is the default on the CPU. `plan` sorts a ragged batch into parts,
once for all layers: *pieces* (`pieces.py`: gather K and V through the block table, then a scaled dot product) and *bags* (`bags.py`: many decodes
on a CPU, nothing gathered).

An FP8 cache is converted to the activations' dtype piece by piece: the oracle of kernels that read FP8.

      cache of a layer    [num_blocks * block_size + 2, kv_heads, head_size], K and V apart; V may be a part of K
                           slots of the pool ... | null: zeros, for what a gather has to fill up | waste: where padding tokens are written
"""

from __future__ import annotations

import torch
from pydantic import BaseModel

from dovetail.api.attention import AttentionBackend, AttentionBatch, AttentionCapabilities, AttentionContext, AttentionLayer, LayerSpec
from dovetail.errors import DovetailError
from dovetail_attention.bags import Bags
from dovetail_attention.layer_shape import LayerShape, cache_bytes, sinks_of
from dovetail_attention.pieces import Piece, Planner
from dovetail_attention.scaled import CACHE_DTYPES, ONE, as_bytes, stored


class TorchAttention(AttentionBackend):
    """Creates layers, owns their memory, and plans steps for all of them."""

    capabilities = AttentionCapabilities(cache_dtypes=CACHE_DTYPES, sinks=True, softcap=True, v_in_k=True)

    def __init__(self, options: BaseModel, context: AttentionContext) -> None:
        super().__init__(options, context)
        self.device = torch.device(context.device)
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        self.cache_dtype: torch.dtype = getattr(torch, context.cache_dtype or context.dtype)
        self.slots = torch.empty(0, dtype=torch.int64)  # of this step's tokens, padding sent to the waste slot
        self.parts: dict[LayerShape, list[Piece | Bags]] = {}  # of this step
        self.num_tokens = 0  # of this step, without padding
        self._layers: list[TorchLayer] = []
        self._num_slots = 0
        self._planner: Planner | None = None

    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        layer = TorchLayer(spec, self)
        self._layers.append(layer)
        return layer

    def bytes_per_block(self, spec: LayerSpec) -> int:
        return cache_bytes(spec, self.context.block_size, self.cache_dtype)

    def allocate(self, num_blocks: int) -> None:
        self._num_slots = num_blocks * self.context.block_size
        for layer in self._layers:
            layer.allocate(self._num_slots)

    def prepare(self, max_rows: int, max_tokens: int, max_len: int) -> None:
        specs = [layer.spec for layer in self._layers]
        self._planner = Planner.of(specs, self.context.block_size, max_len, self.dtype, self.device)
        self._planner.use_bags &= self.cache_dtype == self.dtype  # they multiply directly with the cache

    def plan(self, batch: AttentionBatch) -> None:
        if self._planner is None:
            raise DovetailError("attention backend 'torch': plan() was called before allocate() and prepare()")
        self.num_tokens = batch.num_tokens
        padded = len(batch.slots) > batch.num_tokens
        self.slots = torch.where(batch.slots < 0, self._num_slots + 1, batch.slots) if padded else batch.slots
        self.parts = self._planner.plan(batch, null_slot=self._num_slots)

    def copy_blocks(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        for pair in _rounds(src.tolist(), dst.tolist()):
            sources, targets = (torch.tensor(ids, device=self.device) for ids in pair)
            for layer in self._layers:
                layer.copy_blocks(sources, targets, self.context.block_size)


class TorchLayer(AttentionLayer):
    """Cache of one layer, and attention over it."""

    def __init__(self, spec: LayerSpec, backend: TorchAttention) -> None:
        self.spec = spec
        self._shape = LayerShape.of(spec)
        self._backend = backend
        self._own: list[torch.Tensor] = []  # K and V; only K if V is in it
        self._k = self._v = torch.empty(0)

    def allocate(self, num_slots: int) -> None:
        """Caches of `num_slots` slots and the two besides. Memory that is never written is never touched: on a CPU it costs nothing yet."""
        self._own.clear()
        self._k = self._v = torch.empty(0)  # release the old memory before allocating new
        shape = (num_slots + 2, self.spec.kv_heads, self.spec.head_size)
        own = [torch.empty(shape, dtype=self._backend.cache_dtype, device=self._backend.device) for _ in range(1 if self.spec.v_in_k else 2)]
        for cache in own:
            cache[num_slots] = 0
        self._own, self._k, self._v = own, own[0], own[-1][..., : self.spec.out_size]

    def write(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        scales = self.kv_scales or ONE
        for cache, values, scale in zip(self._own, (k, v), (scales.k, scales.v), strict=False):
            if values is not None:
                as_bytes(cache).index_copy_(0, self._backend.slots, as_bytes(stored(values, scale, cache.dtype)))

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        out = q.new_empty(*q.shape[:2], self.spec.out_size)
        if self._backend.num_tokens < len(q):
            out[self._backend.num_tokens :] = 0
        if self.kv_scales is not None:
            q = q * self.kv_scales.k  # instead of each K
        sinks = sinks_of(self)
        sinks = None if sinks is None else sinks.detach().float()
        for part in self._backend.parts[self._shape]:
            part.attend(self.spec, self._k, self._v, q, out, sinks)
        if self.kv_scales is not None:
            out *= self.kv_scales.k if self.spec.v_in_k else self.kv_scales.v
        return out

    def copy_blocks(self, src: torch.Tensor, dst: torch.Tensor, block_size: int) -> None:
        """Copy all blocks at once; no block of `dst` may be in `src`."""
        for cache in map(as_bytes, self._own):
            blocks = cache[:-2].view(-1, block_size, *cache.shape[1:])
            blocks.index_copy_(0, dst, blocks.index_select(0, src))


def _rounds(src: list[int], dst: list[int]) -> list[tuple[list[int], list[int]]]:
    """Group sequential copies into rounds that can run in parallel: no block of a round is written twice, or read after being written."""
    rounds: list[tuple[list[int], list[int]]] = []
    written: set[int] = set()
    for source, target in zip(src, dst, strict=True):
        if not rounds or source in written or target in written:
            rounds.append(([], []))
            written = set()
        rounds[-1][0].append(source)
        rounds[-1][1].append(target)
        written.add(target)
    return rounds
