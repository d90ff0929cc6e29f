"""Memory for attention layers and states outside of an engine: what its executor does between
`make_layer` and `prepare`, and in each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dovetail.api.attention import AttentionBackend, AttentionLayer, LayerCache
from dovetail.api.kv_layout import STATE_SLOT_BYTES, CachedLayer, plan_layout
from dovetail.api.state import StateBatch, StateLayer, StateSpec
from dovetail.nn.state.states import CheckedDrafts, States, cached_state


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a layer's cache. Layers of different groups, or of different pages of a block,
    may have the same tensors."""

    group: int = 0
    page: int = 0  # of a block
    block_size: int | None = None  # tokens; None: that of the backend's context
    first: int | None = None  # index of its first tensor; None: those after the earlier layers'


def bind_layers(
    backend: AttentionBackend,
    layers: Sequence[AttentionLayer],
    num_pages: int,
    places: Sequence[Place] = (),
) -> list[torch.Tensor]:
    """Allocate a pool of `num_pages` pages and the waste page, zeroed, and bind the layers to it,
    each at its place: by default all in one group of one page, with tensors of their own. A layer
    that shares another's cache is bound to that. Returns the pool's tensors [num_pages + 1,
    bytes]."""
    sizes: list[int] = []  # bytes of a page, in each tensor
    # by the layer's index: its tensors, place and block size
    found: dict[int, tuple[slice, Place, int]] = {}
    for layer, place in zip(layers, places or [Place()] * len(layers), strict=True):
        if layer.spec.shares is not None:
            found[layer.spec.index] = found[layer.spec.shares]
            continue
        block_size = place.block_size or backend.context.block_size
        own = backend.tensor_bytes(layer.spec, block_size)
        first = len(sizes) if place.first is None else place.first
        sizes += [0] * (first + len(own) - len(sizes))
        for index, size in enumerate(own, first):
            sizes[index] = max(sizes[index], size)
        found[layer.spec.index] = slice(first, first + len(own)), place, block_size
    pool = [
        torch.zeros((num_pages + 1, size), dtype=torch.uint8, device=backend.context.device)
        for size in sizes
    ]
    for layer in layers:
        tensors, place, block_size = found[layer.spec.index]
        layer.bind(LayerCache(tuple(pool[tensors]), block_size, place.group, place.page))
    return pool


@dataclass(frozen=True, slots=True)
class BoundStates:
    """States of `rows` requests in a pool: `layers` by index, and `pool`, uint8 [slots, pages + 1,
    bytes], whose last page is the waste page."""

    states: States
    layers: Mapping[int, StateLayer]
    pool: torch.Tensor
    rows: int

    def plan(
        self,
        rows: Sequence[int],
        lengths: Sequence[int],
        computed: Sequence[int],
        checkpoint_at: Sequence[int] | None = None,
    ) -> StateBatch:
        """Plan a step for all layers: of each of `rows` the next `lengths` tokens after `computed`
        ones, with a checkpoint after `checkpoint_at` of them (0: none). The i-th row's checkpoint
        goes to place `checkpoint_place(i)`."""
        device = self.pool.device
        query_lens = np.array(lengths, np.int32)
        at = (
            np.zeros_like(query_lens)
            if checkpoint_at is None
            else np.array(checkpoint_at, np.int32)
        )
        starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        kv_lens = (query_lens + np.array(computed, np.int32)).astype(np.int32)
        places, starts_there, lens_there = (
            torch.from_numpy(array).to(device)
            for array in (np.array(rows, np.int64), starts, kv_lens)
        )
        batch = self.states.batch(places, starts_there, lens_there, query_lens, at)
        self.states.steps.plan(batch)
        return batch

    def plan_drafts(
        self,
        rows: Sequence[int],
        lengths: Sequence[int],
        computed: Sequence[int],
        drafts: Sequence[int],
    ) -> CheckedDrafts | None:
        """Plan a step in which the last `drafts` of the `lengths` tokens of each row are drafts,
        after one known token; a row with 0 has none. Returns what `accept` needs."""
        counts = np.array(drafts, np.int32)
        query_lens = np.array(lengths, np.int32)
        kv_lens = query_lens + np.array(computed, np.int32)
        batch = self.plan(rows, lengths, computed)
        planned, checked = self.states.with_drafts(
            batch, np.array(rows, np.int64), kv_lens, 1 + counts, counts
        )
        self.states.steps.plan(planned)
        return checked

    def accept(self, checked: CheckedDrafts | None, known: Sequence[int]) -> None:
        """Apply the drafts that count in a step that was planned and computed. `known`: tokens of
        each of the `rows` rows after it: those computed so far, accepted drafts included, and one
        more."""
        if checked is not None:
            self.states.accept(
                checked, torch.tensor([*known, 1], dtype=torch.int32, device=self.pool.device)
            )

    def checkpoint_place(self, index: int) -> int:
        """Return the place of the checkpoint of a step's row with this index."""
        return self.rows + 1 + index

    @property
    def waste_place(self) -> int:
        """The place of padding."""
        return self.rows


def bind_states(
    specs: Sequence[StateSpec],
    rows: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype = torch.float32,
    *,
    slot_bytes: int = STATE_SLOT_BYTES,
    slots: int = 1,
    device: torch.device | None = None,
    seed: int = 0,
    max_lines: int = 0,
) -> BoundStates:
    """Allocate a pool for the live states of `rows` rows, and a checkpoint for each; filled with
    NaN, with the pages of each state in random order; bind a layer for each spec to it. `dtype`: of
    the past inputs. `slots`: of a page, of `slot_bytes` each. `max_lines`: of a step with
    drafts."""
    device = device or torch.device("cpu")
    # attention layers, whose blocks set the size
    others = [
        CachedLayer(-1 - index, None, lambda tokens: (tokens * slot_bytes,))
        for index in range(slots)
    ]
    planned = plan_layout(
        others, 1, "float32", states=[cached_state(spec, dtype, state_dtype) for spec in specs]
    )
    states = States(planned, rows, dtype, state_dtype, device, max_lines)
    layers = {spec.index: states.make_layer(spec) for spec in specs}
    size = planned.layout.state_pages
    pool = torch.full(
        (slots, 2 * rows * size + 1, slot_bytes), 255, dtype=torch.uint8, device=device
    )
    states.bind(pool)
    pages = (
        np.random.default_rng(seed)
        .permutation(2 * rows * size)
        .astype(np.int32)
        .reshape(2 * rows, size)
    )
    states.put([*range(rows), *range(rows + 1, 2 * rows + 1)], list(pages))
    return BoundStates(states, layers, pool, rows)
