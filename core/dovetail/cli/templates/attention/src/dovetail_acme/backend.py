"""The attention backend: it owns the paged K and V cache of each layer, writes to it, and attends over it one row at a time."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from dovetail.api.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionCapabilities,
    AttentionContext,
    AttentionLayer,
    LayerSpec,
)
from pydantic import BaseModel


class AcmeRow(NamedTuple):
    """One sequence in a step."""

    queries: slice  # positions of its tokens in the batch
    slots: torch.Tensor  # [tokens it can see] slots of their K and V
    ahead: torch.Tensor  # [queries, tokens it can see] number of positions from a token to the query


class AcmeAttention(AttentionBackend):
    """The backend: it makes the layers, and once a step computes the slots of each row's K and V."""

    capabilities = AttentionCapabilities()

    def __init__(self, options: BaseModel, context: AttentionContext) -> None:
        super().__init__(options, context)
        self.device, self.dtype = torch.device(context.device), getattr(torch, context.dtype)
        self.layers: list[Layer] = []
        self.rows: list[AcmeRow] = []  # of this step
        self.slots = torch.empty(0, dtype=torch.int64, device=self.device)  # slots of this step's tokens; -1: the spare one

    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        self.layers.append(Layer(spec, self))
        return self.layers[-1]

    def bytes_per_block(self, spec: LayerSpec) -> int:
        size: int = 2 * self.context.block_size * spec.kv_heads * spec.head_size * self.dtype.itemsize
        return size

    def allocate(self, num_blocks: int) -> None:
        for layer in self.layers:
            layer.allocate(num_blocks * self.context.block_size)

    def prepare(self, max_rows: int, max_tokens: int, max_len: int) -> None:
        """Do nothing: `plan` makes all that a step needs."""

    def plan(self, batch: AttentionBatch) -> None:
        self.slots, self.rows = batch.slots, []
        start, size = 0, self.context.block_size
        for row, (num_queries, length) in enumerate(zip(batch.host_query_lens.tolist(), batch.host_kv_lens.tolist(), strict=True)):
            seen = torch.arange(length, device=self.device)
            slots = batch.block_table[row, seen // size].long() * size + seen % size
            ahead = seen[length - num_queries :, None] - seen
            self.rows.append(AcmeRow(slice(start, start + num_queries), slots, ahead))
            start += num_queries

    def copy_blocks(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        for source, target in zip(src.tolist(), dst.tolist(), strict=True):
            for layer in self.layers:
                layer.copy_block(source, target)


class Layer(AttentionLayer):
    """One layer and its cache: `num_slots` slots for tokens, and a spare one for padding tokens."""

    def __init__(self, spec: LayerSpec, backend: AcmeAttention) -> None:
        self.spec, self.backend = spec, backend
        self.k = self.v = torch.empty(0)

    def allocate(self, num_slots: int) -> None:
        shape = (num_slots + 1, self.spec.kv_heads, self.spec.head_size)
        self.k, self.v = (torch.empty(shape, dtype=self.backend.dtype, device=self.backend.device) for _ in "kv")

    def write(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        self.k[self.backend.slots] = k  # slot -1 is the last, spare one
        if v is not None:  # None only for a backend that declares `v_in_k`
            self.v[self.backend.slots] = v

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(q)  # [tokens, heads, head_size]
        for row in self.backend.rows:
            visible = row.ahead >= 0
            if self.spec.window is not None:
                visible &= row.ahead < self.spec.window
            queries, k, v = (x.transpose(0, 1)[None] for x in (q[row.queries], self.k[row.slots], self.v[row.slots]))
            mixed = F.scaled_dot_product_attention(
                queries, k, v, attn_mask=visible, scale=self.spec.scale, enable_gqa=True
            )  # [1, heads, queries, head_size]
            out[row.queries] = mixed[0].transpose(0, 1)
        return out

    def copy_block(self, source: int, target: int) -> None:
        size = self.backend.context.block_size
        for cache in (self.k, self.v):
            cache[target * size : (target + 1) * size] = cache[source * size : (source + 1) * size]
