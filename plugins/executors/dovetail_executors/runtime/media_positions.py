"""Rotary positions of rows with images, for models whose positions have three axes (time, height,
width).

Text counts on by one on each axis. An image of `grid` (t, h, w) begins where text stopped, and takes
max(t, h, w) of it. So tokens after a prompt's last image have one position again, that of their
index plus an offset, which is at most 0. The offset is a column of `RowState`: the device adds it
in steps without `ModelInputs.axes`, among them recorded ones (`model_positions`). Steps that
compute earlier tokens give the model `axes`, and aren't recorded.

Slots of K and V are those of the tokens' indices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.executor import Batch
from dovetail.api.media import MediaPlace, MediaRows
from dovetail_executors.runtime.step_inputs import HostInputs

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

POSITION_OFFSET = "position_offset"  # column of `RowState`


def positions_of(num_tokens: int, places: Sequence[MediaPlace]) -> tuple[Int64, int]:
    """Return the positions [3, num_tokens] of a prompt's tokens, and the offset of all later ones.
    `places`: of the prompt's images, ascending, all within the tokens."""
    axes = np.empty((3, num_tokens), np.int64)
    done = offset = 0
    for place in places:
        axes[:, done : place.start] = np.arange(done, place.start) + offset
        of_image = np.indices(place.grid).reshape(3, -1)
        axes[:, place.start : place.stop] = of_image + (place.start + offset)
        done = place.stop
        offset += _offset([place])
    axes[:, done:] = np.arange(done, num_tokens) + offset
    return axes, offset


def _offset(places: Sequence[MediaPlace]) -> int:
    return sum(max(place.grid) - (place.stop - place.start) for place in places)


def offsets_of(batch: Batch) -> list[int]:
    """Return the values of `POSITION_OFFSET` of a batch's new rows; 0 for rows without images."""
    part = batch.part(MediaRows)
    added = {} if part is None else part.added
    return [_offset(added.get(new.row, ())) for new in batch.added]


class AxesOfRows:
    """Positions on three axes of the rows of one device. `rows`: those with images; for each, its
    positions [3, end of its last image] and its offset."""

    def __init__(self, max_rows: int) -> None:
        self.rows: dict[int, tuple[Int64, int]] = {}
        self._ends = np.zeros(max_rows, np.int64)  # of their last images; 0 of rows without

    def update(self, batch: Batch) -> None:
        """Take note of a batch's rows that come and go."""
        for row in (*batch.removed.tolist(), *(new.row for new in batch.added)):
            self._ends[row] = 0
            self.rows.pop(row, None)
        part = batch.part(MediaRows)
        for row, places in ({} if part is None else part.added).items():
            self._ends[row] = places[-1].stop
            self.rows[row] = positions_of(places[-1].stop, places)

    def are_needed(self, rows: Int32, firsts: Int64) -> bool:
        """Return True if a step of `rows` [b] from tokens `firsts` [b] on needs
        `ModelInputs.axes`: some of its tokens don't come after their row's images."""
        return bool((firsts < self._ends[rows]).any())

    def of_step(self, host: HostInputs) -> Int64:
        """Return `ModelInputs.axes` [3, tokens] of a step."""
        axes = np.tile(host.positions, (3, 1))
        starts = host.query_starts[:-1]
        for row, start, stop in zip(host.rows.tolist(), starts, host.ends, strict=True):
            if row in self.rows:
                axes[:, start:stop] = self._at(row, host.positions[start:stop])
        return axes

    def _at(self, row: int, indices: Int64) -> Int64:
        """Return the positions [3, n] of tokens at `indices` [n] of a row with images."""
        own, offset = self.rows[row]
        last = own.shape[1] - 1
        return np.where(indices <= last, own[:, np.minimum(indices, last)], indices + offset)


def model_positions(
    positions: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Return the rotary positions [n] int64 of tokens of rows [n] int64 that come after the rows'
    images. `positions` [n] int64: in their sequences. `offsets`: the column."""
    # Padding of recorded steps is the first token of some row, perhaps of one with images.
    return (positions + offsets.index_select(0, rows)).clamp_(min=0)
