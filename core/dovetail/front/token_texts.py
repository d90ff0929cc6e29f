"""Texts of single tokens, as log-probabilities show them: what a token adds to the text before it.

Joined, the texts of a sequence's tokens are the sequence's text. A token that ends within a
character adds nothing; the token that completes the character adds it. Special tokens that
aren't part of the text have their names as texts.
"""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING

from dovetail.errors import UnsupportedError
from dovetail.front.detokenizer import CONTEXT, MAX_HALF, WindowText, byte_pieces, token_text
from dovetail.front.grammars import token_speller

if TYPE_CHECKING:
    from dovetail.front.tokenizer import Tokenizer

MOST_CONTEXT = 4 * CONTEXT  # tokens before one that its text may depend on


class TokenTexts:
    """Texts of a growing sequence's tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        context: Sequence[int] = (),
        unwritten: Container[int] = (),
    ) -> None:
        """`context`: the tokens before, which are not part of the text. `unwritten`: positions
        of tokens that the text leaves out."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._text = token_text(tokenizer, context, skip_special_tokens)
        self._unwritten = unwritten
        self._positions = count()
        self._following = following_texts(tokenizer, skip_special_tokens)
        self._tokens = array("q", () if self._following.is_byte_level else context[-MOST_CONTEXT:])

    def append(self, token_ids: Sequence[int]) -> TextsInOrder:
        """Add tokens, and return what each adds to the text."""
        own = []
        places = []
        for token in token_ids:
            places.append(len(self._tokens))
            is_written = next(self._positions) not in self._unwritten
            text = self._written(token) if is_written else ""
            if not is_written or token in self._skipped:
                text += self._tokenizer.decode([token])
            own.append(text)
        return TextsInOrder(own, places, self)

    def flush(self) -> str:
        """End the text. Returns U+FFFD if it ends within a character."""
        return self._text.flush()

    def following(self, place: int, tokens: Sequence[int]) -> list[str]:
        """Return what other tokens would have added. `place`: of the token that was there, among
        those that became text."""
        return self._following.of(self._tokens[max(0, place - MOST_CONTEXT) : place], tokens)

    def _written(self, token: int) -> str:
        self._tokens.append(token)
        return self._text.append((token,))


@dataclass(frozen=True, slots=True)
class TextsInOrder:
    """Texts of consecutive tokens, and of others in their places."""

    own: list[str]
    places: list[int]  # of each, among the tokens that became text
    source: TokenTexts

    def of(self, index: int, ids: Sequence[int]) -> list[str]:
        """Return the texts of a token and of others in its place. `ids`: its own first."""
        return [self.own[index], *self.source.following(self.places[index], ids[1:])]

    def joined(self, later: TextsInOrder) -> TextsInOrder:
        return TextsInOrder(self.own + later.own, self.places + later.places, self.source)


class FollowingTexts:
    """Texts of tokens that were possible at a position: what each would have added to the text."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._special_ids = tokenizer.special_ids
        self._pieces = byte_pieces(tokenizer, skip_special_tokens)
        self._names: dict[int, str] = {}
        self._wholes: dict[int, str | None] = {}

    @property
    def is_byte_level(self) -> bool:
        return self._pieces is not None

    def of(self, before: Sequence[int], tokens: Sequence[int]) -> list[str]:
        """Return what each of `tokens` adds to the text of `before`."""
        is_within = self._is_within_text(before)
        known = [self._known(token, is_within) for token in tokens]
        texts = [text for text in known if text is not None]
        if len(texts) == len(known):
            return texts
        decoded = self._decoded(before, tokens)
        return [one if text is None else text for text, one in zip(known, decoded, strict=True)]

    def _known(self, token: int, is_within: bool) -> str | None:
        """Return a token's text if it needn't be decoded with the text before. `is_within`: see
        `_is_within_text`."""
        if self._skip and token in self._special_ids:
            return self._name(token)
        return self._whole(token) if is_within else None

    def _is_within_text(self, before: Sequence[int]) -> bool:
        """True if the text before has begun and ends with a whole character."""
        if self._pieces is not None:
            return not _begun_character(self._pieces.joined(before))
        return (
            bool(before) and before[-1] not in self._special_ids and bool(self._whole(before[-1]))
        )

    def _whole(self, token: int) -> str | None:
        """Return a token's text within a text; None if it isn't whole characters, or isn't
        known."""
        if token not in self._wholes:
            spell = speller(self._tokenizer)
            try:
                self._wholes[token] = None if spell is None else spell(token).decode()
            except UnicodeDecodeError:
                self._wholes[token] = None
        return self._wholes[token]

    def _decoded(self, before: Sequence[int], tokens: Sequence[int]) -> list[str]:
        if (pieces := self._pieces) is not None:
            begun = _begun_character(pieces.joined(before))
            return [
                codecs.getincrementaldecoder("utf-8")("replace").decode(begun + pieces[token])
                for token in tokens
            ]
        window = WindowText(self._tokenizer, before[:-MAX_HALF], self._skip)
        window.append(before[-MAX_HALF:])
        return [window.following(token) for token in tokens]

    def _name(self, token: int) -> str:
        if (name := self._names.get(token)) is None:
            name = self._names[token] = self._tokenizer.decode([token])
        return name


@lru_cache(maxsize=8)  # positional only: a keyword would make another key
def following_texts(tokenizer: Tokenizer, skip_special_tokens: bool, /) -> FollowingTexts:
    return FollowingTexts(tokenizer, skip_special_tokens)


@lru_cache(maxsize=8)
def speller(tokenizer: Tokenizer, /) -> Callable[[int], bytes] | None:
    """Return what `token_speller` does; None where it raises `UnsupportedError`."""
    try:
        return token_speller(tokenizer)
    except UnsupportedError:
        return None


def texts_of_prompt(
    tokenizer: Tokenizer, prompt: str | None, token_ids: Sequence[int]
) -> TokenTexts:
    """Return what makes the texts of a prompt's tokens, to be given all of them in order.
    `prompt`: its text, or None if it was given as ids."""
    return TokenTexts(
        tokenizer, skip_special_tokens=False, unwritten=unwritten(tokenizer, prompt, token_ids)
    )


def unwritten(tokenizer: Tokenizer, prompt: str | None, token_ids: Sequence[int]) -> Container[int]:
    """Return the positions of a prompt's tokens that its text doesn't have: those that the
    tokenizer puts around texts. If the prompt was given as token ids (None), all of them are its
    text."""
    if prompt is None:
        return ()
    first, last = tokenizer.around
    ids = list(token_ids)
    end = len(token_ids) - len(last)
    begins = range(len(first)) if ids[: len(first)] == first else range(0)
    ends = range(end, len(ids)) if ids[end:] == last else range(0)
    return {*begins, *ends}


def _begun_character(text: bytes) -> bytes:
    """Return the last bytes, if they begin a character that other bytes complete."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text)
    return decoder.getstate()[0]
