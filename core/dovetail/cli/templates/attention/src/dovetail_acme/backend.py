"""The attention backend: it writes to the paged K and V cache of each layer, and attends over it one row at a time."""

import torch
import torch.nn.functional as F
from dovetail.api.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionCapabilities,
    AttentionContext,
    AttentionLayer,
    LayerCache,
    LayerSpec,
)
from pydantic import BaseModel


class AcmeAttention(AttentionBackend):
    """The backend: it makes the layers, and keeps the inputs of a step for them."""

    capabilities = AttentionCapabilities(groups=True, window=True, causal=True)
    batch: AttentionBatch  # of this step

    def __init__(self, options: BaseModel, context: AttentionContext) -> None:
        super().__init__(options, context)
        self.device, self.dtype = torch.device(context.device), getattr(torch, context.dtype)

    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        return Layer(spec, self)

    def tensor_bytes(self, spec: LayerSpec, block_size: int) -> tuple[int, ...]:
        size: int = block_size * spec.kv_heads * spec.head_size * self.dtype.itemsize
        return size, size  # K and V

    def prepare(self, max_rows: int, max_tokens: int, max_len: int) -> None:
        """Do nothing: a step needs no buffers."""

    def plan(self, batch: AttentionBatch) -> None:
        self.batch = batch


class Layer(AttentionLayer):
    """One layer, with views of the memory of its cache."""

    def __init__(self, spec: LayerSpec, backend: AcmeAttention) -> None:
        self.spec, self.backend = spec, backend

    def bind(self, cache: LayerCache) -> None:
        self.cache = cache
        self.group, self.page, self.block_size = cache.group, cache.page, cache.block_size
        shape = (-1, cache.block_size, self.spec.kv_heads, self.spec.head_size)  # of K and V; other layers may need longer pages
        numbers = cache.block_size * self.spec.kv_heads * self.spec.head_size
        self.k, self.v = (memory.view(self.backend.dtype)[:, :numbers].view(shape) for memory in cache.memory)

    def write(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        slots = self.backend.batch.slots[self.group][self.page]
        page, offset = slots // self.block_size, slots % self.block_size
        self.k[page, offset] = k
        if v is not None:  # None only for a backend that declares `v_in_k`
            self.v[page, offset] = v

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        batch, window, start = self.backend.batch, self.spec.window, 0
        out = torch.zeros_like(q)  # [tokens, heads, head_size]
        table = batch.block_tables[self.group][self.page]  # [rows, max_blocks]
        for row, (num_queries, length) in enumerate(zip(batch.host_query_lens.tolist(), batch.host_kv_lens.tolist(), strict=True)):
            position = torch.arange(length - num_queries, length, device=self.backend.device)[:, None]
            first = 0 if window is None else max(0, length - num_queries - window + 1)  # the blocks before it may be anything
            seen = torch.arange(first, length, device=self.backend.device)
            visible = seen <= position
            if window is not None:
                visible &= seen > position - window
            page, offset = table[row, seen // self.block_size].long(), seen % self.block_size
            queries = slice(start, start + num_queries)
            qs, k, v = (x.transpose(0, 1)[None] for x in (q[queries], self.k[page, offset], self.v[page, offset]))
            mixed = F.scaled_dot_product_attention(
                qs, k, v, attn_mask=visible, scale=self.spec.scale, enable_gqa=True
            )  # [1, heads, queries, head_size]
            out[queries] = mixed[0].transpose(0, 1)
            start += num_queries
        return out
