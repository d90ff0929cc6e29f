"""`StringTokens`: tokens that stay within any JSON string, so that only the number of characters
left determines which are allowed."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from dovetail.api.grammar import GrammarContext

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dovetail.api.grammar import UInt32

MOST_MASKS = 1024  # cached, by characters left; some 20 KB each with a large vocabulary
# in a JSON string; the first two only after a backslash
_NOT_PLAIN = frozenset('"\\\x7f').union(map(chr, range(0x20)))


@dataclass(frozen=True, slots=True, eq=False)
class StringMask:
    """Mask of the tokens that aren't plain string content (`rest` of `StringTokens`), at one point
    of a JSON string. Independent of how many more characters the string may have."""

    rest: UInt32
    words: bytes  # of `rest`

    def allows(self, token: int) -> bool:
        return bool(int(self.rest[token >> 5]) >> (token & 31) & 1)


class StringTokens:
    """Tokens of at least two bytes that consist of whole characters, without quotes, backslashes or
    control characters. All others are `rest`."""

    def __init__(self, context: GrammarContext) -> None:
        self._context = context

    @cached_property
    def characters(self) -> Sequence[int]:
        """Number of characters by token; 0 for those of the rest."""
        stops = self._context.stop_ids
        # no list of objects: it is read at random places, once a token
        return array(
            "I",
            [
                0 if id in stops else _characters(text)
                for id, text in enumerate(self._context.token_bytes)
            ],
        )

    @cached_property
    def rest(self) -> GrammarContext:
        """The context with only the tokens of the rest."""
        context = self._context
        tokens = [
            None if characters else text
            for text, characters in zip(context.token_bytes, self.characters, strict=True)
        ]
        return GrammarContext(tokens, context.stop_ids, context.vocab_size)

    @cached_property
    def spelling(self) -> Sequence[int] | None:
        """Token by byte.

        None if one of these tokens contains a byte that is no token, or if there are none of these
        tokens.
        """
        single = {
            text[0]: id
            for id, text in enumerate(self.rest.token_bytes)
            if text and len(text) == 1 and id not in self._context.stop_ids
        }
        needed = {
            byte
            for text, characters in zip(self._context.token_bytes, self.characters, strict=True)
            if characters
            for byte in text or b""
        }
        return (
            [single.get(byte, -1) for byte in range(256)]
            if needed and needed <= single.keys()
            else None
        )

    def spelled(self, token: int) -> list[int]:
        """Return tokens of the rest that have the same bytes together."""
        if not self.characters[token]:
            return [token]
        spelling = self.spelling or ()
        return [spelling[byte] for byte in self._context.token_bytes[token] or b""]

    def within(self, known: StringMask, room: float) -> UInt32:
        """Return the mask [ceil(vocab_size / 32)], not to be modified, in a string with `room`
        characters left: of these tokens, and of the rest as `known`."""
        return self._within(known, int(min(room, self._longest)))

    @cached_property
    def _within(self) -> Callable[[StringMask, int], UInt32]:
        def mask(known: StringMask, room: int) -> UInt32:
            plain, rest = self._masks(room)
            return known.rest & rest | plain

        return lru_cache(MOST_MASKS)(mask)

    @cached_property
    def _masks(self) -> Callable[[int], tuple[UInt32, UInt32]]:
        """Function from a number of characters to two masks: of these tokens with at most that
        many, and of the rest's tokens that add at most that many to the string they begin in."""
        size = -(-self._context.vocab_size // 32) * 32
        plain, lengths = np.zeros(size, np.bool_), np.full(size, self._longest + 1)
        plain[: len(self.characters)] = np.array(self.characters) > 0
        lengths[: len(self.lengths)] = self.lengths
        return cache(
            lambda room: (_packed(plain & (lengths <= room)), _packed(~plain & (lengths <= room)))
        )

    @cached_property
    def _longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def lengths(self) -> Sequence[int]:
        """Number of characters by token that it adds to the string in which it begins, which it may
        end."""
        texts = zip(self._context.token_bytes, self.characters, strict=True)
        return array("I", [characters or _until_quote(text or b"") for text, characters in texts])


def _characters(text: bytes | None) -> int:
    if text is None or len(text) < 2:
        return 0
    try:
        characters = text.decode()
    except UnicodeDecodeError:
        return 0
    return len(characters) if _NOT_PLAIN.isdisjoint(characters) else 0


def _packed(chosen: NDArray[np.bool_]) -> UInt32:
    return np.packbits(chosen, bitorder="little").view("<u4").astype(np.uint32)


def _until_quote(text: bytes) -> int:
    characters = 0
    escaped = False
    for byte in text:
        if escaped:
            escaped = False
        elif byte == ord('"'):
            break
        else:
            characters += not 0x80 <= byte < 0xC0
            escaped = byte == ord("\\")
    return characters
