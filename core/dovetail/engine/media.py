"""Images: which rows the device's cache holds, and which items a step encodes.

The rows of an item are computed once, kept in slots of the cache, and read by the steps that
compute its placeholders. Batches run in order, so slots may be given to another item while steps in
flight still read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.api.executor import Batch
from dovetail.api.media import EncodedItem, MediaCapacity, MediaPlace, MediaRows
from dovetail.api.scheduler import Refusal
from dovetail.engine.feature import EngineFeature
from dovetail.engine.live_request import LiveRequest
from dovetail.request.media import MediaItem

Int32 = NDArray[np.int32]
Key = tuple[tuple[str, ...], bytes]  # cache keys of a request, and an item's digest


class _Reads(NamedTuple):
    """Rows that a granted range of tokens reads."""

    item: MediaItem
    key: Key
    tokens: Int32  # [n] in the range
    rows: Int32  # [n] of the item


class EncoderSlots(EngineFeature):
    """The cache of one engine's rows. Rows of the items that were used least recently make room."""

    asked_by = staticmethod(lambda request: request.items or None)
    limit = Refusal.MEDIA

    def __init__(self, capacity: MediaCapacity) -> None:
        self.cache_rows = capacity.cache_rows
        self._step_rows = capacity.step_rows
        self._step_runs = capacity.step_runs
        self._held: dict[Key, Int32] = {}  # the slots of each item; the least recently used first
        self.forget()
        self._in_step: dict[Key, int] = {}  # items of the step's grants -> number of grants
        self._to_encode: dict[Key, MediaItem] = {}  # of these, those that aren't held
        self._runs_in_step = 0  # of items that are computed whole

    def open_step(self, now: float, waiting: Iterable[LiveRequest]) -> bool:
        self._in_step.clear()
        self._to_encode.clear()
        self._runs_in_step = 0
        return False

    def least(self, request: LiveRequest, start: int, tokens: int, budget: int) -> int:
        for first, stop in _whole_runs(request, start, tokens):
            if stop > start + tokens:
                return stop - start if first <= start or stop - start <= budget else first - start
        return tokens

    def most(self, request: LiveRequest, start: int, tokens: int, least: int) -> int:
        allowed = self._most(request, start, tokens, self._step_rows)
        if allowed < least and not self._to_encode:  # in no step it would get more
            return self._most(request, start, least, self.cache_rows)
        return allowed

    def _most(self, request: LiveRequest, start: int, tokens: int, step_rows: int) -> int:
        encoded = {key: item.rows for key, item in self._to_encode.items()}
        read = {key: len(self._held[key]) for key in self._in_step if key in self._held}
        for item in request.items:
            span = item.span
            if span.stop <= start or span.start >= start + tokens:
                continue
            if not self._fits(_key(request, item), item.rows, encoded, read, step_rows):
                tokens = _before(item, start)
                break
        return self._undivided(request, start, tokens)

    def _undivided(self, request: LiveRequest, start: int, tokens: int) -> int:
        """Return the number of tokens, at most `tokens`, that divide no run of an item which is
        computed whole, and have no more of these runs than the step may have."""
        left = self._step_runs - self._runs_in_step
        for first, stop in _whole_runs(request, start, tokens):
            if stop > start + tokens or not left:
                return max(0, first - start)
            left -= 1
        return tokens

    def _fits(
        self, key: Key, rows: int, encoded: dict[Key, int], read: dict[Key, int], step_rows: int
    ) -> bool:
        """Return True if the step may read an item with `rows` rows, and add it to `encoded`, or to
        `read` if the cache holds it. The cache must hold the rows of both at once."""
        if key in encoded or key in read:
            return True
        if rows + sum(encoded.values()) + sum(read.values()) > self.cache_rows:
            return False
        if key in self._held:
            read[key] = rows
            return True
        if encoded and rows + sum(encoded.values()) > step_rows:
            return False
        encoded[key] = rows
        return True

    def granted(self, request: LiveRequest, start: int, tokens: int) -> None:
        for reads in _reads(request, start, tokens):
            self._in_step[reads.key] = self._in_step.get(reads.key, 0) + 1
            if reads.key not in self._held:
                self._to_encode[reads.key] = reads.item
        self._runs_in_step += len(_whole_runs(request, start, tokens))

    def taken_back(self, request: LiveRequest, start: int, tokens: int) -> None:
        for reads in _reads(request, start, tokens):
            self._in_step[reads.key] -= 1
            if not self._in_step[reads.key]:
                del self._in_step[reads.key]
                self._to_encode.pop(reads.key, None)
        self._runs_in_step -= len(_whole_runs(request, start, tokens))

    def fill(
        self, batch: Batch, requests: Sequence[LiveRequest], added: Sequence[LiveRequest]
    ) -> Batch:
        places = {
            request.row: _places(request)
            for request in added
            if any(item.grid is not None for item in request.items)
        }
        if not self._in_step and not places:
            return batch
        encode = tuple(self._take_slots(key, item) for key, item in self._to_encode.items())
        firsts = np.cumsum(batch.num_tokens) - batch.num_tokens
        tokens: list[Int32] = []
        slots: list[Int32] = []
        for first, request in zip(firsts.tolist(), requests, strict=True):
            start = request.num_computed - request.granted
            for reads in _reads(request, start, request.granted) if request.items else ():
                self._held[reads.key] = held = self._held.pop(reads.key)  # used last
                tokens.append(first + reads.tokens)
                slots.append(held[reads.rows])
        part = MediaRows(encode, _joined(tokens), _joined(slots), places)
        self._in_step.clear()
        self._to_encode.clear()
        return replace(batch, parts=(*batch.parts, part))

    def _take_slots(self, key: Key, item: MediaItem) -> EncodedItem:
        for other in [*self._held] if item.rows > self._free_rows else ():
            if other in self._in_step:
                continue
            self._give_back(self._held.pop(other))
            if item.rows <= self._free_rows:
                break
        self._free_rows -= item.rows
        slots = self._free[self._free_rows : self._free_rows + item.rows].copy()
        self._held[key] = slots
        return EncodedItem(item, slots)

    def _give_back(self, slots: Int32) -> None:
        self._free[self._free_rows : self._free_rows + len(slots)] = slots
        self._free_rows += len(slots)

    def forget(self) -> None:
        self._held.clear()
        self._free = np.arange(self.cache_rows, dtype=np.int32)[::-1].copy()  # a stack
        self._free_rows = self.cache_rows

    @property
    def held_rows(self) -> int:
        """Number of rows that the cache holds."""
        return self.cache_rows - self._free_rows


def _key(request: LiveRequest, item: MediaItem) -> Key:
    return request.cache_keys, item.digest


def _before(item: MediaItem, start: int) -> int:
    """Return the number of tokens from `start` to the item's next row."""
    for first, count in item.runs:
        if first + count > start:
            return max(0, first - start)
    raise AssertionError("the item ends before `start`")


def _whole_runs(request: LiveRequest, start: int, tokens: int) -> list[tuple[int, int]]:
    """Return the runs [first, stop) of items that are computed whole, ascending, of which some
    tokens are among `start` … `start` + `tokens` - 1."""
    return [
        (first, first + count)
        for item in request.items
        if item.whole
        for first, count in item.runs
        if start < first + count and first < start + tokens
    ]


def _reads(request: LiveRequest, start: int, tokens: int) -> Iterator[_Reads]:
    """Yield the rows that tokens `start` … `start` + `tokens` - 1 of a request read."""
    for item in request.items:
        before = 0
        own: list[Int32] = []
        rows: list[Int32] = []
        for first, count in item.runs:
            begin = max(first, start)
            end = min(first + count, start + tokens)
            if begin < end:
                own.append(np.arange(begin - start, end - start, dtype=np.int32))
                rows.append(np.arange(begin - first, end - first, dtype=np.int32) + before)
            before += count
        if own:
            yield _Reads(item, _key(request, item), _joined(own), _joined(rows))


def _places(request: LiveRequest) -> tuple[MediaPlace, ...]:
    return tuple(
        MediaPlace(item.runs[0][0], item.grid) for item in request.items if item.grid is not None
    )


def _joined(parts: Sequence[Int32]) -> Int32:
    return np.concatenate(parts, dtype=np.int32) if parts else np.zeros(0, np.int32)
