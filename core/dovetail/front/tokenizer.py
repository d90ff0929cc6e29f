"""A model's tokenizer: text to token ids and back. A thin cover of transformers' tokenizers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dovetail.checks import unicode_error
from dovetail.errors import MissingExtraError, ModelLoadError, RequestError

GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")  # `tokenizer_class` of a tokenizer.json that needs no class of its own


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text with its token ids: a prompt that was tokenized already."""

    text: str
    token_ids: Sequence[int]
    second: int | None = None  # of a pair of texts: see `dovetail.api.executor.RowPooling`


class Tokenizer:
    """`backend` is the `tokenizers.Tokenizer` behind it, None for one written in Python."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.backend: Any = getattr(tokenizer, "backend_tokenizer", None)

    @classmethod
    def load(cls, directory: Path | str) -> Tokenizer:
        """From a model directory; no code of it is run. Raises `ModelLoadError` if there is none that works, `MissingExtraError` without
        transformers."""
        directory = Path(directory)
        if not directory.is_dir():
            raise ModelLoadError(f"{directory} isn't a directory: a tokenizer is loaded from a model's local directory")
        try:
            tokenizer = _loader(directory).from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        except MissingExtraError:
            raise
        except Exception as error:  # transformers raises whatever its parts do
            reason = " ".join(str(error).split())[:300]
            raise _no_tokenizer(directory, f"{type(error).__name__}: {reason}") from None
        if _is_empty(tokenizer):
            raise _no_tokenizer(directory, "no file with a vocabulary")
        return cls(tokenizer)

    @property
    def transformers(self) -> Any:
        """The tokenizer of transformers, for what this class hasn't."""
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        """Ids that it knows, added tokens included."""
        return len(self._tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """The characters of its longest token: what a text has more of, for each token that it becomes, is rare and strange."""
        return max(map(len, self._tokenizer.get_vocab()), default=0)

    @property
    def bos_token_id(self) -> int | None:
        token_id: int | None = self._tokenizer.bos_token_id
        return token_id

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own; what ends a request is the model's business, see `GenerationDefaults`."""
        token_id: int | None = self._tokenizer.eos_token_id
        return token_id

    @cached_property
    def chat_templates(self) -> dict[str, str]:
        """The model's chat templates by name; a single one is the "default". Empty for a model that only completes text."""
        own: Any = getattr(self._tokenizer, "chat_template", None)
        return own if isinstance(own, dict) else {"default": own} if own else {}

    def use_chat_template(self, text: str) -> None:
        """Take this chat template instead of all of the model's own."""
        self._tokenizer.chat_template = text
        vars(self).pop("chat_templates", None)

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Texts of special tokens by the names that chat templates know them by: "bos_token", "eos_token"."""
        return {name: str(token) for name, token in self._tokenizer.special_tokens_map.items()}

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """`special_tokens`: with those that the model expects around a text, such as BOS. Raises `RequestError` for text that isn't Unicode."""
        [ids] = self.encode_all([text], special_tokens)
        return ids

    def encode_all(self, texts: Sequence[str], special_tokens: bool = True) -> list[list[int]]:
        """Encode each text like `encode`; on all cores, unless the tokenizer is written in Python."""
        for text in texts:
            _check_unicode(text)
        if not texts:
            return []  # transformers can't
        encoded = self._tokenizer(list(texts), add_special_tokens=special_tokens, return_attention_mask=False, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], most: int | None = None) -> list[TokenizedText]:
        """Encode each pair of texts as the model expects it, cut to `most` tokens: of the longer text as many as needed. Raises `RequestError` for
        text that isn't Unicode, and if that is impossible."""
        for pair in pairs:
            for text in pair:
                _check_unicode(text)
        firsts, seconds = map(list, zip(*pairs, strict=True))
        cut = {"truncation": "longest_first", "max_length": most} if most is not None else {}
        try:
            encoded = self._tokenizer(firsts, seconds, return_token_type_ids=True, return_attention_mask=False, verbose=False, **cut)
        except Exception as error:  # the tokenizers library raises whatever it likes
            raise RequestError(f"truncate_prompt_tokens: a pair of texts can't be cut to {most} tokens: {error}") from None
        return [
            TokenizedText("\n".join(pair), ids, types.index(1) if 1 in types else None)
            for pair, ids, types in zip(pairs, encoded["input_ids"], encoded["token_type_ids"], strict=True)
        ]

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """The special tokens that the model expects before a text, and after it."""
        whole, inner = self.encode("a"), self.encode("a", special_tokens=False)
        for start in range(len(whole) - len(inner) + 1):
            if whole[start : start + len(inner)] == inner:
                return whole[:start], whole[start + len(inner) :]
        return [], []

    @property
    def truncates_left(self) -> bool:
        """True if texts that are too long lose their beginning rather than their end."""
        return getattr(self._tokenizer, "truncation_side", "right") == "left"

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Unknown ids are left out."""
        if self.backend is not None:
            text: str = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        else:
            text = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        return text


def _check_unicode(text: str) -> None:
    if error := unicode_error(text):
        raise RequestError(f"the text isn't valid Unicode: half a surrogate pair, {error.object[error.start]!r}, at character {error.start}")


def _no_tokenizer(directory: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"{directory} has no tokenizer that can be loaded ({reason}); name another with `tokenizer:`, or give token ids with detokenize=False"
    )


def _is_empty(tokenizer: Any) -> bool:
    """True if the tokenizer has special tokens alone: transformers makes such a one, for some models, of a directory without tokenizer files."""
    return len(tokenizer) < 100 and not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)


def _loader(directory: Path) -> Any:
    """The transformers class that loads it. `AutoTokenizer` would find the same, but imports torch, which takes seconds and may be missing."""
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
        generic = config.get("tokenizer_class") in GENERIC and (directory / "tokenizer.json").is_file()
    except (OSError, ValueError, AttributeError):  # AutoTokenizer says what is wrong
        generic = False
    try:
        if generic:
            from transformers import PreTrainedTokenizerFast as Loader
        else:
            from transformers import AutoTokenizer as Loader
    except ImportError as error:
        raise MissingExtraError.naming("torch", "tokenizing needs transformers") from error
    return Loader
