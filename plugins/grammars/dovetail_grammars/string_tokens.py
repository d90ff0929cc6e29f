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

    def spelled(self, tokens: Sequence[int]) -> list[int]:
        """Return tokens of the rest with the same bytes."""
        spelling, characters, texts = self.spelling or (), self.characters, self._context.token_bytes
        ids: list[int] = []
        for token in tokens:
            if characters[token]:
                ids += [spelling[byte] for byte in texts[token] or b""]
            else:
                ids.append(token)
        return ids

    def words(self, room: float) -> UInt32:
        """Return the mask [ceil(vocab_size / 32)] of those that are at most `room` characters."""
        room = int(min(room, len(self._masks) - 1))
        if (mask := self._masks[room]) is None:
            mask = self._masks[room] = self._mask(room)
        return mask

    @cached_property
    def _masks(self) -> list[UInt32 | None]:
        return [None] * (max(self.characters) + 1)

    def _mask(self, room: int) -> UInt32:
        within = np.packbits((self._counts > 0) & (self._counts <= room), bitorder="little")
        return within.view("<u4").astype(np.uint32)

    @cached_property
    def _counts(self) -> NDArray[np.int32]:
        counts = np.zeros(-(-self._context.vocab_size // 32) * 32, dtype=np.int32)
        counts[: len(self.characters)] = self.characters
        return counts


def _characters(text: bytes | None) -> int:
    if text is None or len(text) < 2:
        return 0
    try:
        characters = text.decode()
    except UnicodeDecodeError:
        return 0
    return len(characters) if _NOT_PLAIN.isdisjoint(characters) else 0
