"""Images between the loop and an executor: parts of a batch and of the capacity.

The loop decides which items a step encodes, and where their rows are in the device's cache; the
executor does it. This module doesn't need torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dovetail.request.media import MediaItem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class EncodedItem:
    """An item that a step encodes before its model runs: `rows` rows are written to `slots` of the
    device's cache of rows, in their order."""

    item: MediaItem
    slots: Int32  # [item.rows]


@dataclass(frozen=True, slots=True)
class MediaRows:
    """Part of a batch: the items that it encodes, and the tokens that are placeholders."""

    encode: tuple[EncodedItem, ...]
    tokens: Int32  # [n] ascending indices among the step's tokens, in the order of `Batch.rows`
    slots: Int32  # [n] of the cache, which hold their rows
    # of rows in `Batch.added`, the items of their prompts, for types with positions on three axes;
    # empty for others
    added: Mapping[int, tuple[MediaPlace, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MediaPlace:
    """Place of an image in its prompt, for models whose positions have three axes."""

    start: int  # index of its first placeholder
    grid: tuple[int, int, int]  # (time, height, width) in rows

    @property
    def stop(self) -> int:
        """Index after its last placeholder."""
        time, height, width = self.grid
        return self.start + time * height * width


@dataclass(frozen=True, slots=True)
class MediaCapacity:
    """The device's cache of images' rows."""

    cache_rows: int  # slots
    step_rows: int  # that a step encodes at most, if more than one item
    # of items that are computed whole (`MediaItem.whole`), runs that a step has at most
    step_runs: int = 1
