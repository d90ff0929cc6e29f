"""Recurrent states of the rows: where each lies in the pool, and the part of a step that concerns
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.kv_layout import CachedState, PlannedLayout
from dovetail.api.state import (
    CHUNK,
    Changes,
    Drafted,
    StateBatch,
    StateLayer,
    StateSpec,
    StateTensor,
)
from dovetail.errors import DovetailError
from dovetail.nn.state.accept import accept_drafts
from dovetail.nn.state.alike import AlikeLayers
from dovetail.nn.transfer import all_to_device, to_device

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


def cached_state(spec: StateSpec, dtype: torch.dtype, state_dtype: torch.dtype) -> CachedState:
    """Return the sizes of a layer's state. `dtype`: of the model; `state_dtype`: of what isn't past
    inputs."""
    sizes = [
        (tensor.rows, tensor.row_size * _dtype(tensor, dtype, state_dtype).itemsize)
        for tensor in spec.tensors
    ]
    return CachedState(spec.index, tuple(sizes))


def _dtype(tensor: StateTensor, dtype: torch.dtype, state_dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.keeps_inputs else state_dtype


class StateSteps:
    """The step that all state layers of a model compute."""

    batch: StateBatch | None = None

    def plan(self, batch: StateBatch) -> None:
        """Set the step. A captured CUDA graph keeps reading the tensors of the batch that was
        planned when it was captured."""
        self.batch = batch

    def planned(self) -> StateBatch | None:
        return self.batch


class States:
    """Table of the units of all states that a step may use: place i is the live state of row i,
    place `max_rows` that of padding, and place `max_rows` + 1 + i the checkpoint of the i-th row of
    a step. `max_lines`: most lines of a step with drafts; 0: no step has any."""

    def __init__(
        self,
        planned: PlannedLayout,
        max_rows: int,
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        device: torch.device,
        max_lines: int = 0,
    ) -> None:
        self.steps = StateSteps()
        self.layers: dict[int, StateLayer] = {}
        self.max_rows = max_rows
        self.device = device
        self.max_lines = max_lines
        self._alike: list[AlikeLayers] = []  # made with the first pool, if there are drafts
        self._planned = planned
        self._dtype = dtype
        self._state_dtype = state_dtype
        self._num_slots = len(planned.slot_bytes)
        self._num_units = max(
            (place.first[-1] + place.units[-1] for place in planned.states.values()), default=0
        )
        self._units = torch.zeros(
            (2 * max_rows + 1, self._num_units), dtype=torch.int32, device=device
        )
        self._page_of, self._slot_of = np.divmod(np.arange(self._num_units), self._num_slots)
        self._stride = 0  # pages, with the waste page

    def make_layer(self, spec: StateSpec) -> StateLayer:
        """Return a layer that `bind` binds. Raises `DovetailError` for a layer that the layout
        doesn't have."""
        if spec.index not in self._planned.states:
            raise DovetailError(
                f"the model has made state layer {spec.index}, which isn't among its state_specs"
            )
        layer = self.layers[spec.index] = StateLayer(spec, self.steps.planned)
        return layer

    def bind(self, memory: torch.Tensor) -> None:
        """Bind all layers to the pool, uint8 [slots, num_pages + 1, bytes]; all places lead to the
        waste page."""
        self._stride = memory.shape[1]
        flat = memory.view(-1, memory.shape[2])
        self._units.copy_(
            torch.from_numpy(
                self._units_of(
                    np.full((1, self._page_of.max(initial=0) + 1), self._stride - 1, np.int32)
                )
            )
        )
        for index, layer in self.layers.items():
            place = self._planned.states[index]
            views = [
                _as_rows(
                    flat, _dtype(tensor, self._dtype, self._state_dtype), rows, tensor.row_size
                )
                for tensor, rows in zip(layer.spec.tensors, place.rows_per_unit, strict=True)
            ]
            units = [
                self._units[:, first : first + count]
                for first, count in zip(place.first, place.units, strict=True)
            ]
            layer.bind(tuple(views), tuple(units))
        if self.max_lines and not self._alike:
            self._alike = self._make_room_for_changes()

    def put(self, places: Sequence[int], pages: Sequence[Int32]) -> None:
        """Enqueue that the states at `places` are in these pages, [pages_per_block] each."""
        where, units = all_to_device(
            [np.array(places, np.int64), self._units_of(np.stack(pages))], self.device
        )
        self._units.index_copy_(0, where, units)

    def _units_of(self, pages: Int32) -> Int32:
        """Return the units [n, units] of states in pages [n, pages_per_block]."""
        return (self._slot_of * self._stride + pages[:, self._page_of]).astype(np.int32)

    def _make_room_for_changes(self) -> list[AlikeLayers]:
        """Allocate `StateLayer.changes` of all layers, and return these, those of equal states
        together."""
        alike: dict[object, list[StateLayer]] = {}
        for index, layer in self.layers.items():
            alike.setdefault(
                (layer.spec.tensors, self._planned.states[index].rows_per_unit), []
            ).append(layer)
        return [self._noting(layers) for layers in alike.values()]

    def _noting(self, layers: list[StateLayer]) -> AlikeLayers:
        places = [self._planned.states[layer.spec.index] for layer in layers]
        tensors = layers[0].spec.tensors
        firsts = torch.tensor(
            [place.first for place in places], dtype=torch.int32, device=self.device
        ).T.contiguous()
        changes = tuple(self._changes(len(layers), tensor) for tensor in tensors)
        for index, layer in enumerate(layers):
            layer.changes = tuple(
                own.take(index) if isinstance(own, Changes) else own[index] for own in changes
            )
        return AlikeLayers(tuple(layers), self._units, tuple(firsts), changes)

    def _changes(self, layers: int, tensor: StateTensor) -> torch.Tensor | Changes:
        def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros((layers, self.max_lines, *shape), dtype=dtype, device=self.device)

        if tensor.keeps_inputs:
            return make(tensor.rows, dtype=self._dtype)
        return Changes(
            decay=make(tensor.heads),
            change=make(tensor.rows),
            key=make(tensor.keys, tensor.row_size),
        )

    def accept(self, checked: CheckedDrafts, num_tokens: torch.Tensor) -> None:
        """Enqueue the changes to live states of the drafts that count. `num_tokens` [rows] int32:
        of each row, with all that the step has yielded."""
        known = to_device(checked.known, self.device)
        for layers in self._alike:
            accept_drafts(layers, checked.batch, known, num_tokens)

    def batch(
        self,
        places: torch.Tensor,
        query_starts: torch.Tensor,
        kv_lens: torch.Tensor,
        query_lens: Int32,
        checkpoint_at: Int32,
    ) -> StateBatch:
        """Return the part of a step that concerns states. `query_lens` [b] and `checkpoint_at` [b]:
        on the host. A checkpoint of the i-th row goes to place `max_rows` + 1 + i."""
        b = len(query_lens)
        if (query_lens == 1).all() and not checkpoint_at.any():
            return _of_single_tokens(places, query_starts, kv_lens, query_lens)
        chunks, chunk_starts = cut(query_lens, checkpoint_at)
        at, targets, chunks_there, starts_there = all_to_device(
            [
                checkpoint_at,
                np.arange(self.max_rows + 1, self.max_rows + 1 + b),
                chunks,
                chunk_starts,
            ],
            self.device,
        )
        return StateBatch(
            num_rows=b,
            num_tokens=int(query_lens.sum()),
            places=places,
            query_starts=query_starts,
            kv_lens=kv_lens,
            host_query_lens=query_lens,
            decodes=False,
            checkpoint_at=at,
            checkpoint_places=targets,
            chunks=chunks_there,
            chunk_starts=starts_there,
            host_checkpoint_at=checkpoint_at,
        )

    def with_drafts(
        self, step: StateBatch, rows: Int64, kv_lens: Int32, num_lines: Int32, counts: Int32
    ) -> tuple[StateBatch, CheckedDrafts | None]:
        """Return `step`, a result of `batch`, for rows that check drafts, and what `accept` needs
        after it. On the host: `rows` [b]; `kv_lens` [b], their tokens with these drafts;
        `num_lines` [b]; `counts` [b] of drafts. Rows with drafts have no checkpoints."""
        lens = step.host_query_lens
        drafting = counts > 0
        alone = (lens == num_lines).all() and (
            step.host_checkpoint_at is None or not step.host_checkpoint_at.any()
        )
        own = np.ones_like(drafting) if alone else drafting  # rows that are computed line by line
        each = 1 + counts[own]
        ahead = (np.arange(each.sum()) - (each.cumsum() - each).repeat(each)).astype(np.int32)
        tokens = (lens.cumsum() - lens)[own].repeat(each) + ahead
        places = rows[own].repeat(each)
        lens_of_lines = (kv_lens - counts)[own].repeat(each) + ahead
        others = np.where(drafting, self.max_rows, rows)
        starts = np.arange(len(ahead) + 1, dtype=np.int32)
        arrays = [
            tokens.astype(np.int64),
            places,
            lens_of_lines.astype(np.int32),
            ahead,
            starts,
            others,
        ]
        tokens_there, places_there, lens_there, ahead_there, starts_there, others_there = (
            all_to_device(arrays, self.device)
        )
        batch = _of_single_tokens(
            places_there, starts_there, lens_there, np.ones_like(ahead), ahead_there
        )
        checked = CheckedDrafts.of(batch, ahead)
        if alone:
            return batch, checked
        drafted = Drafted(tokens=tokens_there, batch=batch)
        return replace(step, places=others_there, drafted=drafted), checked


class CheckedDrafts(NamedTuple):
    """The lines of a step with drafts, and where in them the known tokens are that have drafts,
    [n]."""

    batch: StateBatch  # with `ahead`
    known: Int64

    @classmethod
    def of(cls, batch: StateBatch, ahead: Int32) -> CheckedDrafts | None:
        """`ahead` is that of `batch`, perhaps without its padding, on the host. Returns None if
        there are no drafts."""
        known = np.flatnonzero((ahead[:-1] == 0) & (ahead[1:] > 0))
        return cls(batch, known) if len(known) else None


def _of_single_tokens(
    places: torch.Tensor,
    query_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    query_lens: Int32,
    ahead: torch.Tensor | None = None,
) -> StateBatch:
    """Return a step of one token a row, without checkpoints."""
    return StateBatch(
        num_rows=len(query_lens),
        num_tokens=len(query_lens),
        places=places,
        query_starts=query_starts,
        kv_lens=kv_lens,
        host_query_lens=query_lens,
        decodes=True,
        ahead=ahead,
    )


def cut(query_lens: Int32, checkpoint_at: Int32) -> tuple[Int32, Int32]:
    """Return (chunks [n, 2], chunk_starts [b + 1]) of rows with these numbers of tokens: see
    `StateBatch`."""
    chunks = list[tuple[int, int]]()
    starts = [0]
    begin = 0
    for tokens, at in zip(query_lens.tolist(), checkpoint_at.tolist(), strict=True):
        for first, last in ((0, at), (at, tokens)):
            chunks += [
                (begin + start, begin + min(start + CHUNK, last))
                for start in range(first, last, CHUNK)
            ]
        starts.append(len(chunks))
        begin += tokens
    return np.array(chunks, np.int32).reshape(-1, 2), np.array(starts, np.int32)


def _as_rows(flat: torch.Tensor, dtype: torch.dtype, rows: int, row_size: int) -> torch.Tensor:
    """View flat uint8 [units, bytes] as [units, rows, row_size] of `dtype`; the rest of a unit is
    unused."""
    typed = flat.view(dtype)
    return typed.as_strided((len(typed), rows, row_size), (typed.stride(0), row_size, 1))
