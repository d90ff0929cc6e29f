"""`StringTokens`: the tokens that stay within a JSON string, whatever the string: which of them may come follows from the characters it has left."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from dovetail.api.grammar import GrammarContext

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dovetail.api.grammar import UInt32

_NOT_PLAIN = frozenset('"\\\x7f').union(map(chr, range(0x20)))  # of a JSON string, but for the first two only where a backslash comes before


class StringTokens:
    """The tokens of two bytes or more that are whole characters, without a quote, a backslash or a control character. All others are `rest`."""

    def __init__(self, context: GrammarContext) -> None:
        self._context = context

    @cached_property
    def characters(self) -> Sequence[int]:
        """How many characters a token is; 0 for one of the rest."""
        stops = self._context.stop_ids
        return [0 if id in stops else _characters(text) for id, text in enumerate(self._context.token_bytes)]

    @cached_property
    def rest(self) -> GrammarContext:
        """The context with no other tokens."""
        context = self._context
        tokens = [None if characters else text for text, characters in zip(context.token_bytes, self.characters, strict=True)]
        return GrammarContext(tokens, context.stop_ids, context.vocab_size)

    @cached_property
    def spelling(self) -> Sequence[int] | None:
        """The token of each byte. None if one of these tokens has a byte that is no token, or there are none of these tokens."""
        single = {text[0]: id for id, text in enumerate(self.rest.token_bytes) if text and len(text) == 1 and id not in self._context.stop_ids}
        needed = {byte for text, characters in zip(self._context.token_bytes, self.characters, strict=True) if characters for byte in text or b""}
        return [single.get(byte, -1) for byte in range(256)] if needed and needed <= single.keys() else None

    def spelled(self, token: int) -> list[int]:
        """Return tokens of the rest with the same bytes."""
        if not self.characters[token]:
            return [token]
        spelling = self.spelling or ()
        return [spelling[byte] for byte in self._context.token_bytes[token] or b""]

    def words(self, room: float) -> tuple[UInt32, UInt32]:
        """Return two masks [ceil(vocab_size / 32)]: of those that are at most `room` characters, and of the rest that add at most as many to the
        string in which they begin."""
        room = int(min(room, len(self._masks) - 1))
        if (masks := self._masks[room]) is None:
            plain, lengths = self._arrays
            few = lengths <= room
            masks = self._masks[room] = _packed(plain & few), _packed(~plain & few)
        return masks

    @cached_property
    def lengths(self) -> Sequence[int]:
        """How many characters a token adds to the string in which it begins, which it may end."""
        texts = zip(self._context.token_bytes, self.characters, strict=True)
        return [characters or _until_quote(text or b"") for text, characters in texts]

    @cached_property
    def _masks(self) -> list[tuple[UInt32, UInt32] | None]:
        return [None] * (max(self.lengths) + 1)

    @cached_property
    def _arrays(self) -> tuple[NDArray[np.bool_], NDArray[np.int32]]:
        """Which ids are these tokens, and all lengths, padded to whole words of a mask."""
        size = -(-self._context.vocab_size // 32) * 32
        plain, lengths = np.zeros(size, np.bool_), np.full(size, np.iinfo(np.int32).max, np.int32)
        plain[: len(self.characters)] = np.array(self.characters) > 0
        lengths[: len(self.lengths)] = self.lengths
        return plain, lengths


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
    characters, escaped = 0, False
    for byte in text:
        if escaped:
            escaped = False
        elif byte == ord('"'):
            break
        else:
            characters += not 0x80 <= byte < 0xC0
            escaped = byte == ord("\\")
    return characters
