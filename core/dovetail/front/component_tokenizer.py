"""`ComponentTokenizer`: adapts a plugin's tokenizer to the front end. It validates what the plugin
returns, and errors name the plugin."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any

from dovetail.api.executor import ComponentRef
from dovetail.api.tokenizer import Chat, TokenizerContext
from dovetail.api.tokenizer import Tokenizer as Component
from dovetail.errors import (
    DovetailError,
    ModelLoadError,
    PluginError,
    RequestError,
    UnsupportedError,
    describe,
)
from dovetail.front.detokenizer import byte_pieces
from dovetail.front.tokenizer import TokenizedText, Tokenizer, check_unicode

logger = logging.getLogger("dovetail")

_PROBE = ' {"a": [1, "ée\u0301漢 \n\U0001f600"]}'


class ComponentTokenizer(Tokenizer):
    """Reads the vocabulary once, at construction, so that decoding can't fail later. An error in
    `encode` fails only its request."""

    own: Component

    def __init__(self, ref: ComponentRef, directory: Path | str) -> None:
        """`directory`: the model's files. Raises `PluginError` that names the component if it can't
        be created or returns invalid values, and any `DovetailError` that it raises."""
        self.ref = ref
        self.name = ref.name
        try:
            self.own = ref.make(TokenizerContext(Path(directory)))
        except ModelLoadError as error:
            raise ModelLoadError(f"tokenizer {self.name}: {error}") from error
        except (DovetailError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a native library
            raise PluginError(f"tokenizer {self.name}: {describe(error)}") from error
        try:
            self._vocabulary = tuple(self.own.vocabulary())
            if not self._vocabulary or not all(type(piece) is bytes for piece in self._vocabulary):
                raise TypeError(
                    "vocabulary() must return bytes for each id, and have at least one id"
                )
            self._special_ids = frozenset(self._known("special_ids", self.own.special_ids))
            self.eos_ids = tuple(self._known("eos_ids", self.own.eos_ids))
            before, after = self.own.around
            self._around = self._known("around", before), self._known("around", after)
            if (
                self.own.capabilities.exact
                and self.decode(ids := self._known("encode", self.own.encode(_PROBE))) != _PROBE
            ):
                raise ValueError(
                    f"it encodes {_PROBE!r} as {list(ids)}, which decode to {self.decode(ids)!r}: "
                    f"don't declare `exact` if it changes texts"
                )
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise PluginError(f"tokenizer {self.name}: {describe(error)}") from error

    def check_fits(self, vocab_size: int) -> None:
        """Raise `UnsupportedError` if the model has fewer ids than the tokenizer."""
        if self.vocab_size > vocab_size:
            raise UnsupportedError(
                f"tokenizer {self.name} has {self.vocab_size} token ids, but the model only has "
                f"{vocab_size}: they don't match"
            )

    @property
    def vocab_size(self) -> int:
        return len(self._vocabulary)

    @cached_property
    def longest_token(self) -> int:
        return max(map(len, self._vocabulary))

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    @property
    def bytes_of(self) -> Callable[[int], bytes]:
        return lambda token_id: (
            self._vocabulary[token_id] if 0 <= token_id < len(self._vocabulary) else b""
        )

    @property
    def no_template(self) -> str:
        why = (
            "encodes conversations itself"
            if self.encodes_chats
            else "encodes a template's special tokens as text"
        )
        return f"tokenizer {self.name} can't be used with a chat template: it {why}"

    @property
    def encodes_chats(self) -> bool:
        return self.own.capabilities.chat

    @property
    def marks(self) -> str:
        """The names of all special tokens, since there is no template."""
        return "\n".join(self.token_strings(sorted(self._special_ids)))

    def encode_chat(self, chat: Chat) -> list[int]:
        return self._encoded(lambda: self.own.encode_chat(chat))

    def encode_all(self, texts: Sequence[str], special_tokens: bool = True) -> list[list[int]]:
        before, after = self._around if special_tokens else ([], [])
        return [[*before, *self._encoded_text(text), *after] for text in texts]

    def _encoded_text(self, text: str) -> list[int]:
        check_unicode(text)
        ids = self._encoded(lambda: self.own.encode(text))
        if not self._special_ids.isdisjoint(ids):
            special = self._vocabulary[
                next(token_id for token_id in ids if token_id in self._special_ids)
            ]
            raise RequestError(
                f"tokenizer {self.name} encoded a text as the special token "
                f"{special.decode(errors='replace')!r}"
            )
        return ids

    def _encoded(self, encode: Callable[[], Sequence[int]]) -> list[int]:
        """Return the component's ids. Raises `RequestError`, whatever the component raises."""
        try:
            return self._known("encode", encode())
        except RequestError:
            raise
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a native library, too
            logger.exception("a tokenizer failed")
            raise RequestError(f"tokenizer {self.name} failed: {describe(error)}") from error

    def _known(self, what: str, ids: Collection[int]) -> list[int]:
        """Return ids as integers. Raises `TypeError` or `ValueError` for anything else, or ids
        outside the vocabulary."""
        known = [index(token_id) for token_id in ids]
        if known and not 0 <= min(known) <= max(known) < len(self._vocabulary):
            raise ValueError(
                f"{what} has ids from {min(known)} to {max(known)}, expected ids from 0 to "
                f"{len(self._vocabulary) - 1}"
            )
        return known

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], most: int | None = None
    ) -> list[TokenizedText]:
        raise RequestError(
            f"tokenizer {self.name} can't encode pairs of texts: set pooling.template"
        )

    @property
    def around(self) -> tuple[list[int], list[int]]:
        return self._around

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        pieces = byte_pieces(self, skip_special_tokens)
        assert pieces is not None
        return pieces.joined(token_ids).decode(errors="replace")

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        return [self.bytes_of(token_id).decode(errors="replace") for token_id in token_ids]

    def described(self) -> dict[str, Any]:
        special = {
            str(token_id): {"content": self.token_strings([token_id])[0], "special": True}
            for token_id in sorted(self._special_ids)
        }
        return {
            "tokenizer_class": self.name,
            "vocab_size": self.vocab_size,
            "added_tokens_decoder": special,
            "chat_template": None,
        }
