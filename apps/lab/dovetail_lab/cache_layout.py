"""The simulated KV pool: its cache groups, from a profile or a model's config.json, and how many
tokens its pages hold."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from dovetail.api.kv_cache import CacheGroup, KVLayout
from dovetail_lab.step_time import Described, Windows


class MeasuredGroup(Described):
    """A cache group of a measured engine: layers with the same window."""

    layers: int = Field(ge=1)
    window: int | None = Field(
        default=None, ge=1, description="Tokens that a query sees, itself included; null: all."
    )
    blocks: int = Field(default=1, ge=1, description="Tokens of its blocks, in smallest blocks.")
    pages_per_block: int = Field(default=1, ge=1)
    recurrent: bool = Field(
        default=False, description="Layers that keep a state: a block is one request's."
    )


def measured_groups(layout: KVLayout) -> tuple[MeasuredGroup, ...]:
    """Return the groups of a layout for a profile; none if it is one group with full attention,
    which a profile needn't say."""
    if not layout.has_windows and layout.pages(1) == 1:
        return ()
    return tuple(
        MeasuredGroup(
            layers=len(group.layers),
            window=group.window,
            blocks=group.block_tokens // layout.block_size,
            pages_per_block=group.pages_per_block,
            recurrent=group.recurrent,
        )
        for group in layout.groups
    )


def layout_of(
    groups: Sequence[MeasuredGroup], block_size: int, max_len: int | None = None
) -> KVLayout:
    """Return the layout of an engine with these groups; one with full attention if there are none.
    Pages have no size: the profile tells the number of pages. Windows of `max_len` tokens or more
    never release anything."""
    made = []
    first = 0
    for group in groups or (MeasuredGroup(layers=1),):
        layers = tuple(range(first, first + group.layers))
        made.append(
            CacheGroup(
                layers,
                group.blocks * block_size,
                group.window,
                group.pages_per_block,
                group.recurrent,
            )
        )
        first += group.layers
    return KVLayout(tuple(made), 1, "none")


def windows_of(layout: KVLayout) -> Windows:
    """Return the windows of a layout's layers, for `StepShape.of`; none if all have full
    attention."""
    return (
        [(group.window, len(group.layers)) for group in layout.groups if not group.recurrent]
        if layout.has_windows
        else ()
    )


def pool_tokens(layout: KVLayout, num_pages: int, requests: int = 1) -> int:
    """Return how many tokens of so many requests the pool holds if they release nothing."""
    whole = layout.hit_tokens
    left = num_pages - requests * layout.state_pages
    return max(0, left // (layout.pages(whole) - layout.state_pages) * whole)
