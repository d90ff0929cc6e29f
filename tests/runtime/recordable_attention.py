"""Attention backend for tests that computes every step with the same operations, so that a recorded
step can be replayed with other inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dovetail.api.attention import AttentionBatch, AttentionLayer, LayerSpec
from dovetail.api.graphs import GraphSupport
from dovetail_attention.sdpa import TorchAttention, TorchLayer
from dovetail_attention.units import Units


class RecordableAttention(TorchAttention):
    """Each token looks at `max_len` places of its row, those that it doesn't see masked. All that a
    step brings is copied by `plan` to tensors at fixed addresses, as backends with graphs do."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.planned: list[AttentionBatch] = []

    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        layer = RecordableLayer(spec, self)
        self._layers.append(layer)
        return layer

    def prepare(self, max_rows: int, max_tokens: int, max_len: int) -> None:
        super().prepare(max_rows, max_tokens, max_len)
        tokens = max(max_rows, max_tokens)
        units = {layer.units for layer in self._layers if layer.cache is not None}
        self._slots = {each: torch.zeros(tokens, dtype=torch.int64) for each in units}
        self.entries = {each: torch.zeros((tokens, max_len), dtype=torch.int64) for each in units}
        self.positions = torch.zeros(tokens, dtype=torch.int64)

    def plan(self, batch: AttentionBatch) -> None:
        self.planned.append(batch)
        lens = torch.from_numpy(batch.host_query_lens).long()
        rows = torch.arange(batch.num_rows).repeat_interleave(lens)
        firsts = torch.from_numpy(batch.host_kv_lens).long() - lens
        starts = lens.cumsum(0) - lens
        self.positions[batch.num_tokens :] = 0
        self.positions[: len(rows)] = firsts[rows] + torch.arange(len(rows)) - starts[rows]
        for units, entries in self.entries.items():
            slots = units.of_slots(batch.slots[units.group][units.page])
            self._slots[units][: len(slots)] = slots
            entries[: len(rows)] = self._entries(units, batch)[rows]
            entries[len(rows) :] = 0
        self.slots = {
            units: kept[: batch.slots[units.group].shape[1]] for units, kept in self._slots.items()
        }

    def _entries(self, units: Units, batch: AttentionBatch) -> torch.Tensor:
        """Return the cache's entries [rows, max_len] of all places of the rows."""
        table = batch.block_tables[units.group][units.page].long()
        places = torch.arange(self.entries[units].shape[1])
        blocks = (places // units.block_size).clamp(max=table.shape[1] - 1)
        slots = table[:, blocks] * units.block_size + places % units.block_size
        return units.of_slots(slots)


class SharingAttention(RecordableAttention):
    """Says that it could read a shared prefix once."""

    capabilities = replace(TorchAttention.capabilities, shared_prefix=True)


class MixedAttention(SharingAttention):
    """Says that its part of any step can be recorded."""

    capabilities = replace(SharingAttention.capabilities, cuda_graph=GraphSupport.ALL)


class RecordableLayer(TorchLayer):
    """A layer of `RecordableAttention`."""

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        backend, spec = self._backend, self.spec
        assert isinstance(backend, RecordableAttention)
        entries = backend.entries[self.units][: len(q)]
        positions = backend.positions[: len(q), None]
        places = torch.arange(entries.shape[1])
        sees = places <= positions
        if spec.window is not None:
            sees &= places > positions - spec.window
        heads = spec.heads // spec.kv_heads
        k = self._k[entries].repeat_interleave(heads, dim=2)
        v = self._v[entries].masked_fill(~sees[..., None, None], 0).repeat_interleave(heads, dim=2)
        scores = torch.einsum("thd,tphd->thp", q, k) * spec.scale
        weights = scores.masked_fill(~sees[:, None], float("-inf")).softmax(dim=-1)
        return torch.einsum("thp,tphd->thd", weights, v)
