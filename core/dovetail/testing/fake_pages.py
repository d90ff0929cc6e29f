"""Memory of the fake executor: what was written to each slot of its pages, also as bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from dovetail.api.kv_cache import HOLE

Written = tuple[int, int, int]  # the group, the page's place in its block, the token's prefix id

_WORD = struct.Struct("<Q")
_NAN = 1 << 55  # bit of a word


class FakePages:
    """Maps (page, offset) to what was written there; the offsets of a page are less than `slots`.
    `TimedTransfers` saves and restores it."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.restoring: set[int] = set()  # pages, which no step may use
        self._written: dict[tuple[int, int], Written] = {}
        self.nan: set[tuple[int, int]] = set()  # places that were written with NaN

    @property
    def page_bytes(self) -> int:
        return self.slots * _WORD.size

    def __getitem__(self, place: tuple[int, int]) -> Written | None:
        """Return None for what was never written."""
        return self._written.get(place)

    def __setitem__(self, place: tuple[int, int], written: Written) -> None:
        self._written[place] = written
        self.nan.discard(place)

    def copy(self, src: int, dst: int) -> None:
        """Copy what was written to a page; what wasn't stays as it is."""
        for offset in range(self.slots):
            if (src, offset) in self._written:
                self[dst, offset] = self._written[src, offset]
                if (src, offset) in self.nan:
                    self.nan.add((dst, offset))

    def read(self, pages: Sequence[int]) -> bytes:
        return b"".join(
            _WORD.pack(_to_word(self._written.get(at), at in self.nan))
            for at in self._places(pages)
        )

    def begin(self, pages: Sequence[int]) -> None:
        for place in self._places(pages):
            self._written.pop(place, None)
            self.nan.discard(place)
        self.restoring.update(pages)

    def replace(self, pages: Sequence[int], data: bytes) -> None:
        for place, (word,) in zip(self._places(pages), _WORD.iter_unpack(data), strict=True):
            if place[0] != HOLE and word:
                self[place] = _from_word(word)
                if word & _NAN:
                    self.nan.add(place)
        self.restoring.difference_update(pages)

    def _places(self, pages: Sequence[int]) -> Iterator[tuple[int, int]]:
        return ((page, offset) for page in pages for offset in range(self.slots))


def _to_word(written: Written | None, is_nan: bool) -> int:
    if written is None:
        return 0
    group, place, value = written
    return (group + 1) << 56 | is_nan * _NAN | place << 32 | value


def _from_word(word: int) -> Written:
    return (word >> 56) - 1, word >> 32 & 0x7FFFFF, word & 0xFFFFFFFF
