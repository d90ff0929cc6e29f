"""Arithmetic of cache groups: which layers share a block table, and where each layer's K and V lie
in a page.

A page has slots. A slot holds one tensor (K or V) of one layer of each group; there are as many as
the smallest group has tensors, so that a block of that group is one page, and a block of a larger
group several. Blocks of a group whose layers have smaller tensors hold more tokens, so that they
fill their slots. The states of recurrent layers are cut into units of a slot's size, so that pages
needn't grow to the size of a state; then all slots are equal. This module doesn't need torch: the
executor and the lab use it alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dovetail.api.kv_cache import CacheGroup, KVLayout
from dovetail.errors import UnsupportedError

STATE_SLOT_BYTES = 1 << 15  # of a page in a model without attention


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """Cache of a layer. `tensor_bytes` returns, for a number of tokens, the size in bytes of one
    block in each of its tensors. `shares`: index of the layer whose cache it reads; it has none of
    its own."""

    index: int
    window: int | None
    tensor_bytes: Callable[[int], tuple[int, ...]]
    shares: int | None = None


@dataclass(frozen=True, slots=True)
class CachedState:
    """State of a recurrent layer. `tensors`: (number of rows, bytes of a row) of each of its
    tensors."""

    index: int
    tensors: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class StatePlace:
    """Location of a layer's state. Unit i of a state is slot i % slots of page i // slots of its
    block. By tensor: its first unit, its number of units, and how many rows a unit holds, a power
    of two."""

    first: tuple[int, ...]
    units: tuple[int, ...]
    rows_per_unit: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a layer's cache: its group, its page within a block, and the slot of each of its
    tensors in that page."""

    group: int
    page: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """A layout, and the place of each layer in it."""

    layout: KVLayout
    places: Mapping[int, Place]  # by layer index, also of layers that share another's cache
    slot_bytes: tuple[int, ...]  # of a page's slots
    used_bytes: tuple[int, ...]  # by group: of a block, without padding
    states: Mapping[int, StatePlace] = field(default_factory=dict)  # by layer index

    def describe(self) -> str:
        """Return a line for humans: layers, window, tokens of a block and its pages of each group,
        and the share of it that is padding."""
        lines = []
        for group, used in zip(self.layout.groups, self.used_bytes, strict=True):
            window = "full attention" if group.window is None else f"window {group.window}"
            pages = "1 page" if group.pages_per_block == 1 else f"{group.pages_per_block} pages"
            lost = 1 - used / (group.pages_per_block * self.layout.page_bytes)
            kept = (
                f"states of {pages} a request"
                if group.recurrent
                else f"{window}, blocks of {group.block_tokens} tokens in {pages}"
            )
            lines.append(
                f"{len(group.layers)} layers, {kept}" + (f", {lost:.1%} padding" if lost else "")
            )
        return "; ".join(lines)


def plan_layout(
    layers: Sequence[CachedLayer],
    block_size: int,
    dtype: str,
    supports: Callable[[int], bool] | None = None,
    states: Sequence[CachedState] = (),
) -> PlannedLayout:
    """Group `layers` by their windows and place their tensors, and `states` in a group of their
    own. `block_size`: tokens of the smallest block; larger ones are multiples of it that the
    attention backend `supports` (None: all). `dtype`: of the cache, a name ("bfloat16").

    Raises `UnsupportedError` if a layer shares the cache of a layer with another window, or of one
    that has none, and if a row of a state is larger than a slot.
    """
    own = [layer for layer in layers if layer.shares is None]
    windows = sorted(
        {layer.window for layer in own}, key=lambda window: -1 if window is None else window
    )
    members = [[layer for layer in own if layer.window == window] for window in windows]
    largest = [
        max(size for layer in group for size in layer.tensor_bytes(block_size)) for group in members
    ]
    tokens = [_block_tokens(group, block_size, max(largest), supports) for group in members]
    tensors = [sum(len(layer.tensor_bytes(block_size)) for layer in group) for group in members]
    num_slots = min(tensors, default=0)
    slot_bytes = [0] * num_slots
    places = dict[int, Place]()
    groups = list[CacheGroup]()
    used = list[int]()
    for index, (window, group, block_tokens) in enumerate(
        zip(windows, members, tokens, strict=True)
    ):
        page = 0
        slot = 0
        total = 0
        for layer in group:
            sizes = layer.tensor_bytes(block_tokens)
            if slot + len(sizes) > num_slots:  # a layer's tensors are in one page
                page += 1
                slot = 0
            places[layer.index] = Place(index, page, tuple(range(slot, slot + len(sizes))))
            for size in sizes:
                slot_bytes[slot] = max(slot_bytes[slot], size)
                slot += 1
            total += sum(sizes)
        groups.append(
            CacheGroup(tuple(layer.index for layer in group), block_tokens, window, page + 1)
        )
        used.append(total)
    for layer in layers:
        if layer.shares is not None:
            shared = places.get(layer.shares)
            if shared is None or groups[shared.group].window != layer.window:
                raise UnsupportedError(
                    f"attention layer {layer.index} shares the cache of layer {layer.shares}, "
                    f"which has none with its window"
                )
            places[layer.index] = shared
    state_places = dict[int, StatePlace]()
    if states:
        size = max(slot_bytes, default=STATE_SLOT_BYTES)
        slot_bytes = [size] * max(1, num_slots)
        state_places, units = _place_states(states, size)
        block_tokens = math.lcm(*(group.block_tokens for group in groups)) if groups else block_size
        pages = -(-units // len(slot_bytes))
        groups.append(
            CacheGroup(
                tuple(state.index for state in states), block_tokens, None, pages, recurrent=True
            )
        )
        used.append(sum(rows * row_bytes for state in states for rows, row_bytes in state.tensors))
    return PlannedLayout(
        KVLayout(tuple(groups), sum(slot_bytes), dtype),
        places,
        tuple(slot_bytes),
        tuple(used),
        state_places,
    )


def layout_of_nothing(layers: Sequence[int], max_len: int, dtype: str) -> PlannedLayout:
    """Return the layout of `layers`, by index, none of which stores anything: a request of up to
    `max_len` tokens holds one page, of no bytes."""
    place = Place(0, 0, ())
    return PlannedLayout(
        KVLayout((CacheGroup(tuple(layers), max_len),), 0, dtype),
        dict.fromkeys(layers, place),
        (),
        (0,),
    )


def _place_states(
    states: Sequence[CachedState], slot_bytes: int
) -> tuple[dict[int, StatePlace], int]:
    """Return the place of each state, and the number of units of all."""
    places = dict[int, StatePlace]()
    end = 0
    for state in states:
        first = list[int]()
        units = list[int]()
        rows_per_unit = list[int]()
        for rows, row_bytes in state.tensors:
            fit = slot_bytes // row_bytes
            if fit == 0:
                raise UnsupportedError(
                    f"the state of layer {state.index} has rows of {row_bytes} bytes, and a block "
                    f"of K or V has {slot_bytes}: raise block_size"
                )
            held = 1 << (fit.bit_length() - 1)
            rows_per_unit.append(held)
            first.append(end)
            units.append(-(-rows // held))
            end += units[-1]
        places[state.index] = StatePlace(tuple(first), tuple(units), tuple(rows_per_unit))
    return places, end


def _block_tokens(
    group: Sequence[CachedLayer],
    block_size: int,
    most_bytes: int,
    supports: Callable[[int], bool] | None,
) -> int:
    """Return the largest multiple of `block_size` with which no tensor of the group has more than
    `most_bytes`."""
    tokens = block_size
    while (supports is None or supports(tokens + block_size)) and all(
        size <= most_bytes for layer in group for size in layer.tensor_bytes(tokens + block_size)
    ):
        tokens += block_size
    return tokens
