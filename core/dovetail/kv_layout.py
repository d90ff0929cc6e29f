"""Arithmetic of cache groups: which layers share a block table, and where each layer's K and V lie in a page.

A page has slots. A slot holds one tensor (K or V) of one layer of each group; there are as many as the smallest group has tensors, so that a block of
that group is one page, and a block of a larger group several. Blocks of a group whose layers have smaller tensors hold more tokens, so that they
fill their slots. This module doesn't need torch: the executor and the lab use it alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dovetail.api.kv_cache import CacheGroup, KVLayout
from dovetail.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """Cache of a layer. `tensor_bytes` returns, for a number of tokens, the size in bytes of one block in each of its tensors. `shares`: index of
    the layer whose cache it reads; it has none of its own."""

    index: int
    window: int | None
    tensor_bytes: Callable[[int], tuple[int, ...]]
    shares: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a layer's cache: its group, its page within a block, and the slot of each of its tensors in that page."""

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

    def describe(self) -> str:
        """Return a line for humans: layers, window, tokens of a block and its pages of each group, and the share of it that is padding."""
        lines = []
        for group, used in zip(self.layout.groups, self.used_bytes, strict=True):
            window = "full attention" if group.window is None else f"window {group.window}"
            pages = "1 page" if group.pages_per_block == 1 else f"{group.pages_per_block} pages"
            lost = 1 - used / (group.pages_per_block * self.layout.page_bytes)
            lines.append(
                f"{len(group.layers)} layers, {window}, blocks of {group.block_tokens} tokens in {pages}" + (f", {lost:.1%} padding" if lost else "")
            )
        return "; ".join(lines)


def plan_layout(layers: Sequence[CachedLayer], block_size: int, dtype: str, supports: Callable[[int], bool] = lambda _: True) -> PlannedLayout:
    """Group `layers` by their windows and place their tensors. `block_size`: tokens of the smallest block; larger ones are multiples of it that the
    attention backend `supports`. `dtype`: of the cache, a name ("bfloat16").

    Raises `UnsupportedError` if a layer shares the cache of a layer with another window, or of one that has none.
    """
    own = [layer for layer in layers if layer.shares is None]
    windows = sorted({layer.window for layer in own}, key=lambda window: -1 if window is None else window)
    members = [[layer for layer in own if layer.window == window] for window in windows]
    largest = [max(size for layer in group for size in layer.tensor_bytes(block_size)) for group in members]
    tokens = [_block_tokens(group, block_size, max(largest), supports) for group in members]
    tensors = [sum(len(layer.tensor_bytes(block_size)) for layer in group) for group in members]
    num_slots = min(tensors, default=0)
    slot_bytes, places, groups, used = [0] * num_slots, dict[int, Place](), list[CacheGroup](), list[int]()
    for index, (window, group, block_tokens) in enumerate(zip(windows, members, tokens, strict=True)):
        page, slot, total = 0, 0, 0
        for layer in group:
            sizes = layer.tensor_bytes(block_tokens)
            if slot + len(sizes) > num_slots:  # a layer's tensors are in one page
                page, slot = page + 1, 0
            places[layer.index] = Place(index, page, tuple(range(slot, slot + len(sizes))))
            for size in sizes:
                slot_bytes[slot] = max(slot_bytes[slot], size)
                slot += 1
            total += sum(sizes)
        groups.append(CacheGroup(tuple(layer.index for layer in group), block_tokens, window, page + 1))
        used.append(total)
    for layer in layers:
        if layer.shares is not None:
            shared = places.get(layer.shares)
            if shared is None or groups[shared.group].window != layer.window:
                raise UnsupportedError(f"attention layer {layer.index} shares the cache of layer {layer.shares}, which has none with its window")
            places[layer.index] = shared
    return PlannedLayout(KVLayout(tuple(groups), sum(slot_bytes), dtype), places, tuple(slot_bytes), tuple(used))


def _block_tokens(group: Sequence[CachedLayer], block_size: int, most_bytes: int, supports: Callable[[int], bool]) -> int:
    """Return the largest multiple of `block_size` with which no tensor of the group has more than `most_bytes`."""
    tokens = block_size
    while supports(tokens + block_size) and all(size <= most_bytes for layer in group for size in layer.tensor_bytes(tokens + block_size)):
        tokens += block_size
    return tokens
