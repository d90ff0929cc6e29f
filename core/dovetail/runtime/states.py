"""Recurrent states of the rows: where each lies in the pool, and the part of a step that concerns them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.state import CHUNK, StateBatch, StateLayer, StateSpec, StateSteps, StateTensor
from dovetail.errors import DovetailError
from dovetail.kv_layout import CachedState, PlannedLayout
from dovetail.runtime.transfer import all_to_device

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


def cached_state(spec: StateSpec, dtype: torch.dtype, state_dtype: torch.dtype) -> CachedState:
    """Return the sizes of a layer's state. `dtype`: of the model; `state_dtype`: of what isn't past inputs."""
    sizes = [(tensor.rows, tensor.row_size * _dtype(tensor, dtype, state_dtype).itemsize) for tensor in spec.tensors]
    return CachedState(spec.index, tuple(sizes))


def _dtype(tensor: StateTensor, dtype: torch.dtype, state_dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.keeps_inputs else state_dtype


class States:
    """Table of the units of all states that a step may use: line i is the live state of row i, line `max_rows` that of padding, and line
    `max_rows` + 1 + i the checkpoint of the i-th row of a step."""

    def __init__(self, planned: PlannedLayout, max_rows: int, dtype: torch.dtype, state_dtype: torch.dtype, device: torch.device) -> None:
        self.steps = StateSteps()
        self.layers: dict[int, StateLayer] = {}
        self.max_rows, self.device = max_rows, device
        self._planned, self._dtype, self._state_dtype = planned, dtype, state_dtype
        self._num_slots = len(planned.slot_bytes)
        self._num_units = max((place.first[-1] + place.units[-1] for place in planned.states.values()), default=0)
        self._units = torch.zeros((2 * max_rows + 1, self._num_units), dtype=torch.int32, device=device)
        self._page_of, self._slot_of = np.divmod(np.arange(self._num_units), self._num_slots)
        self._stride = 0  # pages, with the waste page

    def make_layer(self, spec: StateSpec) -> StateLayer:
        """Return a layer that `bind` binds. Raises `DovetailError` for a layer that the layout doesn't have."""
        if spec.index not in self._planned.states:
            raise DovetailError(f"the model has made state layer {spec.index}, which isn't among its state_specs")
        layer = self.layers[spec.index] = StateLayer(spec, self.steps)
        return layer

    def bind(self, memory: torch.Tensor) -> None:
        """Bind all layers to the pool, uint8 [slots, num_pages + 1, bytes]; all lines lead to the waste page."""
        self._stride = memory.shape[1]
        flat = memory.view(-1, memory.shape[2])
        self._units.copy_(torch.from_numpy(self._units_of(np.full((1, self._page_of.max(initial=0) + 1), self._stride - 1, np.int32))))
        for index, layer in self.layers.items():
            place = self._planned.states[index]
            views = [
                _as_rows(flat, _dtype(tensor, self._dtype, self._state_dtype), rows, tensor.row_size)
                for tensor, rows in zip(layer.spec.tensors, place.rows_per_unit, strict=True)
            ]
            units = [self._units[:, first : first + count] for first, count in zip(place.first, place.units, strict=True)]
            layer.bind(tuple(views), tuple(units))

    def put(self, lines: Sequence[int], pages: Sequence[Int32]) -> None:
        """Enqueue that the states of `lines` are in these pages, [pages_per_block] each."""
        where, units = all_to_device([np.array(lines, np.int64), self._units_of(np.stack(pages))], self.device)
        self._units.index_copy_(0, where, units)

    def _units_of(self, pages: Int32) -> Int32:
        """Return the units [n, units] of states in pages [n, pages_per_block]."""
        return (self._slot_of * self._stride + pages[:, self._page_of]).astype(np.int32)

    def batch(self, lines: torch.Tensor, query_starts: torch.Tensor, kv_lens: torch.Tensor, query_lens: Int32, checkpoint_at: Int32) -> StateBatch:
        """Return the part of a step that concerns states. `query_lens` [b] and `checkpoint_at` [b]: on the host. A checkpoint of the i-th row goes to
        line `max_rows` + 1 + i."""
        b = len(query_lens)
        if (query_lens == 1).all() and not checkpoint_at.any():
            return StateBatch(b, b, lines, query_starts, kv_lens, query_lens, decodes=True)
        chunks, chunk_starts = cut(query_lens, checkpoint_at)
        at, targets, chunks_there, starts_there = all_to_device(
            [checkpoint_at, np.arange(self.max_rows + 1, self.max_rows + 1 + b), chunks, chunk_starts], self.device
        )
        return StateBatch(
            num_rows=b,
            num_tokens=int(query_lens.sum()),
            lines=lines,
            query_starts=query_starts,
            kv_lens=kv_lens,
            host_query_lens=query_lens,
            decodes=False,
            checkpoint_at=at,
            checkpoint_lines=targets,
            chunks=chunks_there,
            chunk_starts=starts_there,
            host_checkpoint_at=checkpoint_at,
        )


def cut(query_lens: Int32, checkpoint_at: Int32) -> tuple[Int32, Int32]:
    """Return (chunks [n, 2], chunk_starts [b + 1]) of rows with these numbers of tokens: see `StateBatch`."""
    chunks, starts, begin = list[tuple[int, int]](), [0], 0
    for tokens, at in zip(query_lens.tolist(), checkpoint_at.tolist(), strict=True):
        for first, last in ((0, at), (at, tokens)):
            chunks += [(begin + start, begin + min(start + CHUNK, last)) for start in range(first, last, CHUNK)]
        starts.append(len(chunks))
        begin += tokens
    return np.array(chunks, np.int32).reshape(-1, 2), np.array(starts, np.int32)


def _as_rows(flat: torch.Tensor, dtype: torch.dtype, rows: int, row_size: int) -> torch.Tensor:
    """View flat uint8 [units, bytes] as [units, rows, row_size] of `dtype`; the rest of a unit is unused."""
    typed = flat.view(dtype)
    return typed.as_strided((len(typed), rows, row_size), (typed.stride(0), row_size, 1))
